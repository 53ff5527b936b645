"""A bound on the time of Python code that nobody here wrote: chat templates come with a model.

A template can loop for ever, by a loop in a loop or by a macro that calls itself. One thread
watches all that run, and raises TooLong in a thread whose time is up; it arrives between two
instructions of the interpreter, so code that never returns to it cannot be ended like this.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_S = 0.2  # between two looks


class TooLong(Exception):
    """Raised in the code that took too long."""


class TimeLimit:
    """Any number of threads, each with one piece of code at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._deadlines: dict[int, float] = {}  # by thread
        self._watch: threading.Thread | None = None  # runs while there is something to watch

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raises TooLong if the block takes longer."""
        own = threading.get_ident()
        with self._changed:
            self._deadlines[own] = time.monotonic() + seconds
            if self._watch is None:
                self._watch = threading.Thread(target=self._look, name="time-limit", daemon=True)
                self._watch.start()
        try:
            yield
        finally:
            # what was raised and has not arrived yet arrives here at the latest
            with self._changed:
                self._deadlines.pop(own, None)

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(LOOK_S)
                now_s = time.monotonic()
                for thread, deadline_s in list(self._deadlines.items()):
                    if now_s > deadline_s:
                        del self._deadlines[thread]  # once
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(TooLong)
                        )
                if not self._deadlines:
                    self._watch = None
                    return


LIMIT = TimeLimit()  # of this process
