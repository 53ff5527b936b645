"""For those who look after the server: /healthz, /readyz, /metrics."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvweave.serve.access.api_keys import is_stranger
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context
from kvweave.serve.wire.openai import Health, Ready
from kvweave.serve.wire.schema import refusals


def health_routes(context: Context) -> APIRouter:
    routes = APIRouter(tags=["watching"])
    readiness = context.readiness

    @routes.get("/healthz")
    async def healthz() -> Health:
        """The process is alive."""
        return Health(
            model=context.weave.model_name,
            pinned=context.libraries.num_pinned(),
            **context.answers.counts()._asdict(),
        )

    @routes.get("/readyz", responses=refusals(503))
    async def readyz() -> Ready:
        """Model, embedder and knowledge bases are open, the machine is measured if need be, and new
        work is taken."""
        if readiness.broken is not None:
            raise ApiError(503, readiness.broken, headers={"Retry-After": "5"})
        if readiness.is_stopping:
            raise ApiError(503, "the server is stopping", headers={"Retry-After": "5"})
        if readiness.preparing is not None:
            message = f"{readiness.preparing}; ready in a moment"
            raise ApiError(503, message, headers={"Retry-After": "1"})
        if (why := context.weave.why_unready()) is not None:
            raise ApiError(503, why, headers={"Retry-After": "1"})
        return Ready(model=context.weave.model_name)

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics_page(request: Request) -> Response:
        page = context.metrics.page(with_names=not is_stranger(request.scope))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return routes
