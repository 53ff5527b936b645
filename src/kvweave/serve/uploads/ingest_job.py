"""An upload while it is taken in: progress as events, then the outcome."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

from kvweave.app.libraries.libraries import IngestProgress, IngestReport, OnProgress
from kvweave.serve.wire.kb import progress_out, report_out
from kvweave.serve.workers.task_pool import Admission


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
                yield progress_out(self._latest.pop()).model_dump()
            if self._work.done():
                yield report_out(self._work.result()).model_dump()
                return

    def _tell(self, progress: IngestProgress) -> None:  # on the ingesting thread
        self._loop.call_soon_threadsafe(self._heard, progress)

    def _heard(self, progress: IngestProgress) -> None:
        self._latest[:] = [progress]
        self._news.set()

    def _over(self, work: "asyncio.Future[IngestReport]") -> None:
        self._news.set()
        if not work.cancelled():
            work.exception()  # seen: the client that waited may have left
