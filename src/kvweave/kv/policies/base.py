"""What is worth keeping: the interface of a policy and what it may look at.

A policy turns the usage of one thing into a rank; the lowest rank leaves first. Who keeps things
(a tier's shelf, the knowledge tree) decides which of them may leave at all: leased bytes and inner
nodes never do. One policy object serves one tier, because the clock some policies keep is the
tier's own. Plain Python, no torch; not thread-safe, the keeper's lock covers it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

HALF_LIFE_S = 3600.0  # an access an hour ago counts half; the RAGCache paper leaves this open


class ItemUsage(NamedTuple):
    """What is known about one thing at the moment its rank is computed."""

    uses: float  # accesses, decayed with HALF_LIFE_S
    last_access_s: float  # on the keeper's clock
    size: int  # in the keeper's unit: bytes in a tier, tokens in the tree
    cost_s: float  # estimate of what computing it once costs
    cost_per_unit_s: float  # measured: mean over its misses of seconds / newly computed units
    gives_way: bool = False  # leaves before all that does not, whatever its policy says


class Policy(Protocol):
    """Ranks things of one tier. Pure but for the clock that `left` moves."""

    def rank(self, usage: ItemUsage) -> float:
        """Higher is worth more. Called when a thing enters and on each access."""
        ...

    def left(self, rank: float) -> None:
        """A thing of this rank was evicted (not deleted by its owner)."""
        ...


@dataclass(slots=True)
class UsageRecord:
    """The running numbers behind `ItemUsage`. Owned by the keeper; outlives eviction a while."""

    size: int
    uses: float = 0.0
    last_access_s: float = 0.0
    cost_s: float = 0.0
    cost_per_unit_s: float = 0.0
    misses: int = field(default=0)

    def touch(self, now_s: float) -> None:
        """One more access."""
        if self.uses:
            elapsed_s = max(0.0, now_s - self.last_access_s)
            self.uses *= 0.5 ** (elapsed_s / HALF_LIFE_S)
        self.uses += 1
        self.last_access_s = now_s

    def computed(self, cost_s: float, units: int) -> None:
        """It was not there and had to be computed: `units` of it in `cost_s` seconds."""
        assert units > 0, "nothing was computed"
        self.cost_s = cost_s
        self.misses += 1
        self.cost_per_unit_s += (cost_s / units - self.cost_per_unit_s) / self.misses

    def seen(self) -> ItemUsage:
        return ItemUsage(
            self.uses, self.last_access_s, self.size, self.cost_s, self.cost_per_unit_s
        )
