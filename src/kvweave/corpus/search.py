"""Finds chunks: by vector, by words, by both, among some documents or all; and the chunks most like
a given one.

The words live in the catalogue's own full-text table (SQLite FTS5), so they change in the same
transaction as the chunks: a removed document is gone from this search at once, and no index has to
be built again. bm25s is faster per query (1–3 ms against 8–40 ms on 36k passages, equal recall)
but needs a rebuild after every change; bench/retrieval.py measures both.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.catalogue_index import CatalogueIndex
from kvweave.corpus.index.base import IndexHits, Vector
from kvweave.corpus.metadata import MetadataFilter
from kvweave.corpus.removals import VectorIds
from kvweave.corpus.reranker import find_reranker
from kvweave.errors import RequestError
from kvweave.types import Chunk, ChunkId, Hit

Retrieval = Literal["vector", "words", "hybrid"]
RETRIEVALS: tuple[Retrieval, ...] = ("vector", "words", "hybrid")
WORD = re.compile(r"\w+")
MAX_WORDS = 64  # a question, not a document
RRF_OFFSET = 60  # the constant of Cormack, Clarke and Büttcher, 2009
# Words that most passages contain: they cost the search its time and say nothing.
STOP_WORDS = frozenset(
    """a an and are as at be been but by can could did do does for from had has have he her him his
    how i if in into is it its me my no not of on or our she so some than that the their them then
    there these they this to up us was we were what when where which who whom whose why will with
    would you your""".split()  # noqa: SIM905 – words read better as words
)
SCANNED = 4096  # vectors of a filter's documents that are compared one by one
RERANKED, LEAST_RERANKED = 4, 20  # times k, and at least: what a reranker sees
READ_AT_ONCE = 4  # chunks that a reranker reads in a stage, at least


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How chunks are found. Raises RequestError if it cannot be meant.

    Scores are of the kind of search: cosines by vector, BM25 by words, sums of reciprocal ranks by
    both (first in both lists is 2/61), the reranker's own where there is one.
    """

    retrieval: Retrieval = "vector"
    min_score: float | None = None  # chunks below it are left out; None: none are
    filter: MetadataFilter = field(default_factory=MetadataFilter)  # of their documents
    reranker: str | None = None  # by name; None: none

    def __post_init__(self) -> None:
        if self.retrieval not in RETRIEVALS:
            known = ", ".join(RETRIEVALS)
            raise RequestError(f"retrieval {self.retrieval!r} is unknown; known: {known}")
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise RequestError(f"min_score {self.min_score} is no number; give one such as 0.3")

    @property
    def is_staged(self) -> bool:
        """A search may say what it has so far: later stages only add. Words are found in one go,
        and so is what is near among some documents; a reranker reads a part of it at a time."""
        return self.reranker is not None or (self.retrieval != "words" and not self.filter)

    @property
    def needs_words(self) -> bool:
        """The query's vector is not enough."""
        return self.retrieval != "vector" or self.reranker is not None

    @property
    def kind(self) -> str:
        """What takes a search as long as it takes."""
        return f"{self.retrieval} {self.reranker or ''} {bool(self.filter)}"


class ChunkSearch:
    """Any thread. Belongs to a knowledge base, which opens and closes the parts."""

    def __init__(self, catalogue: Catalogue, index: CatalogueIndex, dim: int) -> None:
        self._catalogue = catalogue
        self._index = index
        self._dim = dim

    def search_staged(
        self,
        query: str | Vector,
        k: int,
        stages: int,
        how: SearchOptions,
        embed_query: Callable[[str], Vector],
    ) -> Iterator[list[Hit]]:
        """The current hits after each stage. `embed_query` is called where a vector is needed."""
        if k < 1 or stages < 1:
            raise RequestError(f"k and stages must be at least 1, got k={k}, stages={stages}")
        if how.needs_words and not isinstance(query, str):
            by = how.retrieval if how.reranker is None else "reranker"
            raise RequestError(f"a search by {by} needs the query's words, not its vector")
        if how.reranker is not None:
            assert isinstance(query, str), "looked at above"
            yield from self._rerank(query, k, stages, how, embed_query)
            return
        for hits in self._find_staged(query, k, stages, how, embed_query):
            least = -math.inf if how.min_score is None else how.min_score
            yield [hit for hit in hits if hit.score >= least]

    def _find_staged(
        self,
        query: str | Vector,
        k: int,
        stages: int,
        how: SearchOptions,
        embed_query: Callable[[str], Vector],
    ) -> Iterator[list[Hit]]:
        allowed = self._catalogue.vectors_where(how.filter) if how.filter else None
        if how.retrieval == "vector":
            vector = embed_query(query) if isinstance(query, str) else query
            if allowed is not None:
                yield self._hits(_score_pairs(self._among(vector, k, allowed)), how.filter)
                return
            for found in self._index.search_staged(vector, k, stages):
                yield self._hits(_score_pairs(found))
            return
        assert isinstance(query, str), "looked at by `search_staged`"
        if how.retrieval == "words":
            yield self._hits(search_words(self._catalogue, query, k, how.filter), how.filter)
            return
        vector = embed_query(query)
        depth = _depth(k)
        matches = search_words(self._catalogue, query, depth, how.filter)
        words = [vector_id for vector_id, _ in matches]
        if allowed is not None:
            near = self._among(vector, depth, allowed)
            yield self._hits(fuse_ranks([near.ids.tolist(), words], k), how.filter)
            return
        for found in self._index.search_staged(vector, depth, stages):
            yield self._hits(fuse_ranks([found.ids.tolist(), words], k))

    def num_stages(self, k: int, stages: int, how: SearchOptions) -> int:
        """The stages that `search_staged` has if it may have `stages`."""
        if how.reranker is not None:
            return min(stages, _num_reranked(k) // READ_AT_ONCE)
        if not how.is_staged:
            return 1
        return self._index.num_stages(k if how.retrieval == "vector" else _depth(k), stages)

    def _rerank(
        self,
        query: str,
        k: int,
        stages: int,
        how: SearchOptions,
        embed_query: Callable[[str], Vector],
    ) -> Iterator[list[Hit]]:
        """Likely ones first: a stage scores a part of what was found, in the order of finding."""
        assert how.reranker is not None, "`search_staged` looked"
        plain = replace(how, reranker=None, min_score=None)
        *_, hits = self._find_staged(query, _num_reranked(k), 1, plain, embed_query)
        least = -math.inf if how.min_score is None else how.min_score
        reranker, best = find_reranker(how.reranker), list[Hit]()
        for part in np.array_split(np.arange(len(hits)), self.num_stages(k, stages, how)):
            read = [hits[place] for place in part]
            scores = reranker.scores(query, [hit.chunk.text for hit in read])
            best += [hit._replace(score=score) for hit, score in zip(read, scores, strict=True)]
            best.sort(key=lambda hit: -hit.score)  # equal ones stay as they were found
            yield [hit for hit in best if hit.score >= least][:k]

    def _among(self, vector: Vector, k: int, allowed: VectorIds) -> IndexHits:
        """The nearest of these vectors: a few are compared one by one, of many the index finds more
        and more until enough of them are among those."""
        if len(allowed) <= SCANNED:
            ids, vectors = self._catalogue.vectors(allowed, self._dim)
            scores = (vectors.astype(np.float64) * vector).sum(axis=1).astype(np.float32)
            best = np.lexsort((ids, -scores))[:k]
            return IndexHits(ids[best], scores[best])
        wanted = k
        while True:
            found = self._index.search(vector, wanted)
            is_in = np.isin(found.ids, allowed)
            if is_in.sum() >= k or len(found.ids) < wanted:
                return IndexHits(found.ids[is_in][:k], found.scores[is_in][:k])
            wanted *= 4

    def nearest(self, chunks: Sequence[Chunk], n: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """For each chunk the ids of the `n` others most like it (`KnowledgeBase.nearest`)."""
        if n < 1:
            raise RequestError(f"a chunk has at least 1 neighbour, got {n}")
        vectors = self._catalogue.vectors_of_chunks([c.id for c in chunks], self._dim)
        return {c.id: self._nearest(c, vectors[c.id], n) for c in chunks if c.id in vectors}

    def _nearest(self, chunk: Chunk, vector: Vector, n: int) -> tuple[ChunkId, ...]:
        k = n + 4  # itself, and some room for copies
        while True:
            found = self._index.search(vector, k)
            words = {_words(chunk)}
            others: list[ChunkId] = []
            for other, _, _ in self._hits(_score_pairs(found)):
                if other.id != chunk.id and _words(other) not in words:
                    words.add(_words(other))
                    others.append(other.id)
            if len(others) >= n or len(found.ids) < k:
                return tuple(others[:n])
            k *= 4

    def _hits(
        self, found: Sequence[tuple[int, float]], among: MetadataFilter | None = None
    ) -> list[Hit]:
        """Vectors whose chunk went since they were found are left out. Documents are of those that
        a filter holds for."""
        ids = [vector_id for vector_id, _ in found]
        there = self._catalogue.chunks_of_vectors(ids, among)
        return [
            Hit(there[vector_id].chunk, score, there[vector_id].document)
            for vector_id, score in found
            if vector_id in there
        ]


def _depth(k: int) -> int:
    """So many of each kind are joined: a chunk that both rank low may still win together."""
    return max(50, 4 * k)


def _num_reranked(k: int) -> int:
    return max(RERANKED * k, LEAST_RERANKED)


def match_expression(query: str) -> str | None:
    """Any of the query's words, as FTS5 wants them: quoted, so that none is read as an operator."""
    words = list(dict.fromkeys(WORD.findall(query.lower())))
    telling = [word for word in words if word not in STOP_WORDS] or words
    return " OR ".join(f'"{word}"' for word in telling[:MAX_WORDS]) or None


def search_words(
    catalogue: Catalogue, query: str, k: int, among: MetadataFilter | None = None
) -> list[tuple[int, float]]:
    """(vector id, score), best first."""
    expression = match_expression(query)
    return [] if expression is None else catalogue.match_words(expression, k, among)


def fuse_ranks(rankings: Sequence[Sequence[int]], k: int) -> list[tuple[int, float]]:
    """Reciprocal-rank fusion: only places count, so scores of different kinds need no scale."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for place, vector_id in enumerate(ranking, start=1):
            scores[vector_id] = scores.get(vector_id, 0.0) + 1.0 / (RRF_OFFSET + place)
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return best[:k]


def _score_pairs(found: IndexHits) -> list[tuple[int, float]]:
    return list(zip(found.ids.tolist(), found.scores.tolist(), strict=True))


def _words(chunk: Chunk) -> str:
    """What a chunk says, without its title line and however it is spaced."""
    return " ".join(chunk.text.removeprefix(chunk.title).split())
