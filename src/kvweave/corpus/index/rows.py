"""The rows of a FAISS index: which id stands in which row, and which rows are tombstones.

FAISS numbers vectors by the order of adding. Ids ascend too, so a row is found by bisection, and
removing is a mark: graphs and lists are left alone until the next rebuild.
"""

import numpy as np
from numpy.typing import NDArray

from kvweave.corpus.index.base import Ids

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
