"""A job that is tried again now and then until it is done."""

import logging
import threading
from collections.abc import Callable

from kvweave.errors import KVWeaveError

log = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 5.0, 120.0  # between two attempts: doubled with each that fails


class Retries:
    """Runs one job on its own thread while there is something to do. Any thread; `close` it."""

    def __init__(self, attempt: Callable[[], bool], first_s: float = FIRST_S) -> None:
        """`attempt` says whether it is done for now."""
        self._attempt = attempt
        self._first_s = first_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """There is something to do, before long. Harmless while it is under way."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="retries", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Try no more; an attempt under way is waited for."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        rest_s = self._first_s
        while not self._closed.wait(rest_s):
            try:
                is_done = self._attempt()
            except KVWeaveError as error:
                log.warning("%s", error)
                is_done = False
            rest_s = min(2 * rest_s, LONGEST_S)
            if is_done:
                break
        with self._lock:
            self._thread = None
