"""Server-sent events: `data: {…}` and a blank line for each chunk, `data: [DONE]` at the end."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvweave.serve.errors import as_api_error, error_body

DONE = "data: [DONE]\n\n"


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


async def as_events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Chunks as events. The status has been sent, so a failure is an event too, and the last."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:  # nothing above could still tell the client
        yield _event(error_body(as_api_error(error)))
    else:
        yield DONE


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"
