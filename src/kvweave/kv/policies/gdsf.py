"""Greedy dual size frequency."""

from dataclasses import dataclass

from kvweave.kv.policies.base import ItemUsage


@dataclass(slots=True)
class GDSF:
    """Seconds saved per byte kept, on a clock that rises with what was evicted.

    The clock is what ages: a thing ranked long ago sits at an old clock and is overtaken.
    """

    clock: float = 0.0

    def rank(self, usage: ItemUsage) -> float:
        return self.clock + usage.uses * usage.cost_s / max(1, usage.size)

    def left(self, rank: float) -> None:
        self.clock = max(self.clock, rank)
