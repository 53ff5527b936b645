"""Refuses bodies that are large or never end, while they arrive, whatever their headers claim."""

import asyncio
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.serve.errors import ApiError
from kvweave.serve.limits import Limits

# A client that is still sending does not read, and would see a reset instead of the 413. So a
# little more is read and thrown away first.
DRAINED_BODIES = 8
UPLOADS = re.compile(r"/v1/kb/[^/]+/documents")


class BodyLimit:
    """ASGI middleware: a body too large raises a 413, one that stalls a 408."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = scope["method"] == "POST" and UPLOADS.fullmatch(scope["path"])
        limit_bytes = self._limits.upload_bytes if is_upload else self._limits.body_bytes
        read_bytes, is_complete = 0, False

        async def counting() -> Message:
            nonlocal read_bytes, is_complete
            if is_complete:  # from here on it waits for the client to leave
                return await receive()
            message = await self._next(receive)
            read_bytes += len(message.get("body", b""))
            if read_bytes <= limit_bytes:
                is_complete = not message.get("more_body", False)
                return message
            while message.get("more_body") and read_bytes < DRAINED_BODIES * limit_bytes:
                message = await self._next(receive)
                read_bytes += len(message.get("body", b""))
            mebibytes = limit_bytes / (1 << 20)
            raise ApiError(413, f"the body is larger than {mebibytes:g} MiB; send less")

        await self._app(scope, counting, send)

    async def _next(self, receive: Receive) -> Message:
        try:
            return await asyncio.wait_for(receive(), self._limits.body_s)
        except TimeoutError:
            raise ApiError(
                408, f"nothing of the body came for {self._limits.body_s:g} s; send it again"
            ) from None
