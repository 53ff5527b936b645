"""A gateway on a free port, engines behind it as processes, and one that misbehaves."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.config import GatewaySettings
from kvweave.gateway.gateway import Gateway
from kvweave.serve.access.api_keys import Keys
from kvweave.serve.access.limits import Limits
from worlds.serving import serving
from worlds.tiny_corpus import WordEmbedder

SYSTEM = "Be brief."  # as worlds/weaves.py has it
# patient enough for two busy cores, quick enough for a test
QUICK = GatewaySettings(
    upstreams=("http://127.0.0.1:1",),
    connect_s=5.0,
    silence_s=60.0,
    health_s=0.5,
    wait_s=20.0,
    breaker_rest_s=0.2,
)


@dataclass
class GatewayWorld:
    """A gateway that serves."""

    url: str
    gateway: Gateway
    libraries: Libraries


@contextmanager
def gateway_over(
    urls: list[str],
    root: Path,
    *,
    tokenizer: Path | None,
    keys: Keys | None = None,
    **how: Any,
) -> Iterator[GatewayWorld]:
    """`how`: fields of GatewaySettings."""
    cfg = replace(QUICK, upstreams=tuple(urls), **how)
    settings = AnswerSettings(SYSTEM)
    named = None if tokenizer is None else str(tokenizer)
    gateway = Gateway(cfg, tokenizer=named, settings=settings, first_card_s=60)
    config = LibrariesConfig(root=root, embedder="words")
    libraries = Libraries(gateway, config, open_embedder=lambda name: WordEmbedder())
    try:
        with serving(gateway, Limits(running=128), libraries=libraries, keys=keys) as url:
            yield GatewayWorld(url, gateway, libraries)
    finally:
        libraries.close()
        gateway.close()


@contextmanager
def engine_process(
    model: Path, home: Path, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvweave serve` as a process of its own, to be killed; its address."""
    src = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": str(src), "KVWEAVE_HOME": str(home)}
    env |= {"KVWEAVE_CONFIG": os.devnull, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "kvweave", "serve", "--port", "0", "--model", str(model)]
    command += ["--kb-root", str(home / "kbs"), "--embedder", "none-is-needed"]
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env) as own,
    ):
        try:
            assert own.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in own.stdout)
            address = next((each[0] for each in found if each), None)
            assert address is not None, (home / "log").read_text()[-2000:]
            yield own, address
        finally:
            own.kill()


class FaultyUpstream:
    """Stands in front of a real engine and misbehaves as it is told. One thread per connection.

    `fault`:    None passes everything on; "drop" closes a connection when a POST comes; "cut"
                passes that many bytes of a reply to a POST and then ends; "status" answers
                POSTs with it; "unready" answers everything with 503, as a server that stops does;
                "freeze" takes what comes and says nothing; "stall" does so with POSTs alone;
                "garble" answers POSTs with `garbage`, an event of a stream; "chatter" answers them
                with `garbage` again and again, as long as somebody reads it.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.fault: str | None = None
        self.status = 500
        self.cut_bytes = 0
        self.garbage = b""
        self.posts = 0  # that came
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No connection is taken any more, and those that are there end."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for each in left:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._target) as engine:
            while request := _read_request(client):
                is_post = request.startswith(b"POST")
                with self._lock:
                    self.posts += is_post
                if self.fault == "freeze" or (self.fault == "stall" and is_post):
                    client.recv(1)  # until the other side gives up
                    return
                if self.fault == "drop" and is_post:
                    return
                if self.fault == "garble" and is_post:
                    body = b"data: " + self.garbage + b"\n\ndata: [DONE]\n\n"
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                    client.sendall(head.encode() + body)
                    continue
                if self.fault == "chatter" and is_post:
                    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    while True:
                        client.sendall(self.garbage)
                        time.sleep(0.01)
                if (self.fault == "status" and is_post) or self.fault == "unready":
                    status = 503 if self.fault == "unready" else self.status
                    body = b'{"error": {"message": "as the test wants it"}}'
                    head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n"
                    client.sendall(head.encode() + body)
                    continue
                engine.sendall(request)
                if not self._pass_reply(engine, client, is_post):
                    return

    def _pass_reply(self, engine: socket.socket, client: socket.socket, is_post: bool) -> bool:
        """Whether the connection goes on."""
        passed = b""
        while True:
            block = engine.recv(1 << 16)
            if not block:
                return False
            passed += block
            if is_post and self.fault == "cut" and len(passed) >= self.cut_bytes:
                client.sendall(block)
                return False
            client.sendall(block)
            if _is_whole(passed):
                return True


def _read_request(client: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got:
        block = client.recv(1 << 16)
        if not block:
            return b""
        got += block
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    wanted = int(length[1]) if length else 0
    while len(body) < wanted:
        block = client.recv(1 << 16)
        if not block:
            return b""
        body += block
        got += block
    return got


def _is_whole(reply: bytes) -> bool:
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])
