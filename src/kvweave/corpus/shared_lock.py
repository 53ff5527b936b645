"""Many readers or one writer, within a process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """Waiting writers hold back new readers, so a stream of searches cannot starve an update.

    Not re-entrant: a thread that reads must not ask to read again, or a waiting writer stops both.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._num_waiting = 0
        self._is_written = False

    @contextmanager
    def read(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written and not self._num_waiting)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_written and not self._num_readers)
                self._is_written = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
