"""What the web page begins with: GET /v1/info, the sample corpus, and conversations that the server
keeps for holders of API keys. Without keys the browser keeps its own: nobody could tell whose they
are."""

import asyncio

from fastapi import APIRouter, Request, Response

from kvweave import __version__
from kvweave.app.answer.question import TOP_K
from kvweave.app.dial import offered_dial, offered_ways
from kvweave.app.hosts import ModelHost
from kvweave.app.libraries.libraries import ENDINGS, Libraries, LibraryKey
from kvweave.app.libraries.sample import NAME, sample_documents, sample_questions
from kvweave.app.libraries.saved_conversations import SavedConversations
from kvweave.serve.access.api_keys import client_of, tenant_of
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context
from kvweave.serve.routes.uploads import events_of, make_ingest, refuse_unknown, wants_events
from kvweave.serve.uploads.jobs import IngestJob
from kvweave.serve.wire.kb import IngestOut
from kvweave.serve.wire.schema import TASK_ERRORS, or_events
from kvweave.serve.wire.web_page import (
    ConversationIn,
    ConversationLineOut,
    ConversationList,
    ConversationOut,
    ConversationRemoved,
    DemoLoaded,
    DemoOut,
    DialOut,
    InfoOut,
    RefusedWayOut,
    ServedModelOut,
    WayOut,
    page_options,
)


def info_routes(context: Context, *, has_keys: bool) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["web page"], responses=TASK_ERRORS)
    weave, libraries = context.weave, context.libraries

    @routes.get("/info")
    async def info(request: Request) -> InfoOut:
        models = _models(weave)
        usual = models[0]
        return InfoOut(
            model=usual.name,
            context=usual.context,
            version=__version__,
            keys=has_keys,
            kb_root=libraries.config.root is not None,
            kept_answers=context.page.kept_answers,
            conversations=has_keys and context.page.conversations is not None,
            tenant=tenant_of(request.scope),
            dial=usual.dial,
            strategies=usual.strategies,
            models=models,
            engine=bool(weave.engines),
            k=TOP_K,
            options=page_options(),
            formats=list(ENDINGS),
        )

    @routes.get("/demo")
    async def demo(request: Request) -> DemoOut:
        return await context.run(request, _demo, libraries, tenant_of(request.scope))

    @routes.post(
        "/demo",
        response_model=DemoLoaded,
        responses={200: or_events("The outcome, or events while it is made")},
    )
    async def load_demo(request: Request) -> Response | DemoLoaded:
        """Take the sample corpus in, as the knowledge base `demo`. Harmless the second time."""
        kb = LibraryKey(tenant_of(request.scope), NAME)
        refuse_unknown(context, *kb)
        let_go = await asyncio.to_thread(context.quotas.hold, *kb, 0)
        try:
            admission = context.writing.admit(client_of(request.scope))
            work = IngestJob(admission, make_ingest(context, kb, sample_documents()), let_go, kb)
        except BaseException:
            let_go()
            raise
        if wants_events(request):
            return events_of(work)
        report = IngestOut.model_validate(await work.report())
        return DemoLoaded(name=NAME, questions=sample_questions(), report=report)

    return routes


def _models(weave: ModelHost) -> list[ServedModelOut]:
    return [_model_out(weave, name, context) for name, context in weave.models().items()]


def _model_out(weave: ModelHost, name: str, context: int | None) -> ServedModelOut:
    ways = offered_ways(weave, name)
    return ServedModelOut(
        name=name,
        context=context,
        dial=[DialOut.model_validate(position) for position in offered_dial(ways)],
        strategies=[WayOut.model_validate(way) for way in ways if not way.why],
        refused=[RefusedWayOut.model_validate(way) for way in ways if way.why],
    )


def _demo(libraries: Libraries, tenant: str) -> DemoOut:
    is_there = NAME in libraries.folders.names(tenant)
    return DemoOut(
        name=NAME,
        documents=len(sample_documents()),
        questions=sample_questions(),
        loaded=is_there and libraries.totals(tenant, NAME).num_documents > 0,
    )


def conversation_routes(context: Context, *, has_keys: bool) -> APIRouter:
    routes = APIRouter(prefix="/v1/conversations", tags=["web page"], responses=TASK_ERRORS)
    folder = context.page.conversations
    store = SavedConversations(folder) if has_keys and folder is not None else None

    def find_store() -> SavedConversations:
        if store is None:
            message = "conversations are kept where API keys are set; keep them in the browser"
            raise ApiError(404, message, code="not_found")
        return store

    @routes.get("")
    async def list_conversations(request: Request) -> ConversationList:
        lines = await context.run(request, find_store().all, tenant_of(request.scope))
        return ConversationList(data=[ConversationLineOut.model_validate(line) for line in lines])

    @routes.get("/{conversation_id}")
    async def get_conversation(request: Request, conversation_id: str) -> ConversationOut:
        tenant = tenant_of(request.scope)
        found = await context.run(request, find_store().get, tenant, conversation_id)
        return ConversationOut(**{**found, "id": conversation_id})

    @routes.put("/{conversation_id}")
    async def put_conversation(
        body: ConversationIn, request: Request, conversation_id: str
    ) -> ConversationOut:
        content, tenant = body.model_dump(), tenant_of(request.scope)
        await context.run(request, find_store().put, tenant, conversation_id, content)
        return ConversationOut(id=conversation_id, **content)

    @routes.delete("/{conversation_id}")
    async def delete_conversation(request: Request, conversation_id: str) -> ConversationRemoved:
        tenant = tenant_of(request.scope)
        await context.run(request, find_store().delete, tenant, conversation_id)
        return ConversationRemoved(id=conversation_id)

    return routes
