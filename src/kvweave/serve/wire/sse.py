"""Server-sent events: `data: {…}` and a blank line for each chunk, `data: [DONE]` at the end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvweave.serve.errors import as_api_error, error_body

DONE = "data: [DONE]\n\n"
HEARTBEAT = ": still at it\n\n"  # a comment: clients pass it over
HEARTBEAT_S = 10.0


class EventStream(StreamingResponse):
    """Sends events and calls `on_close` once nothing more goes out, whatever the reason."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies, pass it on
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A generator's own `finally` is not enough: cancelled while it sends, it is not running.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def as_events(
    chunks: AsyncIterator[dict[str, Any]], heartbeat_s: float | None = None
) -> AsyncIterator[str]:
    """Chunks as events. The status has been sent, so a failure is an event too, and the last. A
    comment goes out where there was none for `heartbeat_s`: proxies cut what is silent."""
    try:
        async for chunk in chunks if heartbeat_s is None else _or_silence(chunks, heartbeat_s):
            yield HEARTBEAT if chunk is None else _event(chunk)
    except Exception as error:  # nothing above could still tell the client
        yield _event(error_body(as_api_error(error)))
    else:
        yield DONE


async def _or_silence(
    chunks: AsyncIterator[dict[str, Any]], silence_s: float
) -> AsyncIterator[dict[str, Any] | None]:
    """Chunks as they come, and None for each time that none came for so long."""
    while True:
        waiting = asyncio.ensure_future(anext(chunks))
        try:
            while not (await asyncio.wait({waiting}, timeout=silence_s))[0]:
                yield None
            chunk = waiting.result()
        except StopAsyncIteration:
            return
        finally:
            waiting.cancel()
        yield chunk


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"
