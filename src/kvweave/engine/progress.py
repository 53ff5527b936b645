"""How far one sequence has come: tokens that are known, and those of them that are computed.

Plain ints. Prefill, a slice of it, decode and recomputing after a preemption are the same
bookkeeping; of a fused prompt that is prepared, what is left are the rows that are not reused.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class SparseRows:
    """The rows of a prepared fused prompt that are to be computed; the others are there already.

    They stand here and there: those chosen for recomputation, missing chunks and the question. They
    are computed in position order, a slice per step; some stand or fall together and share a slice.
    """

    positions: Sequence[int]  # of all rows, ascending
    bonds: Sequence[tuple[int, int]] = ()  # [start, end) of them that no slice may cut, ascending
    done: int = 0  # rows that were computed

    @property
    def left(self) -> int:
        return len(self.positions) - self.done

    @property
    def reached(self) -> int:
        """Position up to which, not included, everything stands in its final form."""
        return self.positions[self.done] if self.left else self.positions[-1] + 1

    def share(self, most: int) -> int:
        """How many rows the next slice has in a step with room for `most`; 0 only without room.

        A bond that does not fit waits for the next slice, unless it would be all there is of this
        one: then it is computed at once, however long, because it never gets shorter.
        """
        if most <= 0:
            return 0
        end = self.done + min(most, self.left)
        place = bisect_right(self.bonds, (end, 0)) - 1  # the last that starts before `end`
        if place >= 0:
            first, last = self.bonds[place]
            if first < end < last:
                end = first if first > self.done else last
        return end - self.done

    def next(self, count: int) -> Sequence[int]:
        """Positions of the next `count` rows."""
        return self.positions[self.done : self.done + count]


@dataclass(slots=True)
class Progress:
    """How far one sequence has come. The engine thread alone changes it."""

    arrival: float  # smaller came first, or is its tenant's turn: see waiting_queue.py
    known: int  # tokens of the prompt and of the answer so far
    held: bool = False  # speculation: computed, not answered
    computed: int = 0  # of the known ones, those whose KV is there
    num_pages: int = 0  # that it has
    elsewhere: int = 0  # of the computed ones, those that lie in pages of chunks, not in its own
    own_step: bool = False  # its next step is its own: a fused prefill, or what prepares one
    sparse: SparseRows | None = None  # a prepared fused prompt: what of it is still to compute
    drafted: int = 0  # tokens behind the known ones that the next step may compute: see drafts.py
    preempted: int = 0  # times its pages were taken away
    background: bool = False  # computed in idle time alone
    given_up: int = 0  # steps of it in a row, for others
    tenant: str = ""  # whose it is

    @property
    def needed(self) -> int:
        """Rows that it still has to compute."""
        return self.known - self.computed if self.sparse is None else self.sparse.left

    @property
    def decodes(self) -> bool:
        """Whether the row it needs is that of its last token: a draft may go behind it."""
        return self.sparse is None and self.needed == 1

    def share(self, most: int) -> int:
        """Rows that the sequence gets in a step that has room for `most`."""
        return min(self.needed, most) if self.sparse is None else self.sparse.share(most)

    def advance(self, num_rows: int) -> None:
        """Count `num_rows` more rows as computed; those of a draft do not count yet."""
        self.given_up = 0
        if self.sparse is None:
            self.computed = min(self.computed + num_rows, self.known)
            return
        self.sparse.done += num_rows
        self.computed = self.sparse.reached
        if not self.sparse.left:
            self.sparse = None

    def join(self, sparse: SparseRows) -> None:
        """Note that the fused prompt is prepared: these rows are left, and run in the common
        steps."""
        self.sparse = sparse
        self.computed = sparse.reached
        self.own_step = False

    def restart(self) -> None:
        """Note that the pages are gone, and with them all that was computed."""
        self.computed, self.sparse, self.drafted = 0, None, 0
        self.preempted += 1


class Scheduled(Protocol):
    """What the scheduler orders: anything that has a Progress. Compared by identity."""

    @property
    def progress(self) -> Progress: ...
