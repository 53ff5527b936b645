"""A Qdrant collection as a vector index, for knowledge bases that outgrow one machine.

The catalogue stays the truth; the collection holds vector ids and vectors, no text. Adding and
removing are idempotent there, so a writer that died half-way simply repeats what it last sent.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from kvweave.corpus.index.base import (
    GraphIndex,
    Ids,
    IndexHits,
    Vectors,
    nothing,
    take_best,
)
from kvweave.errors import ConfigError, CorpusError, error_words

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

BATCH = 512  # points per request: about 1 MB at 384 dimensions
TIMEOUT_S = 30
OWNER = "knowledge_base"  # the one field of a point's payload


class QdrantIndex(GraphIndex):
    """One collection. A staged search asks twice, with growing effort, as for HNSW; at once, since
    the server has cores of its own and a second way there would be waited for."""

    kind = "qdrant"

    def __init__(
        self, client: "QdrantClient", dim: int, collection: str, url: str, owner: str = ""
    ) -> None:
        self.owner = owner  # every point carries it: a collection belongs to one knowledge base
        self.dim = dim
        self.collection = collection
        self.url = url
        self._client = client

    @classmethod
    def connect(
        cls, url: str, dim: int, collection: str, *, owner: str = "", api_key: str | None = None
    ) -> "QdrantIndex":
        """Open or create the collection. A path in the URL names another collection.

        Refuses a collection of another shape, and one that holds what `owner` did not put there.
        """
        try:
            from qdrant_client import QdrantClient, models
        except ImportError as error:
            raise ConfigError(
                f"the index {url} needs qdrant-client; pip install 'kvweave[qdrant]'"
            ) from error
        parts = urlsplit(url)
        collection = parts.path.strip("/") or collection
        with _as_corpus_error(url):
            if url == ":memory:":
                client = QdrantClient(":memory:", force_disable_check_same_thread=True)
                collection = "memory"
            else:
                client = QdrantClient(
                    host=parts.hostname or "localhost",
                    port=parts.port or 6333,
                    https=parts.scheme in ("https", "qdrants"),
                    api_key=api_key,
                    timeout=TIMEOUT_S,
                    check_compatibility=False,  # it prints instead of raising
                )
            if not client.collection_exists(collection):
                client.create_collection(
                    collection,
                    vectors_config=models.VectorParams(size=dim, distance=models.Distance.DOT),
                )
            index = cls(client, dim, collection, url, owner)
            index._check_shape()
            index._check_owner()
        return index

    @property
    def shared(self) -> bool:
        """A server outlives this process and has other clients; memory has neither."""
        return self.url != ":memory:"

    def __len__(self) -> int:
        with _as_corpus_error(self.url):
            return int(self._client.count(self.collection, exact=True).count)

    def ids(self) -> Ids:
        found: list[int] = []
        offset: Any = None
        with _as_corpus_error(self.url):
            while True:
                points, offset = self._client.scroll(
                    self.collection, limit=4096, offset=offset, with_payload=False
                )
                found += [int(point.id) for point in points]
                if offset is None:
                    return np.array(sorted(found), np.int64)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        from qdrant_client import models

        with _as_corpus_error(self.url):
            self._check_owner()
            for start in range(0, len(ids), BATCH):
                part = slice(start, start + BATCH)
                batch = models.Batch(
                    ids=ids[part].tolist(),
                    vectors=vectors[part].tolist(),
                    payloads=[{OWNER: self.owner}] * len(ids[part]),
                )
                self._client.upsert(self.collection, batch, wait=True)

    def remove(self, ids: Ids) -> None:
        from qdrant_client import models

        with _as_corpus_error(self.url):
            self._check_owner()
            for start in range(0, len(ids), BATCH):
                points = models.PointIdsList(points=ids[start : start + BATCH].tolist())
                self._client.delete(self.collection, points, wait=True)

    def _walks(self, query: Vectors, k: int, efforts: list[int]) -> Iterator[IndexHits]:
        if not self.shared or len(efforts) == 1:
            yield from super()._walks(query, k, efforts)
            return
        asking = ThreadPoolExecutor(len(efforts))
        try:
            walks = [asking.submit(self._walk, query, k, effort) for effort in reversed(efforts)]
            full = walks[0]
            for walk in reversed(walks):
                wait((full, walk), return_when=FIRST_COMPLETED)
                yield (full if full.done() else walk).result()  # no short walk is waited for
        finally:
            asking.shutdown(wait=False)

    def _walk(self, query: Vectors, k: int, effort: int) -> IndexHits:
        from qdrant_client import models

        # in memory every search is exact, and asking for effort is answered with a warning
        settings = models.SearchParams(hnsw_ef=effort) if self.shared else None
        with _as_corpus_error(self.url):
            points = self._client.query_points(
                self.collection,
                query=query[0].tolist(),
                limit=k,
                search_params=settings,
                with_payload=False,
            ).points
        if not points:
            return nothing()
        ids = np.array([int(point.id) for point in points], np.int64)
        return take_best(ids, np.array([point.score for point in points], np.float32), k)

    def _check_shape(self) -> None:
        config = self._client.get_collection(self.collection).config.params.vectors
        size = getattr(config, "size", None)
        if size != self.dim:
            raise ConfigError(
                f"collection {self.collection!r} at {self.url} holds vectors of {size} dimensions, "
                f"the embedder makes {self.dim}; name another collection in the URL's path"
            )
        distance = str(getattr(config, "distance", None))
        if distance.rpartition(".")[2].lower() not in ("dot", "cosine"):  # equal at length 1
            raise ConfigError(
                f"collection {self.collection!r} at {self.url} compares by {distance}, not by "
                "inner product; name another collection in the URL's path"
            )

    def _check_owner(self) -> None:
        """One point tells: a knowledge base never writes into the collection of another one."""
        points, _ = self._client.scroll(self.collection, limit=1, with_payload=True)
        if points and (points[0].payload or {}).get(OWNER) != self.owner:
            raise ConfigError(
                f"collection {self.collection!r} at {self.url} holds vectors that are not of this "
                "knowledge base; name another collection in the URL's path"
            )


@contextmanager
def _as_corpus_error(url: str) -> Iterator[None]:
    """A server that is down or refuses is trouble in the world, told in one line."""
    from qdrant_client.http.exceptions import ApiException

    try:
        yield
    except (ApiException, OSError) as error:
        raise CorpusError(
            f"the vector index at {url} does not answer ({error_words(error, 200)}); start it or "
            "ingest into a knowledge base with a local index"
        ) from error
