"""Knowledge bases: upload, list, delete, search. `browse.py` looks around in one."""

import asyncio
import json
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from kvweave.app.libraries.libraries import (
    IngestProgress,
    IngestReport,
    Later,
    Libraries,
    Metadata,
    NoSuchKnowledgeBase,
    OnProgress,
    SearchOptions,
    check_metadata,
    check_name,
)
from kvweave.app.libraries.library_browser import section_title
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.routes.parameters import Name, check_limit
from kvweave.serve.uploads.ingest_job import IngestJob
from kvweave.serve.uploads.spool import Spool
from kvweave.serve.wire.base import MOST_CHUNKS
from kvweave.serve.wire.kb import (
    HitList,
    HitOut,
    IngestOut,
    KnowledgeBaseChange,
    KnowledgeBaseList,
    KnowledgeBaseOut,
    KnowledgeBaseRemoved,
    RemovedOut,
    SearchRequest,
    kv_out,
    report_out,
)
from kvweave.serve.wire.schema import KB_ERRORS, UPLOAD_BODY, or_events
from kvweave.serve.wire.sse import HEARTBEAT_S, EventStream, as_events
from kvweave.serve.workers.task_pool import Admission

MOST_LISTED = 500  # knowledge bases of one page
LONGEST_QUERY = 32 << 10  # characters: an embedder reads the first few hundred words


def kb_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/kb", tags=["knowledge bases"], responses=KB_ERRORS)
    libraries, tasks = context.libraries, context.tasks

    @routes.get("")
    async def list_knowledge_bases(
        request: Request, after: str | None = None, limit: int | None = None
    ) -> KnowledgeBaseList:
        """All knowledge bases by name; with `limit` a page of those behind the one `after`."""
        if limit is not None:
            check_limit(limit, MOST_LISTED)
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_knowledge_bases, libraries, tenant, after, limit),
            client=client_of(request.scope),
        )

    @routes.get("/{name}")
    async def get_knowledge_base(request: Request, name: str = Name) -> KnowledgeBaseOut:
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_one_knowledge_base, libraries, tenant, name), client=client_of(request.scope)
        )

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
        tenant, said = tenant_of(request.scope), read_metadata(metadata)
        with ExitStack() as held:
            admission, sources = await receive_upload(context, request, name, held)
            upload = Upload(tenant, name, sources, wait_for_kv, said)
            ingest = partial(ingest_upload, context, upload)
            over = held.pop_all()  # from here on it goes when the work is over
            work = IngestJob(admission, ingest, over.close, turn=(tenant, name))
        if "text/event-stream" in request.headers.get("accept", ""):
            events = as_events(work.events(), HEARTBEAT_S)
            return EventStream(events, on_close=lambda: None)
        report = await work.report()
        if report.skipped and len(report.skipped) == len(sources):
            reasons = "; ".join(f"{s.source}: {s.reason}" for s in report.skipped[:4])
            raise ApiError(400, f"nothing was taken in: {reasons}")
        return report_out(report)

    @routes.delete("/{name}/documents/{document_id}")
    async def delete_document(request: Request, document_id: str, name: str = Name) -> RemovedOut:
        tenant = tenant_of(request.scope)
        remove = partial(libraries.remove, tenant, name, document_id)
        removed = await context.writing.run(
            remove, turn=(tenant, name), client=client_of(request.scope)
        )
        return RemovedOut(id=document_id, chunks=removed)

    @routes.patch("/{name}")
    async def change_knowledge_base(
        request: Request, body: KnowledgeBaseChange, name: str = Name
    ) -> KnowledgeBaseOut:
        """Change what is usual for its questions."""
        tenant = tenant_of(request.scope)
        order = None if body.order == "configured" else body.order
        change = partial(libraries.set_order, tenant, name, order)
        await context.writing.run(change, turn=(tenant, name), client=client_of(request.scope))
        return await tasks.run(
            partial(_one_knowledge_base, libraries, tenant, name),
            client=client_of(request.scope),
        )

    @routes.delete("/{name}")
    async def delete_knowledge_base(request: Request, name: str = Name) -> KnowledgeBaseRemoved:
        """Delete a knowledge base with all its documents and chunk KV."""
        tenant = tenant_of(request.scope)
        delete = partial(libraries.delete, tenant, name)
        await context.writing.run(delete, turn=(tenant, name), client=client_of(request.scope))
        context.kept.forget_kb(tenant, name)
        return KnowledgeBaseRemoved(name=name)

    @routes.post("/{name}/search")
    async def search(request: Request, body: SearchRequest, name: str = Name) -> HitList:
        if not body.query.strip():
            raise ApiError(400, "'query' is empty; say something", param="query")
        if len(body.query) > LONGEST_QUERY:
            message = f"'query' must be at most {LONGEST_QUERY:,} characters; say less"
            raise ApiError(400, message, param="query")
        if not 1 <= body.k <= MOST_CHUNKS:
            message = f"'k' must be between 1 and {MOST_CHUNKS}, got {body.k}"
            raise ApiError(400, message, param="k")
        how = libraries.search_options(body.retrieval, body.min_score, body.filter)
        look = partial(_search, libraries, tenant_of(request.scope), name, body, how)
        return await tasks.run(look, client=client_of(request.scope))

    return routes


async def receive_upload(
    context: Context, request: Request, name: str, held: ExitStack
) -> tuple[Admission, list[Later]]:
    """Let an upload in, before anything of its body is read; then read it. Its place, its bytes and
    what it counts for quotas are given back with `held`. Raises ApiError or RequestError for one
    that cannot be taken."""
    libraries, tenant = context.libraries, tenant_of(request.scope)
    if libraries.config.root is None and name not in libraries.names(tenant):
        message = f"no knowledge base {name!r} here, and none can be made without --kb-root"
        raise ApiError(404, message)
    check_name(name)
    num_bytes = int(request.headers.get("content-length") or 0)
    held.callback(await asyncio.to_thread(context.quotas.hold, tenant, name, num_bytes))
    admission = context.writing.admit(client_of(request.scope))
    held.callback(admission.leave)
    spool = held.enter_context(closing(Spool()))
    try:
        return admission, await context.uploads.read(request, spool)
    except ApiError as error:
        if error.status_code < 500:
            await asyncio.to_thread(context.quotas.count_refused, tenant, spool.size_bytes)
        raise


class Upload(NamedTuple):
    """What is to be taken in, and where."""

    tenant: str
    name: str
    sources: list[Later]
    wait_for_kv: bool
    metadata: Metadata


def read_metadata(text: str) -> Metadata:
    """The `metadata` of a query. Raises a 400 for what is none."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        message = "'metadata' must be a JSON object of texts and numbers"
        raise ApiError(400, message, param="metadata")
    return check_metadata(given)


def ingest_upload(context: Context, upload: Upload, progress: OnProgress) -> IngestReport:
    """Take an upload in, on a worker thread. Ends in between where the server stops."""

    def told(news: IngestProgress) -> None:
        context.writing.check()
        progress(news)

    return context.libraries.ingest(
        upload.tenant,
        upload.name,
        upload.sources,
        chunk_kv=upload.wait_for_kv,
        progress=told,
        metadata=upload.metadata,
    )


def _knowledge_bases(
    libraries: Libraries, tenant: str, after: str | None, limit: int | None
) -> KnowledgeBaseList:
    names = [name for name in libraries.names(tenant) if after is None or name > after]
    shown = names[:limit]
    return KnowledgeBaseList(
        data=[_knowledge_base(libraries, tenant, name) for name in shown],
        next=shown[-1] if len(names) > len(shown) else None,
    )


def _one_knowledge_base(libraries: Libraries, tenant: str, name: str) -> KnowledgeBaseOut:
    if check_name(name) not in libraries.names(tenant):
        known = ", ".join(libraries.names(tenant)[:8]) or "none yet"
        raise NoSuchKnowledgeBase(f"no knowledge base {name!r} here; known: {known}")
    return _knowledge_base(libraries, tenant, name)


def _knowledge_base(libraries: Libraries, tenant: str, name: str) -> KnowledgeBaseOut:
    status = libraries.status(tenant, name)
    return KnowledgeBaseOut(
        name=name,
        documents=status.totals.num_documents,
        chunks=status.totals.num_chunks,
        tokens=status.totals.num_tokens,
        kv=kv_out(status.kv),
        problem=status.problem,
        models=list(libraries.models_of(tenant, name)),
        order=status.order,
    )


def _search(
    libraries: Libraries, tenant: str, name: str, body: SearchRequest, how: SearchOptions
) -> HitList:
    with libraries.browse(tenant, name) as browser:
        found = browser.search(body.query, body.k, how)
    return HitList(
        data=[
            HitOut(
                id=hit.chunk.id,
                document=hit.document,
                title=section_title(hit.chunk),
                text=hit.chunk.text,
                tokens=len(hit.chunk.token_ids),
                score=float(hit.score),
                chars=chars,
                tier=tier,
                fate="computed" if tier is None else "reused",
            )
            for hit, chars, tier in found
        ]
    )
