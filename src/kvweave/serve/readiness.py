"""A server that is about to stop takes no new work, and says so."""

from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError, reply


class Drain:
    """ASGI middleware: 503 for new work once the server is stopping."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["path"].startswith("/v1/")
        if is_work and self._context.is_stopping:
            error = ApiError(
                503, "the server is stopping; ask another one", headers={"Retry-After": "5"}
            )
            await reply(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
