"""Runs answers on worker threads and brings them to asyncio.

The core is synchronous and computes on the thread that iterates; the edge is asynchronous. A job is
admitted or refused at once, so a full house is a quick 429 and not a long silence.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.app import Answering
from kvweave.errors import ConfigError
from kvweave.serve.errors import ApiError
from kvweave.serve.mailbox import Mailbox

log = logging.getLogger(__name__)

Start = Callable[[], Answering]  # may block and raise: it tokenises and checks the prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes on."""

    running: int = 4  # answers computed at once; they take turns token by token
    waiting: int = 32  # admitted behind them; beyond that, 429
    body_bytes: int = 8 << 20  # of one request; beyond that, 413

    def __post_init__(self) -> None:
        for name, least in (("running", 1), ("waiting", 0), ("body_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"Limits.{name} must be at least {least}")


class Counts(NamedTuple):
    """What the bridge is doing and has done."""

    running: int
    waiting: int
    finished: int
    failed: int
    abandoned: int


class Job:
    """One admitted request: read its mailbox, then `abandon` it, whatever happened."""

    def __init__(self, start: Start) -> None:
        self.mailbox = Mailbox()
        self._start = start
        self._abandoned = threading.Event()
        self._future: Future[str] | None = None

    def submit(self, workers: ThreadPoolExecutor) -> "Future[str]":
        self._future = workers.submit(self._work)
        return self._future

    def abandon(self) -> None:
        """Stop at the next token. Does nothing to a job that is done. From any thread."""
        self._abandoned.set()
        if self._future is not None and self._future.cancel():  # it never began
            self.mailbox.fail(_gone())

    def _work(self) -> str:
        """Compute on a worker thread; return which of Counts this was."""
        try:
            answering = self._start()
            try:
                self.mailbox.open()
                pieces = iter(answering)
                while not self._abandoned.is_set() and (piece := next(pieces, None)):
                    self.mailbox.put(piece)
            finally:
                answering.close()
        except Exception as error:  # whatever it is, the one who waits must hear of it
            self.mailbox.fail(error)
            return "failed"
        if answering.answer is None:
            log.info("abandoned an answer")
            self.mailbox.fail(_gone())
            return "abandoned"
        self.mailbox.end(answering.answer)
        return "finished"


class Bridge:
    """Admits jobs and counts them. Used on the event loop; only the counting is on any thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._workers = ThreadPoolExecutor(limits.running, thread_name_prefix="answer")
        self._lock = threading.Lock()  # guards the two below
        self._jobs: set[Job] = set()
        self._ended = {"finished": 0, "failed": 0, "abandoned": 0}

    def submit(self, start: Start) -> Job:
        """Admit a request, or raise a 429 that says when to try again."""
        most = self._limits.running + self._limits.waiting
        job = Job(start)
        with self._lock:
            if len(self._jobs) >= most:
                raise ApiError(
                    429,
                    f"{most} requests are running or waiting already; try again in a moment",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "1"},
                )
            self._jobs.add(job)
        job.submit(self._workers).add_done_callback(lambda future: self._leave(job, future))
        return job

    def counts(self) -> Counts:
        with self._lock:
            running = min(len(self._jobs), self._limits.running)
            return Counts(running, len(self._jobs) - running, **self._ended)

    def abandon_all(self) -> None:
        """Stop every job at its next token; those who wait for them get a 503."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.abandon()

    async def close(self) -> None:
        """Abandon what is left and wait for the workers."""
        self.abandon_all()
        await asyncio.to_thread(self._workers.shutdown)

    def _leave(self, job: Job, future: "Future[str]") -> None:
        if future.cancelled():
            how = "abandoned"
        else:  # an exception here is a mailbox without a loop: the server was forced to quit
            how = "failed" if future.exception() is not None else future.result()
        with self._lock:
            self._jobs.remove(job)
            self._ended[how] += 1


def _gone() -> ApiError:
    return ApiError(503, "the server stopped before the answer was finished")
