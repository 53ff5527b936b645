"""A few threads that block so that no other has to. One pool per tier: a hung remote fills its own
threads and no other's."""

import logging
import queue
import threading
import time
from collections.abc import Callable

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
