"""Puts the ASGI application together: routes and middleware over one context."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kvweave import __version__
from kvweave.serve.auth import ApiKeys, Keys
from kvweave.serve.body_limit import BodyLimit
from kvweave.serve.context import Context
from kvweave.serve.errors import install_error_handlers
from kvweave.serve.observe.logs import RequestLog
from kvweave.serve.observe.spans import Spans
from kvweave.serve.readiness import Drain
from kvweave.serve.routes.answers import answer_routes
from kvweave.serve.routes.browse import browse_routes
from kvweave.serve.routes.compare import compare_routes
from kvweave.serve.routes.conversations import conversation_routes
from kvweave.serve.routes.health import health_routes
from kvweave.serve.routes.info import info_routes
from kvweave.serve.routes.kb import kb_routes
from kvweave.serve.routes.openai import openai_routes
from kvweave.serve.routes.watching import watching_routes
from kvweave.serve.ui.routes import ui_routes
from kvweave.serve.wire.schema import install_schema


def build_http(context: Context, keys: Keys | None = None) -> FastAPI:
    """An ASGI application over `context`, which it closes when it shuts down. Several may live side
    by side. Without `keys` every client may ask."""

    @asynccontextmanager
    async def lifespan(http: FastAPI) -> AsyncIterator[None]:
        yield
        await context.close()

    http = FastAPI(
        title="kvweave",
        version=__version__,
        summary="RAG serving that never prefills the same passage twice",
        lifespan=lifespan,
    )
    install_error_handlers(http)
    install_schema(http)
    for routes in (
        openai_routes,
        kb_routes,
        browse_routes,
        answer_routes,
        watching_routes,
        compare_routes,
        health_routes,
    ):
        http.include_router(routes(context))
    for routes_for in (info_routes, conversation_routes):
        http.include_router(routes_for(context, has_keys=bool(keys)))
    http.include_router(ui_routes())
    # the last one added is the outermost
    http.add_middleware(BodyLimit, limits=context.limits)
    http.add_middleware(Drain, readiness=context.readiness)
    http.add_middleware(ApiKeys, keys=keys or {})
    if context.tracer is not None:
        http.add_middleware(Spans, tracer=context.tracer)
    http.add_middleware(RequestLog, count=context.metrics.request)
    return http
