"""Keys and values of a sequence that shares most of them: pages of its own, and chunks.

    position   0 .. 9 | 10 ........ 25 | 26 .. 33 | 34 ..
               own    | chunk          | chunk    | question and answer: own
    own slot   0 .. 9 |   10, 11       |          | 12 ..      rows 13 and 20 were recomputed

Own rows lie in position order without gaps, keys turned to their positions. Chunks lie in pages
that others read as well, keys turned to their places in the chunk (`kernels/segments.py`): nothing
is written there. Where drift moves what a sequence reads of a chunk, a row of its own says by how
much (`kernels/shifted.py`). Which pages those are is decided by the engine. One thread at a time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.kernels.rope import Turn
from kvweave.kernels.types import SegmentedRows, SharedChunk
from kvweave.model.paged_kv import KVPool, PagedKV


class SegmentedKV:
    """One sequence's part of a pool. Grows at its end, as a `PagedKV` does."""

    def __init__(self, own: PagedKV, turn: Turn, shifts: Sequence[int] = ()) -> None:
        """`own` are its pages. `turn` is the decoder's. `shifts` are pages for one row of each
        chunk that it shifts."""
        self.own = own
        self.shift_pages = tuple(shifts)
        self.turn = turn
        self.chunks: tuple[SharedChunk, ...] = ()  # made anew, never changed: tables are kept of it
        self.own_positions: NDArray[np.int64] = np.empty(0, np.int64)  # of the prompt; ascending
        self.is_shifted = False  # some of its chunks are
        self._end = 0  # positions [0, end) are the prompt
        self.chunks_end = 0  # all positions from here on are own rows

    @property
    def pool(self) -> KVPool:
        return self.own.pool

    @property
    def page_table(self) -> list[int]:
        """Its own pages."""
        return self.own.page_table

    @property
    def pages(self) -> list[int]:
        """All pages that it holds: its own ones, and those of shifts."""
        return [*self.own.page_table, *self.shift_pages]

    @property
    def num_shared(self) -> int:
        """Positions of the prompt that lie in pages of chunks alone."""
        return self._end - len(self.own_positions)

    def append(self, pages: Sequence[int]) -> None:
        """More pages of its own, at the end."""
        self.own.append(pages)

    def lay_out(
        self, own_positions: NDArray[np.int64], chunks: Sequence[SharedChunk], num_tokens: int
    ) -> None:
        """The prompt has `num_tokens`: these positions are own rows, and chunks have the others."""
        self.own_positions = own_positions
        self.chunks = tuple(chunks)
        self.is_shifted = any(chunk.shift is not None for chunk in chunks)
        self._end = num_tokens
        self.chunks_end = max((each.start + each.num_tokens for each in chunks), default=0)
        self.own.reserve(len(own_positions))

    def reserve(self, num_tokens: int) -> None:
        """Count positions [0, num_tokens) as present. The pages must be there."""
        self.own.reserve(num_tokens - self.num_shared)

    def ranks(self, positions: Sequence[int]) -> list[int]:
        """The own slots of positions that are own rows."""
        if positions[0] >= self.chunks_end:  # question and answer: nothing to look for
            return [position - self.num_shared for position in positions]
        at = np.asarray(positions)
        inside = np.searchsorted(self.own_positions, at)
        ranks: list[int] = np.where(at < self._end, inside, at - self.num_shared).tolist()
        return ranks

    def slots(self, positions: Sequence[int]) -> list[int]:
        """Where own rows lie in the pool's token order."""
        return self.own.slots(self.ranks(positions))

    def segment(self, start: int, end: int) -> SegmentedRows:
        """What rows [start, end) of a batch look at."""
        return SegmentedRows(start, end, self.own.segment(start, end), self.chunks)
