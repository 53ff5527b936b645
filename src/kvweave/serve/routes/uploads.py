"""Documents that come in: uploads that a reply waits for, and those that are taken in behind it."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from fastapi import APIRouter, Request, Response

from kvweave.app.libraries.libraries import (
    FileBytes,
    IngestProgress,
    IngestReport,
    Later,
    LibraryKey,
    Metadata,
    OnProgress,
    TextSource,
    check_metadata,
    check_name,
)
from kvweave.serve.access.api_keys import client_of, tenant_of
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context, Name
from kvweave.serve.uploads.forms import Spool
from kvweave.serve.uploads.jobs import IngestJob, JobBoard
from kvweave.serve.wire.kb import IngestOut, JobList, JobOut
from kvweave.serve.wire.schema import KB_ERRORS, UPLOAD_BODY, or_events
from kvweave.serve.wire.sse import HEARTBEAT_S, EventStream, as_events
from kvweave.serve.workers.task_pool import Admission

Ingest = Callable[[OnProgress], IngestReport]


def upload_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/kb", tags=["knowledge bases"], responses=KB_ERRORS)
    board = JobBoard()

    @routes.post(
        "/{name}/documents",
        response_model=IngestOut,
        responses={200: or_events("The outcome, or events while it is made")},
        openapi_extra=UPLOAD_BODY,
    )
    async def upload_documents(
        request: Request, name: str = Name, wait_for_kv: bool = False, metadata: str = "{}"
    ) -> Response | IngestOut:
        """`metadata`: a JSON object for all files of a form."""
        kb, about = LibraryKey(tenant_of(request.scope), name), read_metadata(metadata)
        with ExitStack() as claims:
            admission, sources = await receive_upload(context, request, name, claims)
            ingest = make_ingest(context, kb, sources, chunk_kv=wait_for_kv, metadata=about)
            when_over = claims.pop_all()  # from here on they go when the work is over
            work = IngestJob(admission, ingest, when_over.close, kb)
        if wants_events(request):
            return events_of(work)
        report = await work.report()
        if report.skipped and len(report.skipped) == len(sources):
            reasons = "; ".join(f"{s.source}: {s.reason}" for s in report.skipped[:4])
            raise ApiError(400, f"nothing was taken in: {reasons}")
        return IngestOut.model_validate(report)

    @routes.post("/{name}/jobs", status_code=202, openapi_extra=UPLOAD_BODY)
    async def begin_job(
        request: Request, name: str = Name, wait_for_kv: bool = False, metadata: str = "{}"
    ) -> JobOut:
        """Take an upload in behind this reply. `wait_for_kv`: the job ends when its chunk KV is
        there, too."""
        kb, about = LibraryKey(tenant_of(request.scope), name), read_metadata(metadata)
        with ExitStack() as claims:
            admission, sources = await receive_upload(context, request, name, claims)
            job = board.add(*kb)
            ingest = make_ingest(context, kb, sources, chunk_kv=wait_for_kv, metadata=about)
            when_over = claims.pop_all()  # from here on they go when the work is over
            when_over.callback(job.drop)
            admission.begin(partial(job.run, ingest), when_over.close, kb)
        return JobOut.model_validate(job)

    @routes.get("/{name}/jobs")
    async def list_jobs(request: Request, name: str = Name) -> JobList:
        jobs = board.all(tenant_of(request.scope), name)
        return JobList(data=[JobOut.model_validate(job) for job in jobs])

    @routes.get("/{name}/jobs/{job_id}")
    async def get_job(request: Request, job_id: str, name: str = Name) -> JobOut:
        return JobOut.model_validate(board.get(tenant_of(request.scope), name, job_id))

    @routes.delete("/{name}/jobs/{job_id}")
    async def cancel_job(request: Request, job_id: str, name: str = Name) -> JobOut:
        """End a job where it is; documents that are complete stay. Nothing to one that is over."""
        job = board.get(tenant_of(request.scope), name, job_id)
        job.cancel()
        return JobOut.model_validate(job)

    return routes


async def receive_upload(
    context: Context, request: Request, name: str, claims: ExitStack
) -> tuple[Admission, list[Later]]:
    """Let an upload in, before anything of its body is read; then read it. Its place, its bytes and
    what it counts for quotas are given back with `claims`. Raises ApiError or RequestError for one
    that cannot be taken."""
    tenant = tenant_of(request.scope)
    refuse_unknown(context, tenant, name)
    check_name(name)
    num_bytes = int(request.headers.get("content-length") or 0)
    claims.callback(await asyncio.to_thread(context.quotas.hold, tenant, name, num_bytes))
    admission = context.writing.admit(client_of(request.scope))
    claims.callback(admission.leave)
    spool = claims.enter_context(closing(Spool()))
    try:
        return admission, await context.uploads.read(request, spool)
    except ApiError as error:
        if error.status_code < 500:
            await asyncio.to_thread(context.quotas.count_refused, tenant, spool.size_bytes)
        raise


def refuse_unknown(context: Context, tenant: str, name: str) -> None:
    """Raise a 404 for a knowledge base that is not there and cannot be made."""
    if context.libraries.config.root is None and name not in context.libraries.folders.names(
        tenant
    ):
        message = f"no knowledge base {name!r} here, and none can be made without --kb-root"
        raise ApiError(404, message)


def read_metadata(text: str) -> Metadata:
    """Read the `metadata` of a query. Raises a 400 for what is none."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        message = "'metadata' must be a JSON object of texts and numbers"
        raise ApiError(400, message, param="metadata")
    return check_metadata(given)


def make_ingest(
    context: Context,
    kb: LibraryKey,
    sources: Sequence[TextSource | FileBytes | Later],
    *,
    chunk_kv: bool = False,
    metadata: Metadata | None = None,
) -> Ingest:
    """Return what takes sources in on a worker thread. It ends in between where the server
    stops."""

    def ingest(progress: OnProgress) -> IngestReport:
        def on_progress(news: IngestProgress) -> None:
            context.writing.check()
            progress(news)

        return context.libraries.ingest(
            *kb, sources, chunk_kv=chunk_kv, progress=on_progress, metadata=metadata
        )

    return ingest


def wants_events(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def events_of(work: IngestJob) -> EventStream:
    """The reply to a client that looks on. One that leaves does not end the ingest."""
    return EventStream(as_events(work.events(), HEARTBEAT_S), on_close=lambda: None)
