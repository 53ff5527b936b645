"""GET /v1/info, and the sample corpus: GET and POST /v1/demo."""

import asyncio
from functools import partial

from fastapi import APIRouter, Request, Response

from kvweave import __version__
from kvweave.app.answer.question import TOP_K
from kvweave.app.dial import offered_dial, offered_ways
from kvweave.app.hosts import ModelHost
from kvweave.app.libraries.libraries import (
    ENDINGS,
    IngestProgress,
    IngestReport,
    Libraries,
    OnProgress,
)
from kvweave.app.libraries.sample import NAME, sample_documents, sample_questions
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.uploads.ingest_job import IngestJob
from kvweave.serve.wire.info import DemoLoaded, DemoOut, DialOut, InfoOut, ServedModelOut, WayOut
from kvweave.serve.wire.kb import report_out
from kvweave.serve.wire.schema import TASK_ERRORS, or_events
from kvweave.serve.wire.sse import HEARTBEAT_S, EventStream, as_events


def info_routes(context: Context, *, has_keys: bool) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["web page"], responses=TASK_ERRORS)
    weave, libraries, tasks = context.weave, context.libraries, context.tasks

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
            formats=list(ENDINGS),
        )

    @routes.get("/demo")
    async def demo(request: Request) -> DemoOut:
        return await tasks.run(
            partial(_demo, libraries, tenant_of(request.scope)), client=client_of(request.scope)
        )

    @routes.post(
        "/demo",
        response_model=DemoLoaded,
        responses={200: or_events("The outcome, or events while it is made")},
    )
    async def load_demo(request: Request) -> Response | DemoLoaded:
        """Take the sample corpus in, as the knowledge base `demo`. Harmless the second time."""
        tenant = tenant_of(request.scope)
        if libraries.config.root is None and NAME not in libraries.names(tenant):
            message = f"no knowledge base {NAME!r} here, and none can be made without --kb-root"
            raise ApiError(404, message)
        let_go = await asyncio.to_thread(context.quotas.hold, tenant, NAME, 0)
        try:
            ingest = partial(_ingest, context, tenant)
            admission = context.writing.admit(client_of(request.scope))
            work = IngestJob(admission, ingest, let_go, turn=(tenant, NAME))
        except BaseException:
            let_go()
            raise
        if "text/event-stream" in request.headers.get("accept", ""):
            return EventStream(as_events(work.events(), HEARTBEAT_S), on_close=lambda: None)
        report = report_out(await work.report())
        return DemoLoaded(name=NAME, questions=sample_questions(), report=report)

    return routes


def _models(weave: ModelHost) -> list[ServedModelOut]:
    return [_served(weave, name, context) for name, context in weave.models().items()]


def _served(weave: ModelHost, name: str, context: int | None) -> ServedModelOut:
    ways = offered_ways(weave, name)
    return ServedModelOut(
        name=name,
        context=context,
        dial=[DialOut.model_validate(each._asdict()) for each in offered_dial(ways)],
        strategies=[WayOut(name=way.name, ratio=way.ratio) for way in ways],
    )


def _demo(libraries: Libraries, tenant: str) -> DemoOut:
    is_there = NAME in libraries.names(tenant)
    return DemoOut(
        name=NAME,
        documents=len(sample_documents()),
        questions=sample_questions(),
        loaded=is_there and libraries.totals(tenant, NAME).num_documents > 0,
    )


def _ingest(context: Context, tenant: str, progress: OnProgress) -> IngestReport:
    def told(news: IngestProgress) -> None:
        context.writing.check()
        progress(news)

    return context.libraries.ingest(tenant, NAME, sample_documents(), progress=told)
