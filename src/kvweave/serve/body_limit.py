"""Refuses large bodies while they arrive, whatever their headers claim."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.serve.errors import ApiError

# A client that is still sending does not read, and would see a reset instead of the 413. So a
# little more is read and thrown away first.
DRAINED_BODIES = 8


class BodyLimit:
    """ASGI middleware: reading more than `limit_bytes` of a body raises a 413."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read_bytes = 0

        async def counting() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if read_bytes <= self._limit_bytes:
                return message
            while message.get("more_body") and read_bytes < DRAINED_BODIES * self._limit_bytes:
                message = await receive()
                read_bytes += len(message.get("body", b""))
            mebibytes = self._limit_bytes / (1 << 20)
            raise ApiError(413, f"the body is larger than {mebibytes:g} MiB; send less text")

        await self._app(scope, counting if scope["type"] == "http" else receive, send)
