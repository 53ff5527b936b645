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
    """Chunks as events, those that are there at the same time in one text: each text is a write
    here and a read there. The status has been sent, so a failure is an event too, and the last. A
    comment goes out where there was none for `heartbeat_s`: proxies cut what is silent."""
    events: list[str] = []
    waiting = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            if not events:
                while not (await asyncio.wait({waiting}, timeout=heartbeat_s))[0]:
                    yield HEARTBEAT
            elif not waiting.done():
                yield "".join(events)
                events.clear()
                continue
            events.append(_event(waiting.result()))
            waiting = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)  # a turn: what is there by then goes along
    except StopAsyncIteration:
        yield "".join([*events, DONE])
    except Exception as error:  # nothing above could still tell the client
        yield "".join([*events, _event(error_body(as_api_error(error)))])
    finally:
        waiting.cancel()


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"
