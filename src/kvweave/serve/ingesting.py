"""An upload while it is taken in: progress as events, then the outcome."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from kvweave.serve.chores import Chores
from kvweave.serve.wire_kb import IngestOut, ProgressOut, SkippedOut


class Progress(Protocol):
    """As ingest tells it."""

    @property
    def phase(self) -> Any: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int | None: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...


async def ingest_events(
    chores: Chores, ingest: Callable[..., Any]
) -> AsyncIterator[dict[str, Any]]:
    """Events of an ingest that runs as a chore; the last is its outcome.

    A client that leaves ends the events, not the ingest.
    """
    loop = asyncio.get_running_loop()
    # Only the last progress matters to a slow reader: one place.
    latest: list[Progress] = []
    news = asyncio.Event()

    def heard(progress: Progress) -> None:
        latest[:] = [progress]
        news.set()

    def tell(progress: Progress) -> None:  # on the ingesting thread
        loop.call_soon_threadsafe(heard, progress)

    work = asyncio.ensure_future(chores.run(lambda: ingest(progress=tell)))
    work.add_done_callback(lambda _: news.set())
    while True:
        await news.wait()
        news.clear()
        if latest:
            yield _progress(latest.pop())
        if work.done():
            yield report_out(work.result()).model_dump()
            return


def report_out(report: Any) -> IngestOut:
    """An IngestReport in the wire format."""
    return IngestOut(
        added=report.added,
        updated=report.updated,
        unchanged=report.unchanged,
        removed=report.removed,
        new_chunks=report.new_chunks,
        shared_chunks=report.shared_chunks,
        skipped=[SkippedOut(source=s.source, reason=s.reason) for s in report.skipped],
        elapsed_s=round(report.elapsed_s, 3),
    )


def _progress(progress: Progress) -> dict[str, Any]:
    return ProgressOut(
        phase=progress.phase,
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
        documents=progress.num_documents,
        chunks=progress.num_chunks,
    ).model_dump()
