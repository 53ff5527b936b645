"""Requests that outlive the process that took them: a connection, and the bytes that came on it.

    server that lost its engine ── HeldRequest ──► keeper ── HeldRequest ──► fresh server

A connection is a file descriptor that passes between processes over a Unix socket. Nothing of a
reply is on it, or the head of a stream of events alone. The fresh server reads the bytes as if they
had just come. This file imports the standard library alone: the keeper is a small process.
"""

import asyncio
import json
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

SIZES = struct.Struct("!II")  # of a message: its words, its bytes
MOST_TRIES = 1  # a request that was there when two engines were lost may be why
ELSEWHERE = b"x-kvweave-elsewhere"  # a header: who sends it has other servers, and does not wait
PATHS = (b"/v1/chat/completions", b"/v1/completions")  # whose requests can be tried again


@dataclass(slots=True)
class HeldRequest:
    """A request without a reply, with its connection, which belongs to whoever has this."""

    connection: socket.socket
    received: bytes  # of the request, as they came; more may come on the connection
    arrived_s: float  # by time.monotonic
    tries: int = 0  # engines that were lost while it was there
    stream: tuple[str, int] | None = None  # head of a stream that is out: its id, when it was made
    client: str = ""  # address of who sent it; known where it came, and not passed on

    def describe(self) -> dict[str, Any]:
        """Everything but connection and bytes, for JSON. Clocks of two processes may differ."""
        spent_s = time.monotonic() - self.arrived_s
        return {"spent_s": spent_s, "tries": self.tries, "stream": self.stream}

    @classmethod
    def from_message(cls, message: "Message") -> "HeldRequest":
        assert message.connection is not None, "a request comes with its connection"
        words, stream = message.words, message.words["stream"]
        return cls(
            message.connection,
            message.content,
            time.monotonic() - words["spent_s"],
            words["tries"],
            None if stream is None else (stream[0], stream[1]),
        )

    def refuse(self, status: str, message: str, code: str | None = None) -> None:
        """Reply with an error, in OpenAI's shape, and close the connection. Waits for nobody."""
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        if self.stream is not None:
            reply = as_last_chunk(body)
        else:
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
            reply = (
                f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
            )
        with suppress(OSError):  # it has left
            self.connection.setblocking(False)
            self.connection.send(reply)
        self.connection.close()


def as_last_chunk(body: bytes) -> bytes:
    """An error as the last event of a stream in HTTP chunks."""
    event = b"data: " + body + b"\n\n"
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)


class Message(NamedTuple):
    """What keeper and server tell each other."""

    words: dict[str, Any]  # "kind" says which it is
    content: bytes = b""
    connection: socket.socket | None = None


def send_message(channel: socket.socket, message: Message) -> None:
    """Write a message to a Unix socket. Raises OSError if nobody is there any more."""
    words = json.dumps(message.words).encode()
    sizes = SIZES.pack(len(words), len(message.content))
    if message.connection is None:
        channel.sendall(sizes)
    else:
        socket.send_fds(channel, [sizes], [message.connection.fileno()])
    channel.sendall(words + message.content)


def receive_message(channel: socket.socket) -> Message | None:
    """Wait for a message; None: the other end is gone."""
    sizes, connection = b"", None
    try:
        while len(sizes) < SIZES.size:
            part, found, *_ = socket.recv_fds(channel, SIZES.size - len(sizes), 1)
            if found:
                connection = socket.socket(fileno=found[0])
            if not part:
                return None
            sizes += part
        num_words, num_bytes = SIZES.unpack(sizes)
        words = _receive_exactly(channel, num_words)
        content = _receive_exactly(channel, num_bytes)
    except OSError:
        return None
    if words is None or content is None:
        return None
    return Message(json.loads(words), content, connection)


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    parts, left = [], num_bytes
    while left:
        part = channel.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


class ResumedTransport:
    """A transport on which the head of a stream is out already: the first head that is written is
    left out. What is no stream of events, such as an error, becomes the last event of one."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written = b""  # until its head is complete
        self._is_through = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._is_through:
            self._transport.write(data)
            return
        self._written += data
        head, end, rest = self._written.partition(b"\r\n\r\n")
        if not end:
            return
        fields = head.lower().split(b"\r\n")
        if b"transfer-encoding: chunked" in fields:
            self._is_through = True
            if rest:
                self._transport.write(rest)
            return
        lengths = [int(f.partition(b":")[2]) for f in fields if f.startswith(b"content-length:")]
        if len(rest) >= next(iter(lengths), 0):
            self._is_through = True
            self._transport.write(as_last_chunk(rest))
            self._transport.close()
