"""A LlamaIndex retriever over a knowledge base of a running server.

    from kvweave.clients.llamaindex import KVWeaveNodeRetriever

    retriever = KVWeaveNodeRetriever("http://127.0.0.1:8321", "handbook", k=4)
    retriever.retrieve("How wide is a zorb?")

Its LLM is `OpenAILike` with the server's address. Needs llama-index-core, which is not installed
with kvweave.
"""

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from kvweave.clients.server import ServerClient


class KVWeaveNodeRetriever(BaseRetriever):
    """Finds chunks of one knowledge base."""

    def __init__(
        self, url: str, kb: str, k: int = 5, *, api_key: str | None = None, **fields: Any
    ) -> None:
        """`fields` are those of a search: `retrieval`, `min_score`, `filter`."""
        self._client = ServerClient(url, api_key)
        self._kb, self._k, self._fields = kb, k, fields
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self._client.search(self._kb, query_bundle.query_str, self._k, **self._fields)
        return [
            NodeWithScore(
                node=TextNode(
                    id_=hit["id"],
                    text=hit["text"],
                    metadata={name: hit[name] for name in ("title", "document", "tier")},
                ),
                score=hit["score"],
            )
            for hit in hits
        ]
