"""Ingests under way: one whose client waits for it, and jobs that are begun, looked at, ended.

Both are tasks of the writing pool, so those of one knowledge base take turns and none keeps a
search waiting. What is complete stays, however a job ends. The list is in memory:
a server that is started again has none, and an upload that is sent again does what is missing.
"""

import asyncio
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any, Literal

from kvweave.app.libraries.libraries import IngestProgress, IngestReport, OnProgress
from kvweave.errors import EngineClosed
from kvweave.serve.access.errors import ApiError, as_api_error
from kvweave.serve.wire.kb import IngestOut, ProgressOut
from kvweave.serve.workers.task_pool import Admission

KEPT = 100  # jobs of one tenant that are over
JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
OVER = ("done", "failed", "cancelled")


class UploadJob:
    """One upload that is taken in. `run` on a worker thread; the rest from any."""

    def __init__(self, kb: str) -> None:
        self.id = f"job-{secrets.token_hex(8)}"
        self.kb = kb
        self.created = time.time()  # seconds since 1970
        self.ended: float | None = None
        self.state: JobState = "waiting"
        self.progress: IngestProgress | None = None
        self.report: IngestReport | None = None
        self.error: str | None = None  # why it failed
        self._is_cancelled = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    def cancel(self) -> None:
        """End where it is. Nothing to a job that is over."""
        self._is_cancelled.set()

    def run(self, ingest: Callable[[OnProgress], IngestReport]) -> None:
        """Take it in. Never raises: what went wrong is in `error`."""
        try:
            self._check()
            self.state = "running"
            self.report = ingest(self._on_progress)
            self._end("done")
        except Exception as error:
            if self._is_cancelled.is_set():
                self._end("cancelled")
                return
            self.error = str(as_api_error(error).detail)
            self._end("failed")

    def drop(self) -> None:
        """It will not be run, or has been."""
        if not self.is_over:
            self.error = "the server stopped before it was taken in; send it again"
            self._end("failed")

    def _on_progress(self, progress: IngestProgress) -> None:
        self._check()
        self.progress = progress

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise EngineClosed("cancelled")

    def _end(self, state: JobState) -> None:
        self.ended = time.time()
        self.state = state


class JobBoard:
    """The jobs of one server, by tenant. Any thread."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._jobs: dict[str, OrderedDict[str, UploadJob]] = {}

    def add(self, tenant: str, kb: str) -> UploadJob:
        """A new one, which waits. Of those that are over the oldest makes way."""
        job = UploadJob(kb)
        with self._lock:
            own = self._jobs.setdefault(tenant, OrderedDict())
            own[job.id] = job
            over = [each.id for each in own.values() if each.is_over]
            for name in over[: max(0, len(over) - self._kept)]:
                del own[name]
        return job

    def all(self, tenant: str, kb: str) -> list[UploadJob]:
        """Newest first."""
        with self._lock:
            found = self._jobs.get(tenant)
            own = [] if found is None else list(found.values())
        return [job for job in reversed(own) if job.kb == kb]

    def get(self, tenant: str, kb: str, job_id: str) -> UploadJob:
        """Raises a 404."""
        with self._lock:
            own = self._jobs.get(tenant)
            job = None if own is None else own.get(job_id)
        if job is None or job.kb != kb:
            message = f"no job {job_id[:60]!r} of {kb!r} here; the last {self._kept} are kept"
            raise ApiError(404, message, code="not_found")
        return job


class IngestJob:
    """An ingest in the task pool, from now on. A client that leaves ends the events, not the
    ingest. On the event loop."""

    def __init__(
        self,
        admission: Admission,
        ingest: Callable[[OnProgress], IngestReport],
        on_done: Callable[[], None],
        turn: Hashable,
    ) -> None:
        """`on_done` is called once it is over, however it ended; `turn`: see `Admission`."""
        self._loop = asyncio.get_running_loop()
        self._latest: list[IngestProgress] = []  # one place: a slow reader hears the last alone
        self._news = asyncio.Event()
        self._work = admission.begin(lambda: ingest(self._tell), on_done, turn)
        self._work.add_done_callback(self._over)

    async def report(self) -> IngestReport:
        return await self._work

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events until it is over; the last is its outcome."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._latest:
                yield ProgressOut.model_validate(self._latest.pop()).model_dump()
            if self._work.done():
                yield IngestOut.model_validate(self._work.result()).model_dump()
                return

    def _tell(self, progress: IngestProgress) -> None:  # on the ingesting thread
        self._loop.call_soon_threadsafe(self._show, progress)

    def _show(self, progress: IngestProgress) -> None:
        self._latest[:] = [progress]
        self._news.set()

    def _over(self, work: "asyncio.Future[IngestReport]") -> None:
        self._news.set()
        if not work.cancelled():
            work.exception()  # seen: the client that waited may have left
