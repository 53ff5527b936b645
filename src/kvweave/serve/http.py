"""Puts the ASGI application together: routes and middleware over one context."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvweave import __version__
from kvweave.serve.auth import ApiKeys
from kvweave.serve.body_limit import BodyLimit
from kvweave.serve.context import Context
from kvweave.serve.door import Door
from kvweave.serve.errors import install_error_handlers
from kvweave.serve.observe.logs import RequestLog
from kvweave.serve.observe.spans import Spans
from kvweave.serve.origins import OriginCheck
from kvweave.serve.readiness import Drain
from kvweave.serve.routes.answers import answer_routes
from kvweave.serve.routes.browse import browse_routes
from kvweave.serve.routes.compare import compare_routes
from kvweave.serve.routes.conversations import conversation_routes
from kvweave.serve.routes.health import health_routes
from kvweave.serve.routes.info import info_routes
from kvweave.serve.routes.jobs import job_routes
from kvweave.serve.routes.kb import kb_routes
from kvweave.serve.routes.lane import Lane
from kvweave.serve.routes.openai import answering_routes, openai_routes
from kvweave.serve.routes.schema_page import install_schema_page
from kvweave.serve.routes.watching import watching_routes
from kvweave.serve.ui.routes import ui_routes
from kvweave.serve.wire.schema import install_schema


def build_http(context: Context, door: Door | None = None) -> FastAPI:
    """An ASGI application over `context`, which it closes when it shuts down. Several may live side
    by side."""
    door = door or Door()

    @asynccontextmanager
    async def lifespan(http: FastAPI) -> AsyncIterator[None]:
        yield
        await context.close()

    http = FastAPI(
        title="kvweave",
        version=__version__,
        summary="RAG serving that never prefills the same passage twice",
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    install_error_handlers(http)
    install_schema(http)
    install_schema_page(http)
    for routes in (
        openai_routes,
        kb_routes,
        browse_routes,
        job_routes,
        health_routes,
    ):
        http.include_router(routes(context))
    if context.weave.engines:  # a gateway has no engine and no chunk KV to look at
        for local_routes in (answer_routes, watching_routes, compare_routes):
            http.include_router(local_routes(context))
    for routes_for in (info_routes, conversation_routes):
        http.include_router(routes_for(context, has_keys=door.has_keys))
    http.include_router(ui_routes())
    # the last one added is the outermost
    http.add_middleware(Lane, routes=answering_routes(context))
    http.add_middleware(BodyLimit, limits=context.limits)
    http.add_middleware(Drain, readiness=context.readiness)
    http.add_middleware(ApiKeys, keys=door.keys)
    http.add_middleware(OriginCheck, rules=door.origins, has_keys=door.has_keys)
    if door.origins.origins:
        http.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/") for origin in door.origins.origins],
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if context.tracer is not None:
        http.add_middleware(Spans, tracer=context.tracer)
    slow_s = context.limits.slow_s
    http.add_middleware(RequestLog, count=context.metrics.request, slow_s=slow_s)
    return http
