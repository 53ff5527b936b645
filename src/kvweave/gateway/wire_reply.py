"""One HTTP reply, read from a socket as it comes."""

import socket
import time

import httptools

READ_BYTES = 1 << 16
LARGEST_HEAD = 1 << 16  # bytes


class BadReply(Exception):
    """What came is no HTTP, or ended before its end."""


class WireReply:
    """`begin`, then `read` until None. One thread; raises OSError and BadReply.

    Waiting for bytes that lead to nothing is silence too, however many of them come: `silence_s` is
    used up by every wait, and whoever reads says by `break_silence` that something came. The
    methods `on_…` are the parser's.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._socket = connection
        self._silence_s = self._left_s = silence_s
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0  # once the head is there
        self._blocks: list[bytes] = []
        self._has_length = False  # else it goes on until the connection is closed
        self._is_over = False
        self._is_last = False  # the connection is closed behind it, or has more than belongs to it

    @property
    def leaves_it_open(self) -> bool:
        """All of it was read, and the connection can carry another."""
        return self._is_over and not self._is_last

    def begin(self) -> int:
        """Wait for the head; the status. ConnectionResetError: closed without a word."""
        num_bytes = 0
        while not self._status:
            data = self._receive()
            if not data and not num_bytes:
                raise ConnectionResetError("closed without a reply")
            if not data:
                raise BadReply("it broke off in the head of its reply")
            num_bytes += len(data)
            self._feed(data)
            if num_bytes > LARGEST_HEAD and not self._status:
                raise BadReply("the head of its reply is too large")
        self.break_silence()
        return self._status

    def read(self) -> bytes | None:
        """What is there of the body, at least a byte; None at its end."""
        while not self._blocks:
            if self._is_over:
                return None
            data = self._receive()
            if data:
                self._feed(data)
            elif self._has_length:
                raise BadReply("it broke off in the middle of its reply")
            else:
                self._is_over = self._is_last = True
        block, self._blocks = b"".join(self._blocks), []
        return block

    def break_silence(self, silence_s: float | None = None) -> None:
        """Something came that was waited for; the next may take as long as `silence_s` says."""
        self._silence_s = self._left_s = self._silence_s if silence_s is None else silence_s

    def _receive(self) -> bytes:
        if self._left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(self._left_s)
        began_s = time.monotonic()
        data = self._socket.recv(READ_BYTES)
        self._left_s -= time.monotonic() - began_s
        return data

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadReply(f"its reply is no HTTP: {error}") from error

    def on_message_begin(self) -> None:
        if self._is_over:
            self._is_last = True  # words that nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._is_over:  # others only say that one will come
            self._status = status
            self._is_last = not self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self._is_over:
            self._blocks.append(body)

    def on_message_complete(self) -> None:
        self._is_over = bool(self._status)
