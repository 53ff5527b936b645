"""Whether a server takes work. One that is about to stop takes no new work, and says so."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.serve.errors import ApiError, error_response


@dataclass(slots=True)
class Readiness:
    """Written by `server.Server` alone, on the event loop or in a signal handler."""

    preparing: str | None = None  # what is done before the server is ready, if anything
    is_stopping: bool = False  # takes no new work; what runs may finish
    broken: str | None = None  # what is wrong with the engine, for good


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
