"""Server-sent events: `data: {…}` and a blank line for each chunk, `data: [DONE]` at the end."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvweave.serve.access.disconnects import ClientGone, while_connected
from kvweave.serve.access.errors import as_api_error, error_body

DONE = "data: [DONE]\n\n"
HEARTBEAT = ": still at it\n\n"  # a comment: clients pass it over
HEARTBEAT_S = 10.0
LOOK_S = 0.5  # between two looks at what a silent stream is at
MOST_AHEAD = 16  # events that wait for a slow client; what comes then waits as pieces, and merges


class EventStream(StreamingResponse):
    """Sends events and calls `on_close` once nothing more goes out, whatever the reason."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies, pass it on
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A generator's own `finally` is not enough: cancelled while it sends, it is not running.
        try:
            with suppress(ClientGone), while_connected(receive):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                async for text in self._events:
                    body = text.encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._on_close()


async def as_events(
    chunks: AsyncIterator[dict[str, Any]],
    heartbeat_s: float | None = None,
    current_wait: Callable[[], dict[str, Any] | None] = lambda: None,
) -> AsyncIterator[str]:
    """Chunks as events, those that are there at the same time in one text: each text is a write
    here and a read there. The status has been sent, so a failure is an event too, and the last. A
    comment goes out where there was none for `heartbeat_s`: proxies cut what is silent. One also
    says in JSON what a silent stream is at, by `current_wait`, whenever that has changed."""
    pause_s = None if heartbeat_s is None else min(heartbeat_s, LOOK_S)
    said, heard_s = None, time.monotonic()
    events: list[str] = []
    news, room = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        try:
            async for chunk in chunks:
                events.append(_event(chunk))
                news.set()
                if len(events) >= MOST_AHEAD:
                    room.clear()
                    await room.wait()
            events.append(DONE)
        except Exception as error:  # nothing above could still tell the client
            events.append(_event(error_body(as_api_error(error))))
        news.set()

    collecting = asyncio.create_task(collect())
    try:
        while events or not collecting.done():
            try:
                async with asyncio.timeout(pause_s):
                    await news.wait()
            except TimeoutError:
                now = current_wait()
                is_new = now is not None and now != said
                if is_new or time.monotonic() - heard_s >= (heartbeat_s or 0.0):
                    said, heard_s = now, time.monotonic()
                    yield f": {_json(now)}\n\n" if is_new else HEARTBEAT
                continue
            heard_s = time.monotonic()
            news.clear()
            text = "".join(events)
            events.clear()
            room.set()
            yield text
    finally:
        collecting.cancel()


def _event(document: dict[str, Any]) -> str:
    return f"data: {_json(document)}\n\n"


def _json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
