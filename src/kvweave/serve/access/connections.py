"""Connections: not more than there may be, and none that holds its place without a request.

uvicorn waits for the head of a request for ever. A client that opens connections and sends nothing,
or half a head, would take all file handles of the process; then nothing else can be opened either.
Nor does its quicker parser (httptools) mind how long a head is, and a client that sent a second
request behind the first is not missed there when it leaves.
"""

import asyncio
import functools
import json
import logging
import os
import socket
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvweave.serve.access.held import (
    ELSEWHERE,
    MOST_TRIES,
    PATHS,
    HeldRequest,
    ResumedTransport,
)

log = logging.getLogger(__name__)

LARGEST_HEAD = 1 << 16  # bytes; and of whatever else is not yet a piece of a body
TOO_LARGE = "The head of the request is too large."
BAD = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)
WORDS = (
    b'{"error": {"message": "too many connections; try again in a moment", '
    b'"type": "server_error", "param": null, "code": "too_many_connections"}}'
)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. On the event loop."""

    def __init__(self, *args: Any, most: int, header_s: float, **how: Any) -> None:
        """`most` connections at a time; `header_s` for the head of a request."""
        super().__init__(*args, **how)
        self._most = most
        self._header_s = header_s
        self._waiting: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # others wait behind it, `cycle` the last
        self._head_bytes = 0  # that came since the parser last made something of them
        self._named_bytes = 0  # of a head, and its trailers, that the parser made something of
        self.idle_since_s = time.monotonic()
        self._received: list[bytes] | None = None  # of the request under way; None: not kept
        self._data = b""  # that is being parsed
        self._has_other = False  # what is being parsed began with the end of another request
        self._arrived_s = 0.0  # when the request under way began
        self._resumed: HeldRequest | None = None  # the first request comes from another process

    def resume(self, held: HeldRequest) -> None:
        """Take the first request from `held`, once the connection is made: its bytes come before
        what is read there."""
        self._resumed = held

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._resumed is not None and self._resumed.stream is not None:
            transport = ResumedTransport(transport)  # type: ignore[assignment]
        super().connection_made(transport)
        if len(self.connections) > self._most and not self._close_another():
            transport.write(FULL % (len(WORDS), WORDS))
            transport.close()
            return
        self._wait_for_head()
        if self._resumed is not None:
            self.data_received(self._resumed.received)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._data, before, self._has_other = data, self._received, False
        super().data_received(data)
        if before is not None and before is self._received:
            before.append(data)
        if self._head_bytes > LARGEST_HEAD and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)
        elif self.is_idle:
            self._wait_for_head()  # until all of it is there; what comes in pieces gains nothing
        else:
            self._stop_waiting()

    def on_message_begin(self) -> None:
        self._named_bytes = 0
        super().on_message_begin()
        held, self._resumed = self._resumed, None
        self._arrived_s = time.monotonic() if held is None else held.arrived_s
        if held is not None:
            more = {"spent_s": time.monotonic() - held.arrived_s, "tries": held.tries}
            self.scope["state"] |= more | ({} if held.stream is None else {"stream": held.stream})
        # one behind another is not kept, nor behind the rest of one that was answered before all of
        # it came: whoever reads these bytes again must find this request at their beginning
        is_kept = self.is_idle and not self._has_other
        self._received = [self._data] if is_kept else None

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        is_alone = self.is_idle
        super().on_headers_complete()
        can_wait = self.scope["raw_path"] in PATHS and not any(
            name == ELSEWHERE for name, _ in self.scope["headers"]
        )
        if not can_wait:
            self._received = None
        if is_alone:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._has_other = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._has_other = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.idle_since_s = time.monotonic()
        self._received = None
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # it begins now
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if (running := self._running) is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """No request is under way on it."""
        return self.cycle is None or self.cycle.response_complete

    def let_go(self) -> HeldRequest | None:
        """Give the connection away with its request, if nothing of a reply is on it but the head of
        a stream without an event, and no other engine was lost before. The route that would have
        replied finds its client gone."""
        cycle, received = self._running, self._received
        if cycle is None or cycle.response_complete or self.pipeline or not received:
            return None
        state: dict[str, Any] = cycle.scope["state"]
        stream = state.get("stream")
        has_begun = state.get("has_begun", False) or (cycle.response_started and stream is None)
        tries = state.get("tries", 0)
        is_out = self.transport.is_closing() or self.transport.get_write_buffer_size() > 0
        if has_begun or is_out or tries >= MOST_TRIES:
            return None
        try:
            connection = socket.socket(
                fileno=os.dup(self.transport.get_extra_info("socket").fileno())
            )
        except OSError as error:  # no file is left to be opened: the others go all the same
            log.warning("a request was not passed on: %s", error)
            return None
        cycle.disconnected = True
        cycle.message_event.set()
        self.connections.discard(self)
        self.transport.abort()
        return HeldRequest(
            connection,
            b"".join(received),
            self._arrived_s,
            tries + 1,
            stream if cycle.response_started else None,
        )

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
            if self.timeout_keep_alive_task is not None:
                return  # between two requests: uvicorn closes it
            self.transport.abort()

    def _count(self, num_bytes: int) -> None:
        """Count bytes of a head that may have come in one read, which the parser takes whole."""
        self._named_bytes += num_bytes
        if self._named_bytes > LARGEST_HEAD:
            raise ValueError(TOO_LARGE)  # the parser ends, and uvicorn sends a 400

    def send_400_response(self, msg: str) -> None:
        is_large = max(self._head_bytes, self._named_bytes) > LARGEST_HEAD
        if is_large and not self.is_idle:  # these words would stand in the midst of a reply
            self.transport.abort()
        else:
            words = TOO_LARGE if is_large else msg
            error = {"message": words, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            self.transport.write(BAD % (len(body), body))
            self.transport.close()


def guard_connections(most: int, header_s: float) -> Any:
    """For uvicorn, which makes one for each connection."""
    return functools.partial(GuardedProtocol, most=most, header_s=header_s)
