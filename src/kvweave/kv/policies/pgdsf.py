"""Prefix-aware greedy dual size frequency (after RAGCache, 2024)."""

from dataclasses import dataclass

from kvweave.kv.policies.base import ItemUsage


@dataclass(slots=True)
class PGDSF:
    """GDSF whose cost per unit is measured, not assumed.

    Computing a chunk behind a long cached prefix costs other seconds per token than computing it
    first, so the cost is the mean over the times it really was computed. Size is divided out there.
    """

    clock: float = 0.0

    def rank(self, usage: ItemUsage) -> float:
        return self.clock + usage.uses * usage.cost_per_unit_s

    def left(self, rank: float) -> None:
        self.clock = max(self.clock, rank)
