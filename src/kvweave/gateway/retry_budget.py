"""How many retries there may be, so that a fleet in trouble is not asked twice as much.

each request            + share of a retry
ten seconds             + the reserve
at most                 the reserve
"""

import threading
import time
from collections.abc import Callable

REFILL_S = 10.0  # in which an empty reserve is full again without any request


class RetryBudget:
    """Any thread."""

    def __init__(
        self, share: float, reserve: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._reserve = float(reserve)
        self._clock = clock
        self._lock = threading.Lock()
        self._left = float(reserve)
        self._seen_s = clock()

    def count_request(self) -> None:
        """A request came."""
        with self._lock:
            self._left = min(self._reserve, self._left + self._share)

    def take(self) -> bool:
        """Whether a retry may be made now; it counts if it may."""
        with self._lock:
            now_s = self._clock()
            refill = self._reserve * (now_s - self._seen_s) / REFILL_S
            self._seen_s, self._left = now_s, min(self._reserve, self._left + refill)
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True

    @property
    def left(self) -> float:
        """Retries that could be made at once."""
        with self._lock:
            return self._left
