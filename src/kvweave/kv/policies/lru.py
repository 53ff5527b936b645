"""Least recently used."""

from dataclasses import dataclass

from kvweave.kv.policies.base import ItemUsage


@dataclass(slots=True)
class LRU:
    """What was not touched for longest leaves first. A newcomer always beats what is there."""

    def rank(self, usage: ItemUsage) -> float:
        return usage.last_access_s

    def left(self, rank: float) -> None:
        """Recency needs no clock of its own."""
