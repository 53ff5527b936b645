"""A LangChain retriever over a knowledge base of a running server.

    from kvweave.clients.langchain import KVWeaveRetriever

    retriever = KVWeaveRetriever(url="http://127.0.0.1:8321", kb="handbook", k=4)
    retriever.invoke("How wide is a zorb?")

Chat and embeddings need nothing of ours: `ChatOpenAI` and `OpenAIEmbeddings` with the server's
address. Needs langchain-core, which is not installed with kvweave.
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from kvweave.clients.server import ServerClient


class KVWeaveRetriever(BaseRetriever):
    """Finds chunks of one knowledge base."""

    url: str  # of the server
    kb: str
    k: int = 5
    retrieval: str | None = None  # vector, words or hybrid; None: as the server is configured
    min_score: float | None = None
    filter: dict[str, Any] = {}  # noqa: RUF012 - a field of a model, copied for each
    api_key: str | None = None  # None: KVWEAVE_API_KEY, if that is set

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        hits = ServerClient(self.url, self.api_key).search(
            self.kb,
            query,
            self.k,
            retrieval=self.retrieval,
            min_score=self.min_score,
            filter=self.filter,
        )
        return [
            Document(
                id=hit["id"],
                page_content=hit["text"],
                metadata={name: hit[name] for name in ("title", "document", "score", "tier")},
            )
            for hit in hits
        ]
