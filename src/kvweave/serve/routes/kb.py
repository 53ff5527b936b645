"""Knowledge bases: upload, list, delete, search. `browse.py` looks around in one."""

import asyncio
from contextlib import ExitStack, closing
from functools import partial

from fastapi import APIRouter, Request, Response

from kvweave.app.libraries.libraries import (
    IngestProgress,
    IngestReport,
    Later,
    Libraries,
    NoSuchKnowledgeBase,
    OnProgress,
    check_name,
)
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.routes.parameters import Name
from kvweave.serve.uploads.ingest_job import IngestJob
from kvweave.serve.uploads.reader import UploadReader
from kvweave.serve.uploads.spool import Spool
from kvweave.serve.wire.base import MOST_CHUNKS
from kvweave.serve.wire.kb import (
    HitList,
    HitOut,
    IngestOut,
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

LONGEST_QUERY = 32 << 10  # characters: an embedder reads the first few hundred words


def kb_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/kb", tags=["knowledge bases"], responses=KB_ERRORS)
    libraries, tasks, uploads = context.libraries, context.tasks, UploadReader(context.limits)

    @routes.get("")
    async def list_knowledge_bases(request: Request) -> KnowledgeBaseList:
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_knowledge_bases, libraries, tenant), client=client_of(request.scope)
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
        request: Request, name: str = Name, wait_for_kv: bool = False
    ) -> Response | IngestOut:
        tenant = tenant_of(request.scope)
        if libraries.config.root is None and name not in libraries.names(tenant):
            message = f"no knowledge base {name!r} here, and none can be made without --kb-root"
            raise ApiError(404, message)
        check_name(name)
        num_bytes = int(request.headers.get("content-length") or 0)
        let_go = await asyncio.to_thread(context.quotas.hold, tenant, name, num_bytes)
        with ExitStack() as held:
            held.callback(let_go)
            # before anything of the body is read
            admission = context.writing.admit(client_of(request.scope))
            held.callback(admission.leave)
            spool = held.enter_context(closing(Spool()))
            sources = await uploads.read(request, spool)
            ingest = partial(_ingest, context, tenant, name, sources, wait_for_kv)
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
        look = partial(_search, libraries, tenant_of(request.scope), name, body)
        return await tasks.run(look, client=client_of(request.scope))

    return routes


def _ingest(
    context: Context,
    tenant: str,
    name: str,
    sources: list[Later],
    wait_for_kv: bool,
    progress: OnProgress,
) -> IngestReport:
    def told(news: IngestProgress) -> None:
        context.writing.check()
        progress(news)

    libraries = context.libraries
    return libraries.ingest(tenant, name, sources, chunk_kv=wait_for_kv, progress=told)


def _knowledge_bases(libraries: Libraries, tenant: str) -> KnowledgeBaseList:
    names = libraries.names(tenant)
    return KnowledgeBaseList(data=[_knowledge_base(libraries, tenant, name) for name in names])


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
    )


def _search(libraries: Libraries, tenant: str, name: str, body: SearchRequest) -> HitList:
    hits = libraries.search(tenant, name, body.query, body.k, body.mode)
    return HitList(
        data=[
            HitOut(
                id=hit.chunk.id,
                document=hit.document,
                title=hit.chunk.title,
                text=hit.chunk.text,
                tokens=len(hit.chunk.token_ids),
                score=float(hit.score),
            )
            for hit in hits
        ]
    )
