"""Vector indexes behind one interface. `make_index` knows the kinds; the rest uses VectorIndex."""

from urllib.parse import urlsplit

from kvweave.corpus.index.base import IndexHits, VectorIndex
from kvweave.corpus.index.faiss_index import FaissIndex
from kvweave.corpus.index.flat import FlatIndex
from kvweave.corpus.index.hnsw import HnswIndex
from kvweave.corpus.index.ivf import IvfIndex
from kvweave.errors import ConfigError

__all__ = ["AUTO", "KINDS", "IndexHits", "VectorIndex", "is_remote", "make_index", "resolve_kind"]

AUTO = "auto"
FLAT_LIMIT = 50_000  # up to here comparing everything costs a few ms: bench/retrieval.py
HNSW_LIMIT = 2_000_000  # beyond, the graph's memory and build time outweigh its speed


KINDS: dict[str, type[FaissIndex]] = {"flat": FlatIndex, "ivf": IvfIndex, "hnsw": HnswIndex}


def is_remote(kind: str) -> bool:
    """A Qdrant server by URL, or qdrant-client's own in-memory mode."""
    return kind == ":memory:" or urlsplit(kind).scheme in ("qdrant", "qdrants", "http", "https")


def check_kind(kind: str) -> str:
    if kind in (AUTO, *KINDS) or is_remote(kind):
        return kind
    known = ", ".join((AUTO, *KINDS))
    raise ConfigError(
        f"no index kind {kind!r}; known: {known}, or the URL of a Qdrant server (qdrant://host:6333)"
    )


def resolve_kind(kind: str, num_vectors: int) -> str:
    """`auto` by size; anything else is taken as it is."""
    if kind != AUTO:
        return kind
    if num_vectors <= FLAT_LIMIT:
        return "flat"
    return "hnsw" if num_vectors <= HNSW_LIMIT else "ivf"


def make_index(
    kind: str, dim: int, *, collection: str, owner: str = "", api_key: str | None = None
) -> VectorIndex:
    """An empty local index, or the Qdrant collection of that name with what `owner` put there."""
    if is_remote(kind):
        from kvweave.corpus.index.qdrant import QdrantIndex

        return QdrantIndex.connect(kind, dim, collection, owner=owner, api_key=api_key)
    return KINDS[kind](dim)
