"""HTTP to one upstream: connections that are kept, replies that any thread can cut.

One request, one reply, no layer that could retry by itself or hold pieces of a stream back. A reply
is read from its socket as it comes, by the server's parser: the standard library's client took a
tenth of what a chat costs a gateway.
"""

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

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


MOST_KEPT = 64  # idle connections
LARGEST_REPLY = 32 << 20  # bytes of a reply that is read whole
LARGEST_LINE = 4 << 20  # bytes of an event of a stream; one of a whole answer's logprobs has less
DRAIN_S = 1.0  # for what stands behind the end of a stream
# what a connection that was idle says when the upstream has closed it meanwhile
_STALE = (ConnectionResetError, BrokenPipeError)


ELSEWHERE = "X-Kvweave-Elsewhere"  # a server that is started again refuses such requests at once


class UpstreamFailed(Exception):
    """An upstream did not answer; another one may. `status` is HTTP's, None without a reply."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Connections:
    """Connections to one upstream. Any thread."""

    def __init__(
        self, url: str, *, connect_s: float, api_key: str | None = None, is_only: bool = True
    ) -> None:
        """Unless it is the `is_only` one, a request that it cannot answer now is better refused."""
        self.url = base_url(url)
        parts = urlsplit(self.url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._connect_s = connect_s
        headers = {
            "Host": _host_header(self._host, parts.port),
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        if not is_only:
            headers[ELSEWHERE] = "1"
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._closed = False

    def exchange(
        self, method: str, path: str, document: Mapping[str, Any] | None = None
    ) -> "Exchange":
        """A request that is not sent yet."""
        head, body = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}", b""
        if document is not None:
            body = json.dumps(document, separators=(",", ":")).encode()
            head += f"Content-Length: {len(body)}\r\n"
        # in one piece: a server that gets the head first begins, and waits
        return Exchange(self, f"{head}\r\n".encode("latin-1") + body)

    def get(self, path: str, silence_s: float) -> tuple[int, Any]:
        """Status and JSON of a small reply; None where it is no JSON. Raises UpstreamFailed."""
        return self._whole(self.exchange("GET", path), silence_s)

    def post(self, path: str, document: Mapping[str, Any], silence_s: float) -> tuple[int, Any]:
        """Send a document; status and JSON of the reply. Raises UpstreamFailed."""
        return self._whole(self.exchange("POST", path, document), silence_s)

    def _whole(self, exchange: "Exchange", silence_s: float) -> tuple[int, Any]:
        try:
            status = exchange.begin(silence_s)
            body = exchange.read()
        finally:
            exchange.close()
        try:
            return status, json.loads(body)
        except (ValueError, RecursionError):
            return status, None

    def take(self, *, fresh: bool) -> tuple[socket.socket, bool]:
        """A connection that is open, and whether it was used before. Raises OSError."""
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop(), True
        made = socket.create_connection((self._host, self._port), timeout=self._connect_s)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                made = self._tls.wrap_socket(made, server_hostname=self._host)
        except BaseException:
            made.close()
            raise
        return made, False

    def keep(self, connection: socket.socket) -> None:
        """It has given its whole reply and may be used again."""
        with self._lock:
            if not self._closed and len(self._idle) < MOST_KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def drop_idle(self) -> None:
        """The upstream is another process by now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.drop_idle()


class Exchange:
    """One request and its reply. One thread calls `begin`, reads and closes; any may `cut`."""

    def __init__(self, owner: Connections, sent: bytes) -> None:
        """`sent`: the request, head and body."""
        self._owner = owner
        self._sent = sent
        self._lock = threading.Lock()  # guards the next two
        self._socket: socket.socket | None = None
        self._is_cut = False
        self._reply: WireReply | None = None

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def begin(self, silence_s: float) -> int:
        """Send it and wait for the head of the reply; its status. Raises UpstreamFailed."""
        try:
            return self._begin(silence_s, fresh=False)
        except _STALE as error:
            reason = error
        except (OSError, BadReply) as error:
            raise self._failure(error) from error
        if self._is_cut:
            raise self._failure(reason) from reason
        try:  # an idle connection that was closed at the other end says nothing about the upstream
            return self._begin(silence_s, fresh=True)
        except (OSError, BadReply) as error:
            raise self._failure(error) from error

    def read(self) -> bytes:
        """The whole body. Raises UpstreamFailed."""
        return b"".join(self._blocks(LARGEST_REPLY))

    def lines(self) -> Iterator[bytes]:
        """The body line by line as it comes, without their ends. Raises UpstreamFailed, also where
        lines come and none of them breaks the silence."""
        rest = b""
        for block in self._blocks(None):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
            if len(rest) > LARGEST_LINE:
                raise self._failure(OSError(f"it sent a line of more than {LARGEST_LINE} bytes"))
        if rest:
            yield rest

    def break_silence(self, silence_s: float | None = None) -> None:
        """Something of use came; the next may take as long again, or `silence_s`."""
        if self._reply is not None:
            self._reply.break_silence(silence_s)

    def drain(self) -> None:
        """Read what is behind the end of a stream, so that the connection can be kept. One that
        has more to say than a moment's worth is closed instead."""
        self.break_silence(DRAIN_S)
        with suppress(UpstreamFailed):
            for _ in self._blocks(READ_BYTES):
                pass

    def cut(self) -> None:
        """End it now: whoever waits for it gets UpstreamFailed. Any thread; twice is harmless."""
        with self._lock:
            self._is_cut = True
            connected = self._socket
        if connected is not None:
            with suppress(OSError):  # closed already
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back: kept if all of the reply was read, else closed."""
        with self._lock:
            connection, self._socket = self._socket, None
        reply, self._reply = self._reply, None
        if connection is None:
            return
        if reply is not None and reply.leaves_it_open and not self._is_cut:
            self._owner.keep(connection)
        else:
            connection.close()

    def _begin(self, silence_s: float, *, fresh: bool) -> int:
        connection, was_used = self._owner.take(fresh=fresh)
        with self._lock:
            is_cut, self._socket = self._is_cut, connection
        if is_cut:
            raise OSError("it was cancelled")
        connection.settimeout(silence_s)
        self._reply = WireReply(connection, silence_s)
        try:
            connection.sendall(self._sent)
            return self._reply.begin()
        except _STALE as error:
            with self._lock:
                self._socket = None
            connection.close()
            if not was_used:
                raise OSError(f"it closed the connection: {error}") from error
            raise

    def _blocks(self, most_bytes: int | None) -> Iterator[bytes]:
        reply = self._reply
        assert reply is not None, "begin comes first"
        num_bytes = 0
        try:
            while (block := reply.read()) is not None:
                num_bytes += len(block)
                if most_bytes is not None and num_bytes > most_bytes:
                    raise OSError(f"its reply is larger than {most_bytes} bytes")
                yield block
        except (OSError, BadReply) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> UpstreamFailed:
        if self._is_cut:
            return UpstreamFailed(f"{self._owner.url}: the request was cut off")
        if isinstance(error, TimeoutError):
            return UpstreamFailed(f"{self._owner.url} says nothing")
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UpstreamFailed(f"{self._owner.url}: {words}")


def _host_header(name: str, port: int | None) -> str:
    """Name the upstream as its address does."""
    if not name.isascii():
        name = name.encode("idna").decode("ascii")
    return (f"[{name}]" if ":" in name else name) + ("" if port is None else f":{port}")


HOST_NOT_ALLOWED = "host_not_allowed"  # a `kvweave serve` without keys: see serve/access/origins.py


class ToldError(NamedTuple):
    """An error in OpenAI's shape."""

    message: str
    param: str | None = None  # the request's field at fault
    code: str | None = None  # for programs


def error_of(document: Any) -> ToldError | None:
    """The error in the JSON document of a reply; None: it has another shape."""
    error = document.get("error") if isinstance(document, Mapping) else None
    if not isinstance(error, Mapping) or not isinstance(error.get("message"), str):
        return None
    param, code = error.get("param"), error.get("code")
    return ToldError(
        error["message"],
        None if param is None else str(param),
        None if code is None else str(code),
    )


def failure_of(upstream: str, status: int, document: Any) -> UpstreamFailed:
    """A reply with an error status, as a failure of this upstream."""
    told = error_of(document) or ToldError(f"it answered with status {status}")
    words = f"{upstream}: {told.message}"
    if told.code == HOST_NOT_ALLOWED:
        words = (
            f"{upstream} does not go by the name in this address; set server.allowed_hosts there, "
            "give it API keys, or use its IP address here"
        )
    elif status == 401:
        words = f"{upstream} refuses the gateway's key; set gateway.key_file ({told.message})"
    return UpstreamFailed(words, status)


def base_url(url: str) -> str:
    """Without the /v1 that clients are configured with."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
