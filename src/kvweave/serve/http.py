"""Puts the ASGI application together: routes and middleware over one context."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave import __version__
from kvweave.serve.access.api_keys import ApiKeys
from kvweave.serve.access.body_limit import BodyLimit
from kvweave.serve.access.errors import ApiError, error_response, install_error_handlers
from kvweave.serve.access.origins import AccessRules, OriginCheck
from kvweave.serve.observe.logs import RequestLog
from kvweave.serve.observe.tracing import Spans
from kvweave.serve.routes.compare import compare_routes
from kvweave.serve.routes.context import Context, Readiness
from kvweave.serve.routes.health import health_routes
from kvweave.serve.routes.kb import kb_routes
from kvweave.serve.routes.lane import Lane
from kvweave.serve.routes.openai import answering_routes, openai_routes
from kvweave.serve.routes.uploads import upload_routes
from kvweave.serve.routes.watching import watching_routes
from kvweave.serve.routes.web_page import conversation_routes, info_routes
from kvweave.serve.ui.page import ui_routes
from kvweave.serve.wire.schema import install_schema, install_schema_page


def build_http(context: Context, access: AccessRules | None = None) -> FastAPI:
    """An ASGI application over `context`, which it closes when it shuts down. Several may live side
    by side."""
    access = access or AccessRules()

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
    for routes in (openai_routes, kb_routes, upload_routes, health_routes):
        http.include_router(routes(context))
    if context.weave.engines:  # a gateway has no engine and no chunk KV to look at
        for local_routes in (watching_routes, compare_routes):
            http.include_router(local_routes(context))
    for routes_for in (info_routes, conversation_routes):
        http.include_router(routes_for(context, has_keys=access.has_keys))
    http.include_router(ui_routes())
    # the last one added is the outermost
    http.add_middleware(Lane, routes=answering_routes(context))
    http.add_middleware(BodyLimit, limits=context.limits)
    http.add_middleware(Drain, readiness=context.readiness)
    http.add_middleware(ApiKeys, keys=access.keys)
    http.add_middleware(OriginCheck, rules=access.origins, has_keys=access.has_keys)
    if access.origins.origins:
        http.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/") for origin in access.origins.origins],
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if context.tracer is not None:
        http.add_middleware(Spans, tracer=context.tracer)
    slow_s = context.limits.slow_s
    http.add_middleware(RequestLog, count=context.metrics.request, slow_s=slow_s)
    return http


class Drain:
    """ASGI middleware: 503 for new work once the server is stopping."""

    def __init__(self, app: ASGIApp, readiness: Readiness) -> None:
        self._app = app
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["path"].startswith("/v1/")
        why = self._readiness.broken or "the server is stopping"
        if is_work and (self._readiness.is_stopping or self._readiness.broken):
            error = ApiError(503, f"{why}; ask another one", headers={"Retry-After": "5"})
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
