"""What a vector index promises, and the order in which hits come.

Shapes: N vectors, D dimensions. Vectors have length 1, scores are inner products: cosines.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import RequestError

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Vector = NDArray[np.float32]  # [D]
Vectors = NDArray[np.float32]  # [N, D]


SEARCH_EFFORT = 128  # see bench/retrieval.py


class IndexHits(NamedTuple):
    """Best first; equal scores by ascending id. Fewer than k when the index holds fewer."""

    ids: Ids
    scores: Scores


class VectorIndex(ABC):
    """Finds the nearest of many vectors.

    `search` and `search_staged` may run in many threads at once. `add` and `remove` need the index
    alone; the knowledge base sees to it. Between two stages of a staged search others may add and
    remove: the later stages then see a mixture, and the last one is still a valid answer.
    Ids are chosen by the caller and ascend: `add` never gets an id at or below an earlier one, so
    adding what is there already (after a crash) is recognised and harmless.
    """

    kind: str
    dim: int
    learns_from_first_add = False  # the first `add` should bring every vector there is

    @property
    def shared(self) -> bool:
        """Whether it lives on a server: only the writer changes it, and nothing is saved here."""
        return False

    @property
    def wants_rebuild(self) -> bool:
        """Whether too many were removed, or it has grown far beyond what it was trained on."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Vectors that a search can find."""

    @abstractmethod
    def ids(self) -> Ids:
        """All ids that a search can find, ascending."""

    @abstractmethod
    def add(self, ids: Ids, vectors: Vectors) -> None: ...

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Never found again from now on. Unknown ids are ignored."""

    def search(self, vector: Vector, k: int) -> IndexHits:
        *_, final = self.search_staged(vector, k, 1)
        return final

    @abstractmethod
    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        """The current top-k after each stage, the last one equal to what `search` returns.

        `num_stages` of them. Stopping early costs nothing.
        """

    @abstractmethod
    def num_stages(self, k: int, stages: int) -> int:
        """The stages that `search_staged` has if it may have `stages`: at least one. As many while
        nobody adds."""


def take_best(ids: Ids, scores: Scores, k: int) -> IndexHits:
    """The best k in the one order that all indexes share."""
    best = np.lexsort((ids, -scores))[:k]
    return IndexHits(ids[best], scores[best])


def merge(a: IndexHits, b: IndexHits, k: int) -> IndexHits:
    return take_best(np.concatenate([a.ids, b.ids]), np.concatenate([a.scores, b.scores]), k)


def nothing() -> IndexHits:
    return IndexHits(np.empty(0, np.int64), np.empty(0, np.float32))


class GraphIndex(VectorIndex):
    """An index that cannot take a walk up again: what comes before the full walk is lost.

    So a staged search has one walk before it, of a quarter of the effort: it compares a third as
    often, and in nine of ten cases it ends with the list of the full one (bench/retrieval.py).
    """

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        query = check_query(vector, self.dim, k, stages)
        yield from self._walks(query, k, _efforts(k, stages))

    def num_stages(self, k: int, stages: int) -> int:
        return len(_efforts(k, stages))

    def _walks(self, query: Vectors, k: int, efforts: list[int]) -> Iterator[IndexHits]:
        """What walks of these efforts find, the last one the full one."""
        for effort in efforts:
            yield self._walk(query, k, effort)

    @abstractmethod
    def _walk(self, query: Vectors, k: int, effort: int) -> IndexHits:
        """The best k that a walk with so many candidates finds."""


def _efforts(k: int, stages: int) -> list[int]:
    """Candidates that the walks of a search keep, one walk after the other."""
    full = max(SEARCH_EFFORT, 2 * k)
    first = max(k, full // 4)  # fewer candidates than k could not fill the list
    return [first, full] if stages > 1 and first < full else [full]


def check_query(vector: Vector, dim: int, k: int, stages: int = 1) -> Vector:
    """The query as FAISS wants it: [1, D], contiguous float32."""
    if k < 1 or stages < 1:
        raise RequestError(f"k and stages must be at least 1, got k={k}, stages={stages}")
    query = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
    if query.shape[1] != dim:
        raise RequestError(f"the query has {query.shape[1]} dimensions, the index {dim}")
    return query
