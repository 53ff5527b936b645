"""The reads of one object on the IO threads of its tier: launched, counted, and ended by a failure.

What goes wrong in one ends the arrival with a reason; nobody waits for it any longer.
"""

import time
from abc import abstractmethod
from collections.abc import Callable

from kvweave.errors import TierCorrupt, TierError, TierForeign
from kvweave.kv.awaited import Awaited
from kvweave.kv.io_pool import IoPool
from kvweave.kv.residency import Miss


class Reads(Awaited):
    """Thread-safe. `Arrival` says what is read."""

    def __init__(self, tier_name: str, pool: IoPool, deadline_s: float) -> None:
        super().__init__(tier_name, deadline_s)
        self._pool = pool
        self._cancelled = False
        self._running = 0  # jobs submitted and not finished: they may write into the memory
        self._active = 0  # those of them that a thread has begun
        self._progress_s = 0.0  # when one of them last began or finished

    @abstractmethod
    def _on_idle(self) -> None:
        """No job is left, for now or for good. On an IO thread, with no lock held."""

    def cancel(self) -> None:
        """Nobody wants it any more: reads under way finish, no new ones begin."""
        with self._changed:
            self._cancelled = True
            idle = self._running == 0
        if idle:
            self._on_idle()

    def _stalled_s(self) -> float:
        """Since a read of this object began or finished; of those queued before it if none did."""
        return time.monotonic() - self._progress_s if self._active else self._pool.stalled_s()

    def _launch(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._running += 1

        def run() -> None:
            with self._changed:
                self._active += 1
                self._progress_s = time.monotonic()
            try:
                if not self._cancelled and self._failure is None:
                    self._attempt(job)
            finally:
                with self._changed:
                    self._active -= 1
                    self._progress_s = time.monotonic()
                    self._running -= 1
                    idle = self._running == 0
                if idle:
                    self._on_idle()

        if not self._pool.submit(run):
            with self._changed:
                self._running -= 1
            self._fail(Miss.TIER_FAILED, "the store was closed")

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except TierError as error:
            self._fail(miss_of(error), str(error))
        except Exception as error:  # a bug: nobody may wait for it forever, and it must be seen
            self._fail(Miss.TIER_FAILED, f"{type(error).__name__}: {error}")
            raise


def miss_of(error: TierError) -> Miss:
    """What those who wait are told."""
    match error:
        case TierCorrupt():
            return Miss.CORRUPT
        case TierForeign():
            return Miss.FOREIGN
        case _:
            return Miss.TIER_FAILED
