"""Puts the ASGI application together: routes and middleware over one context."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvweave import __version__
from kvweave.serve.auth import ApiKeys, Keys
from kvweave.serve.body_limit import BodyLimit
from kvweave.serve.context import Context
from kvweave.serve.errors import install_error_handlers
from kvweave.serve.observe.logs import RequestLog
from kvweave.serve.observe.spans import Spans
from kvweave.serve.origins import OriginCheck, OriginRules
from kvweave.serve.readiness import Drain
from kvweave.serve.routes.health import health_routes
from kvweave.serve.routes.kb import kb_routes
from kvweave.serve.routes.openai import openai_routes
from kvweave.serve.routes.schema_page import install_schema_page
from kvweave.serve.wire.schema import install_schema


def build_http(
    context: Context, keys: Keys | None = None, origins: OriginRules | None = None
) -> FastAPI:
    """An ASGI application over `context`, which it closes when it shuts down. Several may live side
    by side. Without `keys` every client may ask, but pages of others (`origins.py`)."""
    origins = origins or OriginRules()

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
    for routes in (openai_routes, kb_routes, health_routes):
        http.include_router(routes(context))
    # the last one added is the outermost
    http.add_middleware(BodyLimit, limits=context.limits)
    http.add_middleware(Drain, readiness=context.readiness)
    http.add_middleware(ApiKeys, keys=keys or {})
    http.add_middleware(OriginCheck, rules=origins, has_keys=bool(keys))
    if origins.origins:
        http.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/") for origin in origins.origins],
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if context.tracer is not None:
        http.add_middleware(Spans, tracer=context.tracer)
    slow_s = context.limits.slow_s
    http.add_middleware(RequestLog, count=context.metrics.request, slow_s=slow_s)
    return http
