"""One tier in use: the tier itself, its threads, its breakers and its budget.

Threads block here so that no other has to: a pool per tier, so a hung remote fills its own threads
and no other's. A breaker leaves a failing tier alone for a while, so that its trouble costs one
wait and not one per call:

    closed ──failures in a row──► open ──rest over──► probing ──success──► closed
                                   ▲                     │
                                   └────── failure ──────┘  (rest doubles, up to a minute)
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.policies import open_policy
from kvweave.kv.tier_budget import TierBudget
from kvweave.kv.tiers import Tier, open_tier
from kvweave.kv.tiers.config import StoreConfig
from kvweave.metrics import Metrics

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
