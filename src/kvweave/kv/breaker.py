"""Leaves a failing tier alone for a while, so that its trouble costs one wait and not one per call.

closed ──failures in a row──► open ──rest over──► probing ──success──► closed
                               ▲                     │
                               └────── failure ──────┘  (rest doubles, up to a minute)
"""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

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
