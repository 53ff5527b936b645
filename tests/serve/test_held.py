"""Requests pass between processes with their connections, and a stream goes on as one stream."""

import asyncio
import json
import socket
import time
from typing import cast

from kvweave.gateway import connections
from kvweave.serve.access.held import (
    ELSEWHERE,
    HeldRequest,
    Message,
    ResumedTransport,
    receive_message,
    send_message,
)

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.is_closed = True


def resumed() -> tuple[Written, ResumedTransport]:
    written = Written()
    return written, ResumedTransport(cast(asyncio.Transport, written))


def test_a_stream_that_goes_on_has_one_head() -> None:
    written, transport = resumed()
    for part in (CHUNKED[:20], CHUNKED[20:] + b"3\r\none\r\n", b"0\r\n\r\n"):
        transport.write(part)
    assert written.data == b"3\r\none\r\n0\r\n\r\n"
    transport.write(CHUNKED)
    assert written.data.endswith(CHUNKED), "the next reply on the connection has its own"


def test_a_refusal_behind_a_head_that_is_out_is_the_last_event() -> None:
    written, transport = resumed()
    body = b'{"error": {"message": "no"}}'
    transport.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body))
    assert not written.data
    transport.write(body)
    assert written.data == b"24\r\ndata: " + body + b"\n\n\r\n0\r\n\r\n"
    assert written.is_closed


def test_a_request_passes_with_its_connection_and_its_time() -> None:
    ours, theirs = socket.socketpair()
    client, connection = socket.socketpair()
    content = bytes(range(256)) * 5000
    held = HeldRequest(connection, content, time.monotonic() - 5, 1, ("chatcmpl-1", 17))
    with ours, theirs, client:
        words = {"kind": "held", **held.describe()}
        send_message(ours, Message({"kind": "stage", "words": "äöü"}))
        assert receive_message(theirs) == Message({"kind": "stage", "words": "äöü"})
        passing = asyncio.run(_pass(ours, theirs, Message(words, held.received, connection)))
        connection.close()
        assert (passing.received, passing.tries, passing.stream) == (content, 1, ("chatcmpl-1", 17))
        assert 5 <= time.monotonic() - passing.arrived_s < 60
        passing.stream = None
        passing.refuse("503 Service Unavailable", "it is over", "gone")
        reply = client.recv(4096)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"] == "it is over"
        assert client.recv(1) == b"", "closed"
        ours.close()
        assert receive_message(theirs) is None


async def _pass(ours: socket.socket, theirs: socket.socket, message: Message) -> HeldRequest:
    """Send and receive at once: it is more than a socket holds."""
    sending = asyncio.to_thread(send_message, ours, message)
    found, _ = await asyncio.gather(asyncio.to_thread(receive_message, theirs), sending)
    assert found is not None
    return HeldRequest.from_message(found)


def test_gateway_and_server_mean_the_same_header() -> None:
    assert connections.ELSEWHERE.lower().encode() == ELSEWHERE
