"""Least frequently used."""

from dataclasses import dataclass

from kvweave.kv.policies.base import ItemUsage


@dataclass(slots=True)
class LFU:
    """What is used least often leaves first. A newcomer enters only if it is used more often."""

    def rank(self, usage: ItemUsage) -> float:
        return usage.uses

    def left(self, rank: float) -> None:
        """Frequency needs no clock of its own."""
