"""Sequences that wait for their turn, and whose turn it is. Plain ints and lists.

Tenants share the engine fairly, however many requests each of them has (start-time fair queueing).
Every request has a rank, and the smallest goes first. A tenant's requests stand one behind the
other, as far apart as they are long; a tenant that has had nothing for a while begins where the
others are now. So of tenants that always have requests each gets an equal share of the rows, and
the first request of another waits for those under way, not for all that came before it. With one
tenant it is the order of arrival.

Of one tenant's requests the one that the cache serves best goes first (RAGCache): running it now
costs little and keeps its prefix in use; put off, it may find the prefix evicted. Matters only when
requests really queue. One whose next exact tokens another computes now waits until they are shared,
and holds up no one: so many requests over the same documents compute them once.
"""

from bisect import insort_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from kvweave.engine.progress import Scheduled
from kvweave.errors import ConfigError

WINDOW = 32  # at most so many sequences overtake any other
MOST_TENANTS = 1024  # that are remembered before those without requests are forgotten

S = TypeVar("S", bound=Scheduled)


@dataclass(slots=True)
class _Waiting(Generic[S]):
    sequence: S
    overtaken: int = 0  # times one that came later went first; none counts while it is held


class WaitingQueue(Generic[S]):
    """Sequences that wait for their turn, in order of arrival. Owned by the scheduler.

    At most `window` sequences that came later overtake any other, so that none starves. Held ones
    are no part of that: they overtake none, and all others overtake them; once released, one stands
    where it came. One that lost its pages goes before others as long as none of them starves.

    `lengths(sequence)` says how many of its tokens are cached and how many must be computed now,
    `is_coming(sequence)` whether it had better wait for another that computes the next of them.
    Both are called again for every choice, because the cache changes while sequences wait.
    """

    def __init__(
        self,
        lengths: Callable[[S], tuple[int, int]],
        window: int = WINDOW,
        is_coming: Callable[[S], bool] = lambda sequence: False,
    ) -> None:
        if window < 1:
            raise ConfigError(f"WaitingQueue.window must be at least 1, got {window}")
        self._lengths = lengths
        self._is_coming = is_coming
        self._window = window
        self._queue: list[_Waiting[S]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, sequence: S) -> bool:
        return any(waiting.sequence is sequence for waiting in self._queue)

    def sequences(self) -> list[S]:
        return [waiting.sequence for waiting in self._queue]

    def push(self, sequence: S) -> None:
        """Put a sequence behind all that came before it."""
        insort_right(self._queue, _Waiting(sequence), key=lambda w: w.sequence.progress.arrival)

    def best(self) -> S | None:
        """Return the sequence that should run next; None: none waits, or all wait for what others
        compute."""
        real = [waiting for waiting in self._queue if not waiting.sequence.progress.held]
        if any(waiting.overtaken >= self._window for waiting in real):
            return real[0].sequence  # overtakes none: in this order all come to their turn
        held = [waiting for waiting in self._queue if waiting.sequence.progress.held]
        for tenant in _tenants(real):
            own = [waiting for waiting in real if waiting.sequence.progress.tenant == tenant]
            for waiting in own:
                if waiting.sequence.progress.preempted:
                    return waiting.sequence
            if (best := self._best_of(own)) is not None:
                return best
        return self._best_of(held)

    def first_of(self, is_wanted: Callable[[S], bool]) -> S | None:
        """Return the first sequence that is not held and is wanted."""
        wanted = (w.sequence for w in self._queue if not w.sequence.progress.held)
        return next((sequence for sequence in wanted if is_wanted(sequence)), None)

    def _best_of(self, group: "Sequence[_Waiting[S]]") -> S | None:
        """Return the sequence that the cache serves best, of those that wait for nothing else."""
        ready = (waiting for waiting in group if not self._is_coming(waiting.sequence))
        candidates = list(islice(ready, self._window))
        return max(candidates, key=self._priority).sequence if candidates else None

    def remove(self, sequence: S, *, counts: bool = True) -> None:
        """Take a sequence out that runs now, ahead of those that came before it; without `counts`
        it just leaves."""
        place = [waiting.sequence for waiting in self._queue].index(sequence)
        if counts and not sequence.progress.held:
            for waiting in self._queue[:place]:
                waiting.overtaken += not waiting.sequence.progress.held
        del self._queue[place]

    def _priority(self, waiting: _Waiting[S]) -> float:
        return order_priority(*self._lengths(waiting.sequence))


def _tenants(queue: "Sequence[_Waiting[S]]") -> list[str]:
    """Tenants whose sequences wait, by whose turn it is."""
    return list(dict.fromkeys(waiting.sequence.progress.tenant for waiting in queue))


def order_priority(cached_tokens: int, compute_tokens: int) -> float:
    """Return cached ÷ tokens to compute; larger goes first."""
    return cached_tokens / max(1, compute_tokens)


def share_of(namespace: str) -> str:
    """Return the tenant whose share a request counts against.

    A client may name tenants of its own behind the one whose key it has (`acme/x`, see
    `KVTransfer`): those are one, or each name would be another share. A gateway without a tenant
    (`/x`) speaks for tenants that are strangers to each other.
    """
    return namespace.partition("/")[0] or namespace


class FairRanks:
    """Ranks of requests by arrival, fair among tenants. For the engine thread."""

    def __init__(self) -> None:
        self._now = 0.0  # the largest rank that began
        self._ends: dict[str, float] = {}  # by tenant: where its next request may stand

    def rank(self, tenant: str, cost: int) -> float:
        """Return the rank of a request that arrives now and takes `cost` rows."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + max(1, cost)
        if len(self._ends) > MOST_TENANTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        return start

    def advance_to(self, rank: float) -> None:
        """Note that a request of that rank is computed from now on."""
        self._now = max(self._now, rank)
