"""Finds chunks: by vector, by words, by both; and the chunks most like a given one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.index.base import IndexHits, Vector
from kvweave.corpus.lexical import fuse_ranks, search_words
from kvweave.corpus.live_index import LiveIndex
from kvweave.errors import RequestError
from kvweave.types import Chunk, ChunkId, Hit

Mode = Literal["vector", "words", "hybrid"]
MODES: tuple[Mode, ...] = ("vector", "words", "hybrid")


class ChunkSearch:
    """Any thread. Belongs to a knowledge base, which opens and closes the parts."""

    def __init__(self, catalogue: Catalogue, live: LiveIndex, dim: int) -> None:
        self._catalogue = catalogue
        self._live = live
        self._dim = dim

    def staged(
        self,
        query: str | Vector,
        k: int,
        stages: int,
        mode: Mode,
        embed_query: Callable[[str], Vector],
    ) -> Iterator[list[Hit]]:
        """See `KnowledgeBase.search_staged`. `embed_query` is called where a vector is needed."""
        if mode not in MODES:
            raise RequestError(f"no search mode {mode!r}; known: {', '.join(MODES)}")
        if k < 1 or stages < 1:
            raise RequestError(f"k and stages must be at least 1, got k={k}, stages={stages}")
        if mode == "vector":
            vector = embed_query(query) if isinstance(query, str) else query
            for found in self._live.search_staged(vector, k, stages):
                yield self._hits(_scored(found))
            return
        if not isinstance(query, str):
            raise RequestError(f"a search by {mode} needs the query's words, not its vector")
        if mode == "words":
            yield self._hits(search_words(self._catalogue, query, k))
            return
        vector = embed_query(query)
        depth = max(50, 4 * k)  # a chunk that both rank low may still win together
        words = [vector_id for vector_id, _ in search_words(self._catalogue, query, depth)]
        for found in self._live.search_staged(vector, depth, stages):
            yield self._hits(fuse_ranks([found.ids.tolist(), words], k))

    def nearest(self, chunks: Sequence[Chunk], n: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """See `KnowledgeBase.nearest`."""
        if n < 1:
            raise RequestError(f"a chunk has at least 1 neighbour, got {n}")
        vectors = self._catalogue.vectors_of_chunks([c.id for c in chunks], self._dim)
        return {c.id: self._nearest(c, vectors[c.id], n) for c in chunks if c.id in vectors}

    def _nearest(self, chunk: Chunk, vector: Vector, n: int) -> tuple[ChunkId, ...]:
        k = n + 4  # itself, and some room for copies
        while True:
            found = self._live.search(vector, k)
            words = {_words(chunk)}
            others: list[ChunkId] = []
            for other, _, _ in self._hits(_scored(found)):
                if other.id != chunk.id and _words(other) not in words:
                    words.add(_words(other))
                    others.append(other.id)
            if len(others) >= n or len(found.ids) < k:
                return tuple(others[:n])
            k *= 4

    def _hits(self, found: Sequence[tuple[int, float]]) -> list[Hit]:
        """Vectors whose chunk went since they were found are left out."""
        there = self._catalogue.chunks_of_vectors([vector_id for vector_id, _ in found])
        return [
            Hit(there[vector_id].chunk, score, there[vector_id].document)
            for vector_id, score in found
            if vector_id in there
        ]


def _scored(found: IndexHits) -> list[tuple[int, float]]:
    return list(zip(found.ids.tolist(), found.scores.tolist(), strict=True))


def _words(chunk: Chunk) -> str:
    """What a chunk says, without its title line and however it is spaced."""
    return " ".join(chunk.text.removeprefix(chunk.title).split())
