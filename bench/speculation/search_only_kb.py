"""What bench/speculation/run.py searches: an index large enough to take a while, here or elsewhere.

"elsewhere" plays a search back that was measured by itself: the same lists after the same times,
while this process sleeps.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvweave.app.answer.guessing import MAX_STAGES
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.embedder import Vectors
from kvweave.corpus.index.base import IndexHits, Vector
from kvweave.corpus.index.ivf import IvfIndex
from kvweave.corpus.knowledge_base import BY_VECTOR
from kvweave.corpus.search import SearchOptions
from kvweave.text.prompt import Document, chunk_text
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, Hit
from speculation.modes import Learnt

FAINT = 0.01  # what copies are scaled by: below every passage that is looked for


class LargeIndex(IvfIndex):
    """An IVF index that probes a chosen share of its clusters."""

    share = 1.0

    @property
    def num_probes(self) -> int:
        assert self.faiss_index is not None
        return max(1, round(int(self.faiss_index.nlist) * self.share))


def make_large(vectors: Vectors, copies: int) -> LargeIndex:
    index = LargeIndex(vectors.shape[1])
    for copy in range(copies):
        ids = np.arange(1, len(vectors) + 1, dtype=np.int64) + copy * len(vectors)
        index.add(ids, vectors if copy == 0 else vectors * np.float32(FAINT))
    return index


@dataclass
class SearchOnlyKB:
    """As much of a knowledge base as a search needs: questions are embedded already."""

    index: LargeIndex
    passages: Sequence[dict[str, str]]
    tokenizer: Tokenizer
    vectors: dict[str, Vector]
    searched_s: float = 0.0  # the last plain search
    elsewhere: bool = False
    _chunks: dict[int, Chunk] = field(default_factory=dict)
    _played: dict[tuple[bytes, float, int], list[tuple[float, IndexHits]]] = field(
        default_factory=dict
    )

    @property
    def embedder(self) -> "SearchOnlyKB":
        return self

    def embed_query(self, text: str) -> Vector:
        return self.vectors[text]

    def search(self, vector: Vector, k: int, how: SearchOptions = BY_VECTOR) -> list[Hit]:
        started_s = time.perf_counter()
        *_, hits = self.search_staged(vector, k, 1, how)
        self.searched_s = time.perf_counter() - started_s
        return hits

    def load_index(self) -> None:
        """It is there."""

    def num_stages(self, k: int, stages: int, how: SearchOptions = BY_VECTOR) -> int:
        return self.index.num_stages(k, stages)

    def search_staged(
        self, vector: Vector, k: int, stages: int, how: SearchOptions = BY_VECTOR
    ) -> Iterator[list[Hit]]:
        assert how.is_staged, "questions are embedded: words are not needed"
        if not self.elsewhere:
            return (self._hits(found) for found in self.index.search_staged(vector, k, stages))
        return self._replayed(vector, stages)

    def _replayed(self, vector: Vector, stages: int) -> Iterator[list[Hit]]:
        for seconds, found in self.played(vector, stages):
            time.sleep(seconds)
            yield self._hits(found)

    def played(self, vector: Vector, stages: int) -> list[tuple[float, IndexHits]]:
        """A search that was recorded: what each stage took, and its list."""
        return self._played[(vector.tobytes(), self.index.share, stages)]

    def learnt(self, vector: Vector, k: int) -> Learnt:
        """A search by itself, in all its stages; that is also what it takes elsewhere."""
        started_s = time.perf_counter()
        lists = [found.ids.tolist() for found in self.index.search_staged(vector, k, MAX_STAGES)]
        return Learnt(time.perf_counter() - started_s, lists)

    def record(self, vector: Vector, k: int) -> None:
        """Measure a search by itself, for when it is done elsewhere."""
        for stages in range(1, MAX_STAGES + 1):
            run, since_s = [], time.perf_counter()
            for found in self.index.search_staged(vector, k, stages):
                run.append((time.perf_counter() - since_s, found))
                since_s = time.perf_counter()
            self._played[(vector.tobytes(), self.index.share, stages)] = run
            for _, found in run:
                self._hits(found)  # so that its chunks are tokenised

    def chunk_ids(self) -> dict[int, tuple[int, ...]]:
        """Token ids of all chunks that were found so far, by their numbers in the index."""
        return {place + 1: chunk.token_ids for place, chunk in self._chunks.items()}

    def _hits(self, found: IndexHits) -> list[Hit]:
        return [
            Hit(self._chunk(int(vector_id) - 1), float(score))
            for vector_id, score in zip(found.ids, found.scores, strict=True)
        ]

    def _chunk(self, place: int) -> Chunk:
        """A knowledge base has its chunks tokenised, so that is not part of a search."""
        if place not in self._chunks:
            self._chunks[place] = self._tokenised(place)
        return self._chunks[place]

    def _tokenised(self, place: int) -> Chunk:
        passage = self.passages[place]  # an IndexError would be a copy that was found
        text = chunk_text(Document(passage["text"], passage["title"]))
        ids = tuple(self.tokenizer.encode_text(text))
        return Chunk(make_chunk_id(ids), passage["title"], text, ids)
