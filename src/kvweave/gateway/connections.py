"""HTTP to one upstream: connections that are kept, replies that any thread can cut.

The standard library's client: one request, one reply, no layer that could retry by itself or hold
pieces of a stream back.
"""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvweave.gateway.config import base_url

MOST_KEPT = 64  # idle connections
READ_BYTES = 1 << 16
LARGEST_REPLY = 32 << 20  # bytes of a reply that is read whole
# what a connection that was idle says when the upstream has closed it meanwhile
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class UpstreamFailed(Exception):
    """An upstream did not answer; another one may. `status` is HTTP's, None without a reply."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Connections:
    """Connections to one upstream. Any thread."""

    def __init__(self, url: str, *, connect_s: float, api_key: str | None = None) -> None:
        self.url = base_url(url)
        parts = urlsplit(self.url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._connect_s = connect_s
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def exchange(
        self, method: str, path: str, document: Mapping[str, Any] | None = None
    ) -> "Exchange":
        """A request that is not sent yet."""
        body = None
        if document is not None:
            body = json.dumps(document, separators=(",", ":")).encode()
        return Exchange(self, method, self._prefix + path, body, self._headers)

    def get(self, path: str, silence_s: float) -> tuple[int, Any]:
        """Status and JSON of a small reply; None where it is no JSON. Raises UpstreamFailed."""
        return self._whole(self.exchange("GET", path), silence_s)

    def post(self, path: str, document: Mapping[str, Any], silence_s: float) -> tuple[int, Any]:
        """As `get`."""
        return self._whole(self.exchange("POST", path, document), silence_s)

    def _whole(self, exchange: "Exchange", silence_s: float) -> tuple[int, Any]:
        try:
            status = exchange.begin(silence_s)
            body = exchange.read()
        finally:
            exchange.close()
        try:
            return status, json.loads(body)
        except ValueError:
            return status, None

    def take(self, *, fresh: bool) -> tuple[http.client.HTTPConnection, bool]:
        """A connection that is open, and whether it was used before. Raises OSError."""
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop(), True
        made: http.client.HTTPConnection
        if self._tls is None:
            made = http.client.HTTPConnection(self._host, self._port, timeout=self._connect_s)
        else:
            made = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._connect_s, context=self._tls
            )
        made.connect()
        assert made.sock is not None, "it is connected"
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made, False

    def keep(self, connection: http.client.HTTPConnection) -> None:
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

    def __init__(
        self,
        owner: Connections,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        self._owner = owner
        self._method, self._path, self._body, self._headers = method, path, body, headers
        self._lock = threading.Lock()  # guards the next two
        self._socket: socket.socket | None = None
        self._is_cut = False
        self._connection: http.client.HTTPConnection | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._is_read = False

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def begin(self, silence_s: float) -> int:
        """Send it and wait for the head of the reply; its status. Raises UpstreamFailed."""
        try:
            return self._begin(silence_s, fresh=False)
        except _STALE as error:
            reason = error
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        if self._is_cut:
            raise self._failed(reason) from reason
        try:  # an idle connection that was closed at the other end says nothing about the upstream
            return self._begin(silence_s, fresh=True)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error

    def read(self) -> bytes:
        """The whole body. Raises UpstreamFailed."""
        return b"".join(self._blocks(LARGEST_REPLY))

    def lines(self) -> Iterator[bytes]:
        """The body line by line as it comes, without their ends. Raises UpstreamFailed."""
        rest = b""
        for block in self._blocks(None):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

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
            self._socket = None
        connection, self._connection = self._connection, None
        reply, self._reply = self._reply, None
        if connection is None:
            return
        may_stay = self._is_read and not self._is_cut and reply is not None and not reply.will_close
        if may_stay:
            self._owner.keep(connection)
            return
        if reply is not None:
            with suppress(OSError):
                reply.close()
        connection.close()

    def _begin(self, silence_s: float, *, fresh: bool) -> int:
        connection, was_used = self._owner.take(fresh=fresh)
        with self._lock:
            is_cut = self._is_cut
            self._connection, self._socket = connection, connection.sock
        if is_cut:
            raise OSError("it was cancelled")
        if connection.sock is not None:
            connection.sock.settimeout(silence_s)
        try:
            connection.request(self._method, self._path, self._body, dict(self._headers))
            self._reply = connection.getresponse()
        except _STALE as error:
            connection.close()
            if not was_used:
                raise OSError(f"it closed the connection: {error}") from error
            raise
        return self._reply.status

    def _blocks(self, most_bytes: int | None) -> Iterator[bytes]:
        reply = self._reply
        assert reply is not None, "begin comes first"
        num_bytes = 0
        # read1 gives what is there; of a body whose length is known it may wait beyond the end
        read = reply.read1 if reply.chunked or reply.length is None else reply.read
        try:
            while block := read(READ_BYTES):
                num_bytes += len(block)
                if most_bytes is not None and num_bytes > most_bytes:
                    raise OSError(f"its reply is larger than {most_bytes} bytes")
                yield block
            # a body that was announced and did not come is no end
            if reply.length:
                raise OSError("it broke off in the middle of its reply")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        self._is_read = True

    def _failed(self, error: Exception) -> UpstreamFailed:
        if self._is_cut:
            return UpstreamFailed(f"{self._owner.url}: the request was cut off")
        if isinstance(error, TimeoutError):
            return UpstreamFailed(f"{self._owner.url} says nothing")
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UpstreamFailed(f"{self._owner.url}: {words}")
