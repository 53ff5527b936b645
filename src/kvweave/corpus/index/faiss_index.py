"""What the indexes over FAISS share: their rows, removal by tombstones, exact order.

FAISS numbers vectors by the order of adding. Ids ascend too, so a row is found by bisection, and
removing is a mark: graphs and lists are left alone until the next rebuild.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.corpus.index.base import Ids, IndexHits, VectorIndex, Vectors, take_best

REBUILD_SHARE = 0.25  # tombstones above this share of all rows: time to rebuild


class IndexRows:
    """Mutable, owned by one index; guarded by the lock that guards that index."""

    def __init__(self, ids: Ids | None = None, dead: NDArray[np.bool_] | None = None) -> None:
        self.by_row: Ids = np.empty(0, np.int64) if ids is None else ids
        self.dead: NDArray[np.bool_] = (
            np.zeros(len(self.by_row), np.bool_) if dead is None else dead
        )
        self.num_dead = int(self.dead.sum())

    def __len__(self) -> int:
        return len(self.by_row) - self.num_dead

    @property
    def num_rows(self) -> int:
        return len(self.by_row)

    @property
    def live_ids(self) -> Ids:
        return self.by_row[~self.dead]

    def unseen(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of `ids` are beyond all ids seen so far. Mask, [N]."""
        assert np.all(np.diff(ids) > 0), "ids must ascend"
        last = self.by_row[-1] if len(self.by_row) else -1
        mask: NDArray[np.bool_] = ids > last
        return mask

    def append(self, ids: Ids) -> None:
        self.by_row = np.concatenate([self.by_row, ids])
        self.dead = np.concatenate([self.dead, np.zeros(len(ids), np.bool_)])

    def bury(self, ids: Ids) -> None:
        rows = np.searchsorted(self.by_row, ids)
        rows = rows[rows < len(self.by_row)]
        rows = rows[np.isin(self.by_row[rows], ids)]
        self.dead[rows] = True
        self.num_dead = int(self.dead.sum())

    @property
    def too_many_dead(self) -> bool:
        return self.num_dead > REBUILD_SHARE * max(1, self.num_rows)


class FaissIndex(VectorIndex):
    """A FAISS index and its rows. Each subclass searches in its own way."""

    def __init__(
        self,
        dim: int,
        *,
        faiss_index: Any = None,
        rows: IndexRows | None = None,
        num_trained: int = 0,
    ) -> None:
        """What was saved of an index, or nothing for a new one."""
        self.dim = dim
        self.faiss_index = self._make() if faiss_index is None else faiss_index
        self.rows = rows or IndexRows()
        self.num_trained = num_trained  # vectors that it learned from

    def _make(self) -> Any:
        """Return a new FAISS index, or None where vectors are needed for it."""
        return None

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self) -> Ids:
        return self.rows.live_ids

    def add(self, ids: Ids, vectors: Vectors) -> None:
        unseen = self.rows.unseen(ids)
        if unseen.any():
            self.faiss_index.add(np.ascontiguousarray(vectors[unseen], np.float32))
            self.rows.append(ids[unseen])

    def remove(self, ids: Ids) -> None:
        self.rows.bury(ids)

    @property
    def wants_rebuild(self) -> bool:
        return self.rows.too_many_dead


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
            return take_best(hits.ids, hits.scores, k)
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
