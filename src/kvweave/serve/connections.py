"""Connections: not more than there may be, and none that holds its place without a request.

uvicorn waits for the head of a request for ever. A client that opens connections and sends nothing,
or half a head, would take all file handles of the process; then nothing else can be opened either.
"""

import asyncio
import functools
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)
WORDS = (
    b'{"error": {"message": "too many connections; try again in a moment", '
    b'"type": "server_error", "param": null, "code": "too_many_connections"}}'
)


class GuardedProtocol(H11Protocol):
    """One connection. On the event loop."""

    def __init__(self, *args: Any, most: int, header_s: float, **how: Any) -> None:
        """`most` connections at a time; `header_s` for the head of a request."""
        super().__init__(*args, **how)
        self._most = most
        self._header_s = header_s
        self._waiting: asyncio.TimerHandle | None = None
        self.idle_since_s = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most and not self._close_another():
            transport.write(FULL % (len(WORDS), WORDS))
            transport.close()
            return
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_idle:
            self._wait_for_head()  # until all of it is there; what comes in pieces gains nothing
        else:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self.idle_since_s = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """No request is under way on it."""
        return self.cycle is None or self.cycle.response_complete

    def _close_another(self) -> bool:
        """Make room: the one that has been idle for longest goes."""
        idle = [
            each
            for each in self.connections
            if isinstance(each, GuardedProtocol) and each is not self and each.is_idle
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.idle_since_s)
        oldest.connections.discard(oldest)  # now: closing takes a turn of the loop
        oldest.transport.abort()
        return True

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self._header_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if self.is_idle and not self.transport.is_closing():
            if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is not None:
                return  # between two requests: uvicorn closes it
            self.transport.abort()


def guarded(most: int, header_s: float) -> Any:
    """For uvicorn, which makes one for each connection."""
    return functools.partial(GuardedProtocol, most=most, header_s=header_s)
