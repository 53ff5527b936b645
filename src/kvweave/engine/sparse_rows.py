"""The rows of a prompt that are to be computed where the others are there already. Plain ints.

A fused prompt that is prepared (kvweave.fuse.prepared) has rows here and there: those chosen for
recomputation, missing chunks and the question. They are computed in position order, a slice per
step; some of them stand or fall together and share a slice.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class SparseRows:
    """What is left of one prompt. Owned by its sequence."""

    positions: Sequence[int]  # of all rows, ascending
    bonds: Sequence[tuple[int, int]] = ()  # [start, end) of them that no slice may cut, ascending
    done: int = 0  # rows that were computed

    @property
    def left(self) -> int:
        return len(self.positions) - self.done

    @property
    def reached(self) -> int:
        """Up to here, not included, everything stands in its final form."""
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
