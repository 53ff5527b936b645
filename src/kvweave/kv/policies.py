"""What is worth keeping: eviction and admission policies by name, and what they may look at.

A policy turns the usage of one thing into a rank; the lowest rank leaves first. The keeper of the
things (the budget of a tier, the knowledge tree) decides which of them may leave at all: leased
bytes and inner nodes never do. One policy object serves one tier, because the clock some policies
keep is the tier's own. Plain Python, no torch; not thread-safe, the keeper's lock covers it.
"""

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from kvweave.errors import ConfigError

HALF_LIFE_S = 4 * 3600.0  # an access so long ago counts half; the RAGCache paper leaves this open
LEAST_COST_S = 1e-9  # per unit: of two things of unknown cost the hotter one still stays
K = TypeVar("K", bound=Hashable)


class ItemUsage(NamedTuple):
    """What is known about one thing at the moment its rank is computed."""

    uses: float  # accesses, decayed with HALF_LIFE_S up to the last one
    last_access_s: float  # on the keeper's clock
    size: int  # in the keeper's unit: bytes in a tier, tokens in the tree
    cost_s: float  # estimate of what computing it once costs
    cost_per_unit_s: float  # measured: mean over its misses of seconds / newly computed units
    gives_way: bool = False  # leaves before all that does not, whatever its policy says

    @property
    def heat(self) -> float:
        """log2 of the accesses, decayed to one moment that is the same for all things.

        Decay takes the same share of every count in the same time, so the order by `heat` is that
        of the decayed counts now and for ever: a rank made of it never goes stale.
        """
        if not self.uses:
            return -math.inf
        return math.log2(self.uses) + self.last_access_s / HALF_LIFE_S


class Policy(Protocol):
    """Ranks things of one tier. Pure but for the clock that `record_eviction` moves."""

    @property
    def clock(self) -> float:
        """Rises with what was evicted; 0 for a policy that needs no clock of its own."""
        ...

    def rank(self, usage: ItemUsage) -> float:
        """Higher is worth more. Called when a thing enters and on each access."""
        ...

    def record_eviction(self, rank: float) -> None:
        """Record that a thing of this rank was evicted (not deleted by its owner)."""
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
        """Count one more access."""
        if self.uses:
            elapsed_s = max(0.0, now_s - self.last_access_s)
            self.uses *= 0.5 ** (elapsed_s / HALF_LIFE_S)
        self.uses += 1
        self.last_access_s = now_s

    def record_computation(self, cost_s: float, units: int) -> None:
        """Record that a missing thing was computed: `units` of it in `cost_s` seconds."""
        assert units > 0, "nothing was computed"
        self.cost_s = cost_s
        self.misses += 1
        self.cost_per_unit_s += (cost_s / units - self.cost_per_unit_s) / self.misses

    def snapshot(self) -> ItemUsage:
        return ItemUsage(
            self.uses, self.last_access_s, self.size, self.cost_s, self.cost_per_unit_s
        )


@dataclass(slots=True)
class LRU:
    """What was not touched for longest leaves first. A newcomer always beats what is there."""

    clock: ClassVar[float] = 0.0

    def rank(self, usage: ItemUsage) -> float:
        return usage.last_access_s

    def record_eviction(self, rank: float) -> None:
        """Do nothing: recency needs no clock of its own."""


@dataclass(slots=True)
class LFU:
    """What is used least often leaves first. A newcomer enters only if it is used more often."""

    clock: ClassVar[float] = 0.0

    def rank(self, usage: ItemUsage) -> float:
        return usage.uses

    def record_eviction(self, rank: float) -> None:
        """Do nothing: frequency needs no clock of its own."""


@dataclass(slots=True)
class GDSF:
    """Greedy dual size frequency: seconds saved per byte kept, on a clock of what was evicted.

    The clock is what ages: a thing ranked long ago sits at an old clock and is overtaken.
    """

    clock: float = 0.0

    def rank(self, usage: ItemUsage) -> float:
        return self.clock + usage.uses * usage.cost_s / max(1, usage.size)

    def record_eviction(self, rank: float) -> None:
        self.clock = max(self.clock, rank)


@dataclass(slots=True)
class PGDSF:
    """Prefix-aware GDSF (after RAGCache, 2024): frequency times cost per unit, aged by decay.

    Computing a chunk behind a long cached prefix costs other seconds per token than computing it
    first, so the cost is a mean over the times it really was computed. Size is divided out there.

    RAGCache ages by a clock that rises with what was evicted. Where most paths come once, every one
    of them moves it, and it outruns what is used now and then (docs/planner.md, "What stays in
    memory"). Here the accesses themselves age, and what comes once leaves first.
    """

    clock: ClassVar[float] = 0.0

    def rank(self, usage: ItemUsage) -> float:
        return usage.heat + math.log2(max(usage.cost_per_unit_s, LEAST_COST_S))

    def record_eviction(self, rank: float) -> None:
        """Do nothing: accesses age by themselves."""


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfu": LFU, "gdsf": GDSF, "pgdsf": PGDSF}


def open_policy(name: str) -> Policy:
    """A fresh policy: each tier has its own, with its own clock."""
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


class RankHeap(Generic[K]):
    """Things in the order in which they would leave: a heap in which each has one valid rank. Not
    thread-safe.

    Changing a rank pushes a new heap entry and leaves the old one to be skipped, so an access costs
    O(log n); the heap is rebuilt when stale entries outnumber valid ones.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[float, float]] = {}  # thing → (rank, last access): ties by age
        self._heap: list[tuple[float, float, int, K]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, thing: K, rank: float, last_access_s: float) -> None:
        self._ranks[thing] = (rank, last_access_s)
        self._push(thing)
        if len(self._heap) > 64 + 2 * len(self._ranks):
            self._heap = []
            for each in self._ranks:
                self._push(each)

    def remove(self, thing: K) -> None:
        del self._ranks[thing]

    def discard(self, thing: K) -> None:
        """Remove a thing that may not be there."""
        self._ranks.pop(thing, None)

    def __iter__(self) -> Iterator[K]:
        return iter(self._ranks)

    def rank(self, thing: K) -> float:
        return self._ranks[thing][0]

    def pop_lowest(self) -> tuple[K, float]:
        """Remove the thing of the lowest rank; returns it with its rank. There must be one."""
        while self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        rank, _, _, thing = heapq.heappop(self._heap)
        del self._ranks[thing]
        return thing, rank

    def lowest(self, may_leave: Callable[[K], bool]) -> Iterator[tuple[K, float]]:
        """Things that may leave, lowest rank first, with their ranks. Changes no rank.

        Walks a copy of the heap lazily: taking the first few of many costs O(k log n) plus the
        copy.
        """
        while self._heap and self._is_stale(self._heap[0]):  # or each call would skip them again
            heapq.heappop(self._heap)
        heap = list(self._heap)
        seen: set[K] = set()
        while heap:
            entry = heapq.heappop(heap)
            rank, _, _, thing = entry
            if thing in seen or self._is_stale(entry):
                continue
            seen.add(thing)
            if may_leave(thing):
                yield thing, rank

    def _is_stale(self, entry: tuple[float, float, int, K]) -> bool:
        """Whether its thing was ranked anew or removed since."""
        return self._ranks.get(entry[3]) != entry[:2]

    def _push(self, thing: K) -> None:
        rank, last_access_s = self._ranks[thing]
        self._pushes += 1
        heapq.heappush(self._heap, (rank, last_access_s, self._pushes, thing))
