"""One tier in use: the tier itself, its threads, its breakers and its budget.

What lies in it, how much of its budget that takes and what may leave is plain bookkeeping: the
inventory's lock covers every call.

    used      bytes of entries
    reserved  bytes promised to writes under way, and bytes of victims not yet gone
    used + reserved ≤ capacity, always

Threads block here so that no other has to: a pool per tier, so a hung remote fills its own threads
and no other's. A breaker leaves a failing tier alone for a while, so that its trouble costs one
wait and not one per call:

    closed ──failures in a row──► open ──rest over──► probing ──success──► closed
                                   ▲                     │
                                   └────── failure ──────┘  (rest doubles, up to a minute)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvweave.kv.format.header import Header
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.policies import ItemUsage, Policy, RankHeap

if TYPE_CHECKING:
    from kvweave.kv.format.memory import Memory
    from kvweave.kv.provenance import Provenance
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvweave.errors import TierError
from kvweave.kv.policies import open_policy
from kvweave.kv.tiers import Tier, open_tier
from kvweave.kv.tiers.config import StoreConfig
from kvweave.metrics import Metrics


@dataclass(slots=True)
class TierEntry:
    """One object in one tier."""

    size_bytes: int
    pins: int = 0  # leases that hold it; it stays while there are any
    doomed: bool = False  # delete as soon as the last pin goes
    header: Header | None = field(default=None, repr=False)  # host tier: parsed once, on entry,
    memory: "Memory | None" = field(default=None, repr=False)  # and where its bytes lie;
    lacks: frozenset[str] = frozenset()  # extras that no load asked for: their place is empty,
    origin: str = ""  # and the tier that has them
    since: int = 0  # lower tiers: when it was written, in the time of `RemovedChunks`,
    of: "Provenance | None" = None  # and whose text it is, where this process wrote it


class TierBudget:
    """The entries of one tier under one byte budget and one policy."""

    def __init__(self, capacity_bytes: int, policy: Policy) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._policy = policy
        self._entries: dict[ChunkKey, TierEntry] = {}
        self._ranking: RankHeap[ChunkKey] = RankHeap()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def get(self, key: ChunkKey) -> TierEntry | None:
        """An entry that may be leased: None for the absent and the doomed."""
        entry = self._entries.get(key)
        return None if entry is None or entry.doomed else entry

    def find(self, key: ChunkKey) -> TierEntry | None:
        """The entry of a key, doomed or not."""
        return self._entries.get(key)

    def has(self, key: ChunkKey, entry: TierEntry) -> bool:
        """Whether this very entry is still here: a later one of that key is another."""
        return self._entries.get(key) is entry

    def revive(self, key: ChunkKey) -> TierEntry | None:
        """The entry of a key that is being saved again: it is no longer doomed, if it was."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.doomed = False
        return entry

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.reserved_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Promise room to a write. False: it is not there."""
        if size_bytes > self.free_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True

    def unreserve(self, size_bytes: int) -> None:
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0, "more was given back than reserved"

    def add(self, key: ChunkKey, size_bytes: int, usage: ItemUsage, *, reserved: bool) -> TierEntry:
        """Add an entry. `reserved`: its bytes were promised before, which all but a scan does."""
        assert key not in self._entries, "an object is in the books once"
        if reserved:
            self.unreserve(size_bytes)
        entry = self._entries[key] = TierEntry(size_bytes)
        self.used_bytes += size_bytes
        self.touch(key, usage)
        return entry

    def touch(self, key: ChunkKey, usage: ItemUsage) -> None:
        self._ranking.set(key, self._rank(usage), usage.last_access_s)

    def take_off(self, key: ChunkKey) -> int:
        """Take an entry off to delete it. Its bytes stay reserved until they are really gone:
        then give `unreserve` the size returned here."""
        size = self._remove(key)
        self.reserved_bytes += size
        return size

    def _remove(self, key: ChunkKey) -> int:
        entry = self._entries.pop(key)
        self._ranking.remove(key)
        self.used_bytes -= entry.size_bytes
        return entry.size_bytes

    def evict_for(self, size_bytes: int, newcomer: ItemUsage) -> list[tuple[ChunkKey, int]] | None:
        """Make room for a newcomer that is worth more than what it pushes out.

        Returns the victims with their sizes, already off the books, their room reserved for the
        newcomer; delete them, then call `settle`. None, and nothing happens, if pinned or better
        entries are in the way.
        """
        missing = size_bytes - self.free_bytes
        rank = self._rank(newcomer)
        victims: list[tuple[ChunkKey, int]] = []
        freed, highest = 0, 0.0
        for key, worth in self._ranking.lowest(self._may_leave):
            if freed >= missing:
                break
            if worth > rank:  # at a tie the newcomer wins: it is the more recent one
                return None
            victims.append((key, self._entries[key].size_bytes))
            freed += self._entries[key].size_bytes
            highest = max(highest, worth)
        if freed < missing:
            return None
        for key, _ in victims:
            self._remove(key)
        if victims:
            self._policy.record_eviction(highest)
        self.reserved_bytes += size_bytes + self._surplus(size_bytes, freed)
        return victims

    def settle(self, size_bytes: int, victims: list[tuple[ChunkKey, int]]) -> None:
        """The victims' bytes are really gone: what exceeds the newcomer's need is free again."""
        self.unreserve(self._surplus(size_bytes, sum(size for _, size in victims)))

    def num_pinned(self) -> int:
        return sum(1 for entry in self._entries.values() if entry.pins)

    def _rank(self, usage: ItemUsage) -> float:
        return -math.inf if usage.gives_way else self._policy.rank(usage)

    def _may_leave(self, key: ChunkKey) -> bool:
        return self._entries[key].pins == 0

    @staticmethod
    def _surplus(size_bytes: int, freed_bytes: int) -> int:
        """Victims may be larger than the newcomer: until they are deleted both count."""
        return max(0, freed_bytes - size_bytes)


log = logging.getLogger(__name__)

Job = Callable[[], None]


class IoPool:
    """Runs jobs in the order given. Threads start with the first job and die with the process."""

    def __init__(
        self, name: str, num_threads: int, on_bug: Callable[[], None] | None = None
    ) -> None:
        """`on_bug` hears of jobs that raised."""
        self.on_bug = on_bug
        self._name = name
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._outstanding = 0
        self._progress_s = 0.0  # when a job last finished, or the first of a busy spell came
        self._closed = False

    def submit(self, job: Job) -> bool:
        """Queue a job; False if the pool was closed. A job reports its own failures: an exception
        that escapes it is a bug, and logged as one."""
        with self._lock:
            if self._closed:
                return False
            if not self._outstanding:
                self._progress_s = time.monotonic()
            self._outstanding += 1
            if len(self._threads) < min(self._num_threads, self._outstanding):
                thread = threading.Thread(
                    target=self._run, name=f"kv-{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)
        return True

    def is_crowded(self) -> bool:
        """Whether jobs wait for a thread."""
        return not self._jobs.empty()

    def stalled_s(self) -> float:
        """For how long jobs have been waiting or running without any of them finishing."""
        with self._lock:
            return time.monotonic() - self._progress_s if self._outstanding else 0.0

    def close(self, timeout_s: float) -> None:
        """Let queued jobs finish for at most `timeout_s`; a thread that hangs is left behind."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        give_up_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of the %s pool failed, which is a bug", self._name)
                if self.on_bug is not None:
                    self.on_bug()
            finally:
                with self._lock:
                    self._outstanding -= 1
                    self._progress_s = time.monotonic()
                job = None


_LONGEST_REST_S = 60.0


class Breaker:
    """Thread-safe. One per tier and direction: a folder that refuses writes still serves reads."""

    def __init__(
        self,
        what: str,
        max_failures: int,
        rest_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        others: str = "requests recompute",
    ) -> None:
        """`others` says in the log what happens meanwhile."""
        self._what = what  # "disk reads", for the log
        self._others = others
        self._max_failures = max_failures
        self._first_rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._rest_s = rest_s
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused now. Changes nothing: a probe that is due does not count."""
        with self._lock:
            return self._open_until is not None and (
                self._probing or self._clock() < self._open_until
            )

    def allows(self) -> bool:
        """Whether to try now. When a rest is over, exactly one caller gets True as the probe and
        owes a `succeeded`, a `failed` or an `undecided`."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def record_success(self) -> None:
        with self._lock:
            was_open = self._open_until is not None
            self._failures, self._open_until, self._probing = 0, None, False
            self._rest_s = self._first_rest_s
        if was_open:
            log.warning("%s work again", self._what)

    def record_no_result(self) -> None:
        """Record a call that told nothing: it was cancelled, or refused for another reason. If it
        was the probe, the next caller is."""
        with self._lock:
            self._probing = False

    def record_failure(self, reason: str, *, at_once: bool = False) -> None:
        """Record one failure. `at_once` opens without waiting for more: for calls that never
        returned."""
        with self._lock:
            self._failures += 1
            if self._open_until is not None:
                if self._probing or self._clock() >= self._open_until:
                    self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
                    self._open_until = self._clock() + self._rest_s
                    self._probing = False
                return  # said once already
            if not at_once and self._failures < self._max_failures:
                return
            self._open_until = self._clock() + self._rest_s
        log.warning("%s fail and rest for a while; %s. %s", self._what, self._others, reason)


class OpenTier(NamedTuple):
    """A tier that is ready for use."""

    tier: Tier
    capacity_bytes: int | None  # None: a remote tier, which budgets and evicts by itself


@dataclass(slots=True, eq=False)
class TierSlot:
    """One tier in use: the tier itself, its threads, its breakers and its budget. Mutable parts
    guard themselves, but for the budget: the inventory's lock does."""

    tier: Tier
    pool: IoPool
    reads: Breaker
    writes: Breaker
    budget: TierBudget | None  # None: a remote tier, which budgets and evicts by itself
    deadline_s: float  # a read that gives nothing for this long is a miss
    patience_s: float  # what one request waits for this tier in all
    is_booked: bool  # the books know what lay there before: else it is neither read nor written
    unbooked_deletes: set[ChunkKey] = field(
        default_factory=set
    )  # tried until then, perhaps in vain

    @property
    def name(self) -> str:
        return self.tier.name


def open_tiers(cfg: StoreConfig, metrics: Metrics) -> list[OpenTier]:
    """Open every tier that can be used. One that never will be (more host memory than there is) is
    counted, named in the log with what to do about it, and left out: the store serves without it.
    A folder or a server that does not answer now is opened all the same, see `lookup.py`."""
    opened: list[OpenTier] = []
    for tier_cfg in cfg.tiers:
        try:
            opened.append(OpenTier(open_tier(tier_cfg), tier_cfg.capacity_bytes))
        except TierError as error:
            log.warning("a tier is left out: %s", error)
            metrics.count("kv_tier_errors_total", tier=tier_cfg.kind, verb="open")
    return opened


def make_slot(opened: OpenTier, cfg: StoreConfig, metrics: Metrics) -> TierSlot:
    tier, capacity_bytes = opened
    count_bug = partial(metrics.count, "kv_tier_errors_total", tier=tier.name, verb="bug")

    def breaker(direction: str) -> Breaker:
        what = f"{tier.name} {direction}"
        return Breaker(what, cfg.breaker_failures, cfg.breaker_rest_s)

    return TierSlot(
        tier=tier,
        pool=IoPool(tier.name, cfg.io_threads, count_bug),
        reads=breaker("reads"),
        writes=breaker("writes"),
        budget=None
        if capacity_bytes is None
        else TierBudget(capacity_bytes, open_policy(cfg.policy)),
        deadline_s=cfg.remote_deadline_s if tier.remote else cfg.local_deadline_s,
        patience_s=cfg.remote_budget_s if tier.remote else cfg.local_budget_s,
        is_booked=capacity_bytes is None or not tier.durable,  # no books, or nothing from before
    )
