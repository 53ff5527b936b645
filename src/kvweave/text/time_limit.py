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
ARRIVAL_S = 1.0  # for what was raised in another thread to arrive there


class TooLong(Exception):
    """Raised in the code that took too long."""


class TimeLimit:
    """Any number of threads, each with one piece of code at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what is below, but for taking a deadline out
        self._deadlines: dict[int, float] = {}  # by thread; who takes one out has it
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
        has_arrived = False
        try:
            yield
        except TooLong:
            has_arrived = True
            raise
        finally:
            # without the lock: what arrives between taking it and giving it back would keep it
            if self._deadlines.pop(own, None) is None and not has_arrived:
                time.sleep(ARRIVAL_S)  # it was raised, and arrives here at the latest

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(LOOK_S)
                now_s = time.monotonic()
                for thread, deadline_s in list(self._deadlines.items()):
                    # once, and not where the block has just ended
                    if now_s > deadline_s and self._deadlines.pop(thread, None) is not None:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(TooLong)
                        )
                if not self._deadlines:
                    self._watch = None
                    return


LIMIT = TimeLimit()  # of this process
