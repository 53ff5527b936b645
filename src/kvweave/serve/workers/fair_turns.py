"""Which of the jobs that wait begins next, so that no tenant keeps another from beginning.

While there are places, the tenant with the fewest jobs that run goes first, and among equals the
one that waited longer. When all places are taken, a tenant of which nothing runs still begins one:
it costs a place more for every tenant at most, and a tenant's first job never waits for another's.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairTurns(Generic[T]):
    """Jobs of tenants, first in first out within each. Guarded by the caller's lock."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # who waited longest, first
        self._running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        return self._running.total()

    def put(self, tenant: str, job: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(job)

    def next(self) -> tuple[str, T] | None:
        """A job that begins now, and whose it is; None: none may. Tell `done` when it is over."""
        if not self._waiting:
            return None
        tenant = min(self._waiting, key=lambda name: self._running[name])  # the first of equals
        if self.num_running >= self._places and self._running[tenant]:
            return None
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind the others
        self._running[tenant] += 1
        return tenant, job

    def begin(
        self, lock: threading.Lock, submit: Callable[[T], object], refuse: Callable[[T], object]
    ) -> None:
        """Submit all whose turn it is, and refuse those for which no thread is left: the pool was
        closed. `lock` is the one that guards these turns, and not held."""
        while True:
            with lock:
                begins = self.next()
            if begins is None:
                return
            tenant, job = begins
            try:
                submit(job)
            except RuntimeError:  # closed meanwhile
                refuse(job)
                with lock:
                    self.done(tenant)

    def drop(self, tenant: str, job: T) -> None:
        """It is not to begin any more. Nothing to one that has."""
        jobs = self._waiting.get(tenant, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[tenant]

    def done(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
