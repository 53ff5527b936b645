"""Puts the server together: routes, middleware, what they share. Translation only."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvweave import __version__
from kvweave.app.libraries.libraries import Libraries
from kvweave.app.weave import Weave
from kvweave.serve.auth import ApiKeys, Keys
from kvweave.serve.body_limit import BodyLimit
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError, install_error_handlers
from kvweave.serve.limits import Limits
from kvweave.serve.observe.logs import RequestLog
from kvweave.serve.observe.prometheus import ServerMetrics
from kvweave.serve.observe.scraping import LiveNumbers
from kvweave.serve.observe.spans import AnswerSpans, Spans, find_tracer
from kvweave.serve.readiness import Drain
from kvweave.serve.routes.kb import kb_routes
from kvweave.serve.routes.openai import openai_routes
from kvweave.serve.wire.schema import install_schema, refusals
from kvweave.serve.wire.status import Health, Ready
from kvweave.serve.workers.answer_pool import AnswerPool
from kvweave.serve.workers.task_pool import TaskPool

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def build_http(
    weave: Weave,
    limits: Limits | None = None,
    *,
    libraries: Libraries | None = None,
    keys: Keys | None = None,
    tracer: "Tracer | None" = None,
) -> FastAPI:
    """An ASGI application that serves `weave`. Several may live side by side.

    `libraries` are its knowledge bases by name; who made them closes them. `tracer` None is the
    process's own, if OpenTelemetry is configured.
    """
    limits = limits or Limits()
    libraries = libraries or Libraries(weave)
    tracer = tracer or find_tracer()
    metrics = ServerMetrics(None if tracer is None else AnswerSpans(tracer))
    answers = AnswerPool(limits, metrics)
    tasks, writing = TaskPool(limits, "searches or embeddings"), TaskPool(limits, "uploads")
    context = Context(weave, libraries, limits, answers, tasks, writing, metrics)
    metrics.watch(LiveNumbers(answers.counts, libraries, weave.engine))

    @asynccontextmanager
    async def lifespan(http: FastAPI) -> AsyncIterator[None]:
        yield
        await answers.close()
        await tasks.close()
        await writing.close()

    http = FastAPI(
        title="kvweave",
        version=__version__,
        summary="RAG serving that never prefills the same passage twice",
        lifespan=lifespan,
    )
    http.state.context = context  # for whoever stops the server
    install_error_handlers(http)
    install_schema(http)
    http.include_router(openai_routes(context))
    http.include_router(kb_routes(context))
    _add_watching(http, context)
    # the last one added is the outermost
    http.add_middleware(BodyLimit, limits=limits)
    http.add_middleware(Drain, context=context)
    http.add_middleware(ApiKeys, keys=keys or {})
    if tracer is not None:
        http.add_middleware(Spans, tracer=tracer)
    http.add_middleware(RequestLog, count=metrics.request)
    return http


def _add_watching(http: FastAPI, context: Context) -> None:
    """Routes for those who look after the server."""

    @http.get("/healthz", tags=["watching"])
    async def healthz() -> Health:
        """The process is alive."""
        return Health(
            model=context.weave.model_name,
            pinned=context.libraries.num_pinned(),
            **context.answers.counts()._asdict(),
        )

    @http.get("/readyz", tags=["watching"], responses=refusals(503))
    async def readyz() -> Ready:
        """The model is loaded, the machine measured if need be, and new work is taken."""
        if context.is_stopping:
            raise ApiError(503, "the server is stopping", headers={"Retry-After": "5"})
        if context.preparing is not None:
            message = f"{context.preparing}; ready in a moment"
            raise ApiError(503, message, headers={"Retry-After": "1"})
        return Ready(model=context.weave.model_name)

    @http.get(
        "/metrics",
        tags=["watching"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics_page() -> Response:
        return Response(context.metrics.page(), media_type=CONTENT_TYPE_LATEST)
