"""Proxies in front of a Valkey server and of an S3-compatible one, which do to the traffic what bad
networks and servers do: late, never, refused, cut, changed, not there.

Each knows enough of its protocol to tell what a command is for (`fault_rules`), so that a fault
strikes a lookup, the first layer of a chunk, a middle one, a save or a delete, and nothing else.
"""

import http.client
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from reliability.fault_rules import (
    CORRUPTED,
    ERROR,
    EVICT,
    FORBIDDEN,
    FULL,
    GONE,
    HANG,
    LOAD_FIRST,
    LOAD_MIDDLE,
    LOOKUP,
    SAVE,
    SLOW,
    TRUNCATED,
    FaultRule,
    Strikes,
)

OTHER = "other"  # a command that belongs to none of the ops
HEADER = "header"  # the front of an object

REFUSALS = {
    ERROR: b"-LOADING the dataset is being loaded (injected)\r\n",
    FULL: b"-OOM command not allowed when used memory > 'maxmemory' (injected)\r\n",
    FORBIDDEN: b"-NOPERM this user has no permissions to run this command (injected)\r\n",
}


class Layers(NamedTuple):
    """Where layers lie in an object, for telling what a read of a range is."""

    first: int = 1  # no read below this is one of a layer
    second: int = 1 << 62  # reads from here on bring later layers
    middle: int = 1 << 62  # and from here on those of the second half
    layer_bytes: int = 0  # of each; what lies behind the last (extras) is not always read

    def op(self, offset: int) -> str:
        if offset < self.first:
            return HEADER
        if offset >= self.middle:
            return LOAD_MIDDLE
        return LOAD_FIRST if offset < self.second else OTHER

    def damaged(self, data: bytes, strikes: Strikes) -> bytes:
        """An object with one bit changed in a layer; of another kind of object, anywhere."""
        end = self.first + self.layer_bytes
        if not self.layer_bytes or len(data) < end:
            return strikes.damaged(data)
        return data[: self.first] + strikes.damaged(data[self.first : end]) + data[end:]


# ---- Valkey


class ValkeyProxy:
    """Listens on a free port of this machine; `layers` are set once the objects are known."""

    def __init__(self, port: int) -> None:
        self.strikes = Strikes()
        self.layers = Layers()
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_all(self) -> None:
        """End every connection, as a server that goes away does."""
        with self._lock:
            connections = list(self._open)
        for each in connections:
            _reset(each)

    def close(self) -> None:
        self.strikes.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self.strikes.refuses():
                    _reset(client)
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            _reset(client)
            return
        with self._lock:
            self._open |= {client, server}
        replies: queue.SimpleQueue[FaultRule | bytes | None] = queue.SimpleQueue()
        back = threading.Thread(target=self._answer, args=(server, client, replies), daemon=True)
        back.start()
        with suppress(OSError, ValueError), client.makefile("rb") as commands:
            self._ask(commands, client, server, replies)
        for each in (client, server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        replies.put(None)  # whoever waits for another command reads the end instead
        back.join(5)
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _ask(
        self,
        reader: BinaryIO,
        client: socket.socket,
        server: socket.socket,
        replies: "queue.SimpleQueue[FaultRule | bytes | None]",
    ) -> None:
        """Commands, one by one."""
        in_multi = False
        while command := _command(reader):
            raw, args = command
            name = args[0].upper()
            op = OTHER if in_multi and name != b"EXEC" else self._op(name, args)
            in_multi = name == b"MULTI" or (in_multi and name != b"EXEC")
            rule = self.strikes.strike(op)
            if rule is None:
                replies.put(None)
                server.sendall(raw)
                continue
            match rule.kind:
                case "slow":
                    time.sleep(rule.delay_s)
                    replies.put(None)
                    server.sendall(raw)
                case "hang":
                    self.strikes.hang()
                    return
                case "gone and back":
                    _reset(client)
                    return
                case "error" | "full" | "permission lost":
                    replies.put(REFUSALS[rule.kind])
                case "corrupted" if name == b"SET":
                    # a bit of the value: the protocol around it stays whole
                    at = raw.rindex(args[2][-64:])
                    start = at + 64 - len(args[2])
                    value = self.layers.damaged(args[2], self.strikes)
                    replies.put(None)
                    server.sendall(raw[:start] + value + raw[start + len(value) :])
                case "truncated" if name == b"SET":
                    server.sendall(raw[: len(raw) // 2])
                    return
                case _:
                    replies.put(rule)
                    server.sendall(raw)

    def _op(self, name: bytes, args: list[bytes]) -> str:
        match name:
            case b"STRLEN":
                return LOOKUP
            case b"GETRANGE":
                return self.layers.op(int(args[2]))
            case b"SET":
                return SAVE
            case b"UNLINK" | b"DEL" | b"SCAN":
                return EVICT
        return HEADER if name == b"EXEC" else OTHER

    def _answer(
        self,
        server: socket.socket,
        client: socket.socket,
        replies: "queue.SimpleQueue[FaultRule | bytes | None]",
    ) -> None:
        with suppress(OSError, ValueError), server.makefile("rb") as reader:
            while True:
                todo = replies.get()
                if isinstance(todo, bytes):
                    client.sendall(todo)
                    continue
                reply = _reply(reader)
                if not reply:
                    return
                if isinstance(todo, FaultRule):
                    if todo.kind == TRUNCATED:
                        if short := _shortened(reply, todo.seed):
                            client.sendall(short)
                            continue
                        client.sendall(reply[: len(reply) // 2])
                        _reset(client)
                        return
                    reply = self._changed(reply)
                client.sendall(reply)

    def _changed(self, reply: bytes) -> bytes:
        head, _, body = reply.partition(b"\r\n")
        if reply[:1] == b"$" and len(body) > 2:
            return head + b"\r\n" + self.strikes.damaged(body[:-2]) + b"\r\n"
        if reply[:1] == b":":  # another number
            return b":%d\r\n" % (int(head[1:]) + 1 + self.strikes.draw(4096))
        return reply


def _shortened(reply: bytes, seed: int) -> bytes | None:
    """A string that ends early and says so; None for what is no string, or by the seed."""
    if reply[:1] != b"$" or seed % 2:
        return None
    body = reply.partition(b"\r\n")[2][:-2]
    kept = body[: len(body) // 2]
    return b"$%d\r\n" % len(kept) + kept + b"\r\n"


def _command(reader: BinaryIO) -> tuple[bytes, list[bytes]] | None:
    """One command as redis clients send it, raw and taken apart."""
    line = reader.readline()
    if not line.startswith(b"*"):
        return None
    raw, args = [line], []
    for _ in range(int(line[1:])):
        head = reader.readline()
        data = reader.read(int(head[1:]) + 2)
        raw += [head, data]
        args.append(data[:-2])
    return b"".join(raw), args


def _reply(reader: BinaryIO) -> bytes:
    """One reply of RESP 2 or 3, whole; empty at the end."""
    line = reader.readline()
    if not line:
        return b""
    kind = line[:1]
    if kind in b"$=!":
        size = int(line[1:])
        return line if size < 0 else line + reader.read(size + 2)
    if kind in b"*~>%":
        count = int(line[1:]) * (2 if kind == b"%" else 1)
        return line + b"".join(_reply(reader) for _ in range(max(0, count)))
    return line


def _reset(connection: socket.socket) -> None:
    """Close it as a machine that is gone would: no farewell."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()


# ---- S3

_XML = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
    "<Message>{code} (injected)</Message></Error>"
)
_S3_REFUSALS = {
    ERROR: (503, "SlowDown"),
    FULL: (507, "XMinioStorageFull"),
    FORBIDDEN: (403, "AccessDenied"),
}
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class S3Proxy:
    """In front of an S3 endpoint; `url` is its own."""

    def __init__(self, endpoint: str) -> None:
        self.strikes = Strikes()
        self.layers = Layers()
        parts = urlsplit(endpoint)
        self._to = (parts.hostname or "127.0.0.1", parts.port or 80)
        proxy = self

        class Handler(_S3Handler):
            of = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.strikes.clear()
        self._server.shutdown()
        self._server.server_close()

    def op(self, method: str, path: str, span: str) -> str:
        parts = urlsplit(path)
        has_key = parts.path.strip("/").count("/") > 0
        if method == "PUT" and has_key:
            return SAVE
        if method == "DELETE" or "delete" in parts.query:
            return EVICT
        if method == "HEAD" and has_key:
            return LOOKUP
        if method == "GET" and has_key and span.startswith("bytes="):
            return self.layers.op(int(span[6:].partition("-")[0]))
        return OTHER

    def ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self._to, timeout=60)
        try:
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()


class _S3Handler(BaseHTTPRequestHandler):
    of: S3Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def handle_expect_100(self) -> bool:
        if self._is_gone():
            return False
        return bool(super().handle_expect_100())

    def _is_gone(self) -> bool:
        if not self.of.strikes.refuses():
            return False
        self.close_connection = True
        _reset(self.connection)
        return True

    def _serve(self) -> None:
        if self._is_gone():
            return
        strikes = self.of.strikes
        body = self._body()
        rule = strikes.strike(self.of.op(self.command, self.path, self.headers.get("Range", "")))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        if rule is not None:
            if rule.kind == SLOW:
                time.sleep(rule.delay_s)
            elif rule.kind == HANG:
                strikes.hang()
                self._leave()
                return
            elif rule.kind == GONE:
                self._leave()
                return
            elif rule.kind in _S3_REFUSALS:
                status, code = _S3_REFUSALS[rule.kind]
                text = b"" if self.command == "HEAD" else _XML.format(code=code).encode()
                self._reply(status, [("Content-Type", "application/xml")], text, len(text))
                return
            elif rule.kind == CORRUPTED and self.command == "PUT":
                body = self.of.layers.damaged(body, strikes)
            elif rule.kind == TRUNCATED and self.command != "GET":
                self._leave()
                return
        status, found, data = self.of.ask(self.command, self.path, headers, body)
        if rule is not None and rule.kind == CORRUPTED and self.command == "GET":
            data = strikes.damaged(data)
        size = len(data)
        if self.command == "HEAD":
            size = int({k.lower(): v for k, v in found}.get("content-length", 0))
            if rule is not None and rule.kind == CORRUPTED:
                size += 1 + strikes.draw(4096)
        if rule is not None and rule.kind == TRUNCATED:
            self._reply(status, found, data[: size // 2], size)
            self._leave()
            return
        self._reply(status, found, data, size)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def _leave(self) -> None:
        self.close_connection = True
        _reset(self.connection)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(
        self, status: int, headers: list[tuple[str, str]], data: bytes, size_bytes: int
    ) -> None:
        with suppress(OSError):  # the client has left
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in _HOP | {"content-length"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(size_bytes))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)


@contextmanager
def closing_proxy(proxy: ValkeyProxy | S3Proxy) -> Iterator[Any]:
    try:
        yield proxy
    finally:
        proxy.close()
