"""Looking around in a knowledge base: its documents, their chunks, which are asked about most."""

from functools import partial

from fastapi import APIRouter, Request

from kvweave.app.libraries.libraries import Libraries
from kvweave.app.libraries.library_browser import (
    ChunkLine,
    DocumentInfo,
    DocumentKV,
    LibraryBrowser,
    section_title,
)
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.routes.parameters import Name, check_limit
from kvweave.serve.wire.kb import (
    ChunkDetail,
    ChunkLineOut,
    DocumentDetail,
    DocumentKVOut,
    DocumentList,
    DocumentOut,
    HotChunkList,
    HotChunkOut,
    NeighbourOut,
)
from kvweave.serve.wire.schema import KB_ERRORS

MOST_DOCUMENTS = 500  # of one page
MOST_HOT = 500
HOT = 20  # unless it is said


def browse_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/kb", tags=["knowledge bases"], responses=KB_ERRORS)
    libraries, tasks = context.libraries, context.tasks

    @routes.get("/{name}/documents")
    async def list_documents(
        request: Request, name: str = Name, after: str | None = None, limit: int | None = None
    ) -> DocumentList:
        """All documents; with `limit` a page of them, each with its chunk KV."""
        if limit is not None:
            check_limit(limit, MOST_DOCUMENTS)
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_documents, libraries, tenant, name, after, limit),
            client=client_of(request.scope),
        )

    @routes.get("/{name}/documents/{document_id}")
    async def get_document(request: Request, document_id: str, name: str = Name) -> DocumentDetail:
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_document, libraries, tenant, name, document_id),
            client=client_of(request.scope),
        )

    @routes.get("/{name}/chunks/{chunk_id}")
    async def get_chunk(request: Request, chunk_id: str, name: str = Name) -> ChunkDetail:
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_chunk, libraries, tenant, name, chunk_id), client=client_of(request.scope)
        )

    @routes.get("/{name}/hottest")
    async def hottest(request: Request, name: str = Name, limit: int = HOT) -> HotChunkList:
        """The chunks that were in most prompts since the server began."""
        check_limit(limit, MOST_HOT)
        tenant = tenant_of(request.scope)
        return await tasks.run(
            partial(_hottest, libraries, tenant, name, limit), client=client_of(request.scope)
        )

    return routes


def _documents(
    libraries: Libraries, tenant: str, name: str, after: str | None, limit: int | None
) -> DocumentList:
    with libraries.browse(tenant, name) as browser:
        found = browser.documents(after, None if limit is None else limit + 1)
        shown = found[:limit]
        return DocumentList(
            data=[_document_out(info, None if limit is None else browser) for info in shown],
            next=shown[-1].id if len(found) > len(shown) else None,
        )


def _document_out(info: DocumentInfo, browser: LibraryBrowser | None) -> DocumentOut:
    return DocumentOut(
        id=info.id,
        source=info.source,
        title=info.title,
        chars=info.num_chars,
        chunks=info.num_chunks,
        tokens=info.num_tokens,
        added_at=info.added_at,
        metadata=info.metadata,
        kv=None if browser is None else _kv_out(browser.kv(info)),
    )


def _kv_out(kv: DocumentKV) -> DocumentKVOut:
    return DocumentKVOut(state=kv.state, chunks_done=kv.chunks_done, bytes=kv.num_bytes)


def _document(libraries: Libraries, tenant: str, name: str, document_id: str) -> DocumentDetail:
    with libraries.browse(tenant, name) as browser:
        (info, kv), chunks = browser.document(document_id)
    plain = _document_out(info, None).model_dump(exclude={"kv"})
    return DocumentDetail(**plain, kv=_kv_out(kv), pieces=[_line_out(line) for line in chunks])


def _line_out(line: ChunkLine) -> ChunkLineOut:
    return ChunkLineOut(
        id=line.chunk.id,
        index=line.place,
        heading=section_title(line.chunk),
        tokens=len(line.chunk.token_ids),
        asked=line.asked,
    )


def _chunk(libraries: Libraries, tenant: str, name: str, chunk_id: str) -> ChunkDetail:
    with libraries.browse(tenant, name) as browser:
        found = browser.chunk(chunk_id)
    return ChunkDetail(
        id=found.chunk.id,
        document=found.document.id,
        document_title=found.document.title,
        title=section_title(found.chunk),
        index=found.place,
        text=found.chunk.text,
        tokens=len(found.chunk.token_ids),
        asked=found.asked,
        kv=found.kv_bytes,
        previous=found.previous,
        next=found.following,
        neighbours=[
            NeighbourOut(
                id=hit.chunk.id,
                document=hit.document,
                title=section_title(hit.chunk),
                score=float(hit.score),
            )
            for hit in found.neighbours
        ],
    )


def _hottest(libraries: Libraries, tenant: str, name: str, limit: int) -> HotChunkList:
    with libraries.browse(tenant, name) as browser:
        lines = browser.hottest(limit)
        holders = browser.holders([line.chunk.id for line in lines])
    return HotChunkList(
        data=[
            HotChunkOut(**_line_out(line).model_dump(), document=holders[line.chunk.id])
            for line in lines
            if line.chunk.id in holders
        ]
    )
