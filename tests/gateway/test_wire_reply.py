"""Replies of upstreams, byte by byte and all at once."""

import socket
from collections.abc import Callable

import pytest

from kvweave.gateway.connections import BadReply, WireReply

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello"


def replying(sent: bytes, step: int | None = None) -> tuple[WireReply, Callable[[], None]]:
    """A reply over bytes that come `step` at a time; what closes both ends."""
    here, there = socket.socketpair()
    here.settimeout(5)
    for at in range(0, len(sent), step or len(sent) or 1):
        there.sendall(sent[at : at + (step or len(sent))])
    there.shutdown(socket.SHUT_WR)

    class Trickling:
        settimeout = here.settimeout

        def recv(self, most: int) -> bytes:
            return here.recv(min(most, step or most))

    def close() -> None:
        here.close()
        there.close()

    return WireReply(Trickling(), 5.0), close  # type: ignore[arg-type]


def read_whole(sent: bytes, step: int | None = None) -> tuple[int, bytes, bool]:
    reply, close = replying(sent, step)
    try:
        status, blocks = reply.begin(), []
        while (block := reply.read()) is not None:
            assert block
            blocks.append(block)
        return status, b"".join(blocks), reply.leaves_it_open
    finally:
        close()


@pytest.mark.parametrize("step", [1, 7, None])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (PLAIN, (200, b"hello", True)),
        (CHUNKED, (200, b"hello", True)),
        (UNTIL_CLOSED, (200, b"hello", False)),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"", True)),
        (b"HTTP/1.1 503 \r\nContent-Length: 0\r\n\r\n", (503, b"", True)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, (200, b"hello", True)),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED, (200, b"hello", True)),
        (PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), (200, b"hello", False)),
        (PLAIN.replace(b"1.1", b"1.0"), (200, b"hello", False)),
    ],
)
def test_a_reply_is_the_same_in_whatever_pieces_it_comes(
    sent: bytes, expected: tuple[int, bytes, bool], step: int | None
) -> None:
    assert read_whole(sent, step) == expected


def test_a_connection_with_words_that_nobody_asked_for_is_not_used_again() -> None:
    assert read_whole(PLAIN + PLAIN) == (200, b"hello", False)


@pytest.mark.parametrize(
    "sent",
    [
        PLAIN[:-1],
        CHUNKED[:-5],
        CHUNKED[:-2],
        b"HTTP/1.1 200 O",
        b"hello",
        PLAIN.replace(b"5", b"five"),
        PLAIN.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 17),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_half_a_reply_and_what_is_none_are_told_apart_from_an_end(sent: bytes) -> None:
    with pytest.raises(BadReply):
        read_whole(sent)


def test_a_connection_that_was_closed_meanwhile_says_so() -> None:
    with pytest.raises(ConnectionResetError):
        read_whole(b"")
