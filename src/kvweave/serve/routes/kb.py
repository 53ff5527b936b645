"""Knowledge bases: list, change, delete, search, look around in one. `uploads.py` fills them."""

from fastapi import APIRouter, Request

from kvweave.app.libraries.libraries import (
    Libraries,
    LibraryKey,
    SearchOptions,
    check_name,
)
from kvweave.app.libraries.library_browser import DocumentInfo, LibraryBrowser
from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context, Name, check_limit
from kvweave.serve.wire.base import MOST_CHUNKS
from kvweave.serve.wire.kb import (
    ChunkDetail,
    ChunkLineOut,
    DocumentDetail,
    DocumentKVOut,
    DocumentList,
    DocumentOut,
    HitList,
    HitOut,
    HotChunkList,
    HotChunkOut,
    KnowledgeBaseChange,
    KnowledgeBaseList,
    KnowledgeBaseOut,
    KnowledgeBaseRemoved,
    KVOut,
    RemovedOut,
    SearchRequest,
)
from kvweave.serve.wire.schema import KB_ERRORS

MOST_LISTED = 500  # of one page: knowledge bases, documents, chunks
HOT = 20  # chunks, unless it is said
LONGEST_QUERY = 32 << 10  # characters: an embedder reads the first few hundred words


def kb_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/kb", tags=["knowledge bases"], responses=KB_ERRORS)
    libraries = context.libraries

    @routes.get("")
    async def list_knowledge_bases(
        request: Request, after: str | None = None, limit: int | None = None
    ) -> KnowledgeBaseList:
        """All knowledge bases by name; with `limit` a page of those behind the one `after`."""
        if limit is not None:
            check_limit(limit, MOST_LISTED)
        tenant = tenant_of(request.scope)
        return await context.run(request, _knowledge_bases, libraries, tenant, after, limit)

    @routes.get("/{name}")
    async def get_knowledge_base(request: Request, name: str = Name) -> KnowledgeBaseOut:
        tenant = tenant_of(request.scope)
        return await context.run(request, _one_knowledge_base, libraries, tenant, name)

    @routes.delete("/{name}/documents/{document_id}")
    async def delete_document(request: Request, document_id: str, name: str = Name) -> RemovedOut:
        tenant = tenant_of(request.scope)
        removed = await context.write(request, name, libraries.remove, tenant, name, document_id)
        return RemovedOut(id=document_id, chunks=removed)

    @routes.patch("/{name}")
    async def change_knowledge_base(
        request: Request, body: KnowledgeBaseChange, name: str = Name
    ) -> KnowledgeBaseOut:
        """Change what is usual for its questions."""
        tenant = tenant_of(request.scope)
        order = None if body.order == "configured" else body.order
        await context.write(request, name, libraries.set_order, tenant, name, order)
        return await context.run(request, _one_knowledge_base, libraries, tenant, name)

    @routes.post("/{name}/prepare", status_code=202)
    async def prepare(request: Request, name: str = Name) -> KnowledgeBaseOut:
        """Make the chunk KV that it lacks now, beside answers, until nothing is left."""
        tenant = tenant_of(request.scope)
        await context.run(request, libraries.hurry_kv, tenant, name)
        return await context.run(request, _one_knowledge_base, libraries, tenant, name)

    @routes.delete("/{name}")
    async def delete_knowledge_base(request: Request, name: str = Name) -> KnowledgeBaseRemoved:
        """Delete a knowledge base with all its documents and chunk KV."""
        tenant = tenant_of(request.scope)
        await context.write(request, name, libraries.delete, tenant, name)
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
        tenant = tenant_of(request.scope)
        return await context.run(request, _search, libraries, tenant, name, body, how)

    @routes.get("/{name}/documents")
    async def list_documents(
        request: Request, name: str = Name, after: str | None = None, limit: int | None = None
    ) -> DocumentList:
        """All documents; with `limit` a page of them, each with its chunk KV."""
        if limit is not None:
            check_limit(limit, MOST_LISTED)
        tenant = tenant_of(request.scope)
        return await context.run(request, _documents, libraries, tenant, name, after, limit)

    @routes.get("/{name}/documents/{document_id}")
    async def get_document(request: Request, document_id: str, name: str = Name) -> DocumentDetail:
        tenant = tenant_of(request.scope)
        return await context.run(request, _document, libraries, tenant, name, document_id)

    @routes.get("/{name}/chunks/{chunk_id}")
    async def get_chunk(request: Request, chunk_id: str, name: str = Name) -> ChunkDetail:
        tenant = tenant_of(request.scope)
        return await context.run(request, _chunk, libraries, tenant, name, chunk_id)

    @routes.get("/{name}/hottest")
    async def hottest(request: Request, name: str = Name, limit: int = HOT) -> HotChunkList:
        """The chunks that were in most prompts since the server began."""
        check_limit(limit, MOST_LISTED)
        tenant = tenant_of(request.scope)
        return await context.run(request, _hottest, libraries, tenant, name, limit)

    return routes


# What follows runs on task threads.


def _knowledge_bases(
    libraries: Libraries, tenant: str, after: str | None, limit: int | None
) -> KnowledgeBaseList:
    names = [name for name in libraries.folders.names(tenant) if after is None or name > after]
    shown = names[:limit]
    return KnowledgeBaseList(
        data=[_knowledge_base(libraries, tenant, name) for name in shown],
        next=shown[-1] if len(names) > len(shown) else None,
    )


def _one_knowledge_base(libraries: Libraries, tenant: str, name: str) -> KnowledgeBaseOut:
    if check_name(name) not in libraries.folders.names(tenant):
        raise libraries.folders.unknown(LibraryKey(tenant, name))
    return _knowledge_base(libraries, tenant, name)


def _knowledge_base(libraries: Libraries, tenant: str, name: str) -> KnowledgeBaseOut:
    status = libraries.status(tenant, name)
    return KnowledgeBaseOut(
        name=name,
        documents=status.totals.num_documents,
        chunks=status.totals.num_chunks,
        tokens=status.totals.num_tokens,
        kv=KVOut.model_validate(status.kv),
        problem=status.problem,
        models=list(libraries.models_of(tenant, name)),
        order=status.order,
    )


def _search(
    libraries: Libraries, tenant: str, name: str, body: SearchRequest, how: SearchOptions
) -> HitList:
    with libraries.browse(tenant, name) as browser:
        hits = browser.search(body.query, body.k, how)
    return HitList(data=[HitOut.model_validate(hit) for hit in hits])


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
    document = DocumentOut.model_validate(info)
    if browser is None:
        return document
    return document.model_copy(update={"kv": DocumentKVOut.model_validate(browser.kv(info))})


def _document(libraries: Libraries, tenant: str, name: str, document_id: str) -> DocumentDetail:
    with libraries.browse(tenant, name) as browser:
        (info, kv), chunks = browser.document(document_id)
    return DocumentDetail(
        **DocumentOut.model_validate(info).model_dump(exclude={"kv"}),
        kv=DocumentKVOut.model_validate(kv),
        pieces=[ChunkLineOut.model_validate(line) for line in chunks],
    )


def _chunk(libraries: Libraries, tenant: str, name: str, chunk_id: str) -> ChunkDetail:
    with libraries.browse(tenant, name) as browser:
        return ChunkDetail.model_validate(browser.chunk(chunk_id))


def _hottest(libraries: Libraries, tenant: str, name: str, limit: int) -> HotChunkList:
    with libraries.browse(tenant, name) as browser:
        lines = browser.hottest(limit)
    return HotChunkList(data=[HotChunkOut.model_validate(line) for line in lines])
