"""What a vector index promises, and the order in which hits come.

Shapes: N vectors, D dimensions. Vectors have length 1, scores are inner products: cosines.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import RequestError

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Vector = NDArray[np.float32]  # [D]
Vectors = NDArray[np.float32]  # [N, D]


class IndexHits(NamedTuple):
    """Best first; equal scores by ascending id. Fewer than k when the index holds fewer."""

    ids: Ids
    scores: Scores


class VectorIndex(Protocol):
    """Finds the nearest of many vectors.

    `search` and `search_staged` may run in many threads at once. `add` and `remove` need the index
    alone; the knowledge base sees to it. Between two stages of a staged search others may add and
    remove: the later stages then see a mixture, and the last one is still a valid answer.
    Ids are chosen by the caller and ascend: `add` never gets an id at or below an earlier one, so
    adding what is there already (after a crash) is recognised and harmless.
    """

    kind: str
    dim: int
    learns_from_first_add: bool  # it should bring everything there is

    @property
    def shared(self) -> bool:
        """It lives on a server: only the writer changes it, and nothing is saved here."""
        ...

    def __len__(self) -> int:
        """Vectors that a search can find."""
        ...

    def ids(self) -> Ids:
        """All ids that a search can find, ascending."""
        ...

    def add(self, ids: Ids, vectors: Vectors) -> None: ...

    def remove(self, ids: Ids) -> None:
        """Never found again from now on. Unknown ids are ignored."""
        ...

    def search(self, vector: Vector, k: int) -> IndexHits: ...

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        """The current top-k after each stage, the last one equal to what `search` returns.

        `num_stages` of them. Stopping early costs nothing.
        """
        ...

    def num_stages(self, k: int, stages: int) -> int:
        """The stages that `search_staged` has if it may have `stages`: at least one. As many while
        nobody adds."""
        ...

    @property
    def wants_rebuild(self) -> bool:
        """Too many removed, or grown far beyond what it was trained on."""
        ...


def ordered(ids: Ids, scores: Scores, k: int) -> IndexHits:
    """The best k in the one order that all indexes share."""
    best = np.lexsort((ids, -scores))[:k]
    return IndexHits(ids[best], scores[best])


def merge(a: IndexHits, b: IndexHits, k: int) -> IndexHits:
    return ordered(np.concatenate([a.ids, b.ids]), np.concatenate([a.scores, b.scores]), k)


def nothing() -> IndexHits:
    return IndexHits(np.empty(0, np.int64), np.empty(0, np.float32))


def efforts(full: int, k: int, stages: int) -> list[int]:
    """The efforts of searches one after the other that end with a full one.

    For an index that cannot take a walk up again: what comes before the full walk is lost. So there
    is one walk before it, of a quarter: it compares a third as often, and in nine of ten cases it
    ends with the list of the full one (bench/retrieval.py).
    """
    first = max(k, full // 4)  # fewer candidates than k could not fill the list
    return [first, full] if stages > 1 and first < full else [full]


def exact_top(
    find: Callable[[int], IndexHits], k: int, available: int, tolerance: float = 0.0
) -> IndexHits:
    """The best k under (score, then id), from a search that breaks ties as it likes.

    `find(n)` returns the best n of the `available` vectors, give or take `tolerance`, without the
    removed ones. When the k-th place is tied, ask for more until the tie is over: a staged search,
    which cuts the same vectors into other portions, must come to the same k.
    """
    n = k + 8
    while True:
        hits = find(min(n, available))
        done = len(hits.ids) > k and bool(
            hits.scores.min() < np.partition(hits.scores, -k)[-k] - tolerance
        )
        if done or n >= available:
            return ordered(hits.ids, hits.scores, k)
        n *= 4


@contextmanager
def one_thread() -> Iterator[None]:
    """One query, one thread: a second one gains nothing and waits for a busy core.

    Flat over 36k vectors, 2-core CPU: 2.9 ms with one thread, 3.8 with two, 24 beside a busy core.
    The setting belongs to the calling thread and is put back, because torch may share it.
    """
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def check_query(vector: Vector, dim: int, k: int, stages: int = 1) -> Vector:
    """The query as FAISS wants it: [1, D], contiguous float32."""
    if k < 1 or stages < 1:
        raise RequestError(f"k and stages must be at least 1, got k={k}, stages={stages}")
    query = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
    if query.shape[1] != dim:
        raise RequestError(f"the query has {query.shape[1]} dimensions, the index {dim}")
    return query
