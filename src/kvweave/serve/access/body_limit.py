"""Refuses bodies that are large or never end, before they are read where their headers say so, and
while they arrive, whatever their headers claim."""

import asyncio
import re
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.serve.access.errors import ApiError
from kvweave.serve.access.limits import Limits

# A client that is still sending does not read, and would see a reset instead of the refusal. So a
# little more is read and thrown away after the reply.
DRAINED_BODIES = 8
# Parsing JSON stops all threads. Its time goes with how many values there are, which are never more
# than these characters: so many take less than 0.05 s, and /healthz is to answer within 0.1 s. Of a
# text about one in a hundred characters is one, 80,000 of the largest body.
MOST_VALUES = 125_000
UPLOADS = re.compile(r"/v1/kb/[^/]+/(documents|jobs)")


class BodyLimit:
    """ASGI middleware: a body too large raises a 413, one that stalls or trickles a 408."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = scope["method"] == "POST" and UPLOADS.fullmatch(scope["path"])
        limit_bytes = self._limits.upload_bytes if is_upload else self._limits.body_bytes
        body = _Body(scope, receive, limit_bytes, self._limits, counts_values=not is_upload)

        async def sending(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if not is_last or not body.is_on_its_way:
                await send(message)
                return
            await send({**message, "more_body": True})
            await body.drain()
            await send({"type": "http.response.body", "body": b""})

        await self._app(scope, body.receive, sending)


class _Body:
    """The body of one request as it arrives."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        limit_bytes: int,
        limits: Limits,
        *,
        counts_values: bool,
    ) -> None:
        """`counts_values`: it is JSON that is parsed in one go, as soon as it is there."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        self._announced_bytes = int(length) if length.isdigit() else 0
        self._has_any = self._announced_bytes > 0 or b"transfer-encoding" in headers
        self._is_asked_for = headers.get(b"expect", b"").lower() == b"100-continue"
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._wait_s = limits.body_s
        self._least_rate = limits.body_rate
        self._counts_values = counts_values
        self._values_left = MOST_VALUES
        self._began_s: float | None = None
        self._read_bytes = 0
        self._has_begun = False
        self._is_over = False  # all of it came, or its client left

    @property
    def is_on_its_way(self) -> bool:
        """The client sends without having been asked to, and has not sent all of it."""
        is_sent = self._has_begun or not self._is_asked_for
        return self._has_any and is_sent and not self._is_over

    async def receive(self) -> Message:
        """ASGI's receive, within the limits."""
        if self._is_over:  # from here on it waits for the client to leave
            return await self._receive()
        if self._announced_bytes > self._limit_bytes:
            raise self._too_large()
        try:
            message = await asyncio.wait_for(self._next(), self._wait_s)
        except TimeoutError:
            raise ApiError(
                408, f"nothing of the body came for {self._wait_s:g} s; send it again"
            ) from None
        if self._read_bytes > self._limit_bytes:
            raise self._too_large()
        if self._values_left < 0:
            raise ApiError(
                400,
                f"the body has more than {MOST_VALUES:,} commas, brackets and braces; send less",
            )
        if self._trickles():
            raise ApiError(
                408,
                f"the body comes at less than {self._least_rate:,} bytes a second; send it again",
            )
        return message

    def _trickles(self) -> bool:
        """Whether it never stalls and never ends: it would keep its place among the uploads."""
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now_s
        late_s = now_s - self._began_s - self._wait_s
        return not self._is_over and self._read_bytes < self._least_rate * late_s

    async def drain(self) -> None:
        """Throw away what still comes, within reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while not self._is_over and self._read_bytes < DRAINED_BODIES * self._limit_bytes:
                    await self._next()

    async def _next(self) -> Message:
        self._has_begun = True
        message = await self._receive()
        piece = message.get("body", b"")
        self._read_bytes += len(piece)
        if self._counts_values:
            self._values_left -= sum(map(piece.count, (b",", b"[", b"{")))
        self._is_over = not message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        mebibytes = self._limit_bytes / (1 << 20)
        return ApiError(413, f"the body is larger than {mebibytes:g} MiB; send less")
