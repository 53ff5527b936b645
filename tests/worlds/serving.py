"""A real server on a free port, knowledge bases for it, decoders to hold still or break."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from torch import Tensor

from kvweave.app.hosts import ModelHost
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.app.weave import Weave
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.serve.access.api_keys import Keys
from kvweave.serve.access.limits import Limits
from kvweave.serve.access.origins import AccessRules, OriginRules
from kvweave.serve.routes.context import PageConfig
from kvweave.serve.routes.model_names import RequestDefaults
from kvweave.serve.server import Server, ServerLifecycle
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import plain_weave

T = TypeVar("T")


@contextmanager
def serving(
    weave: ModelHost,
    limits: Limits | None = None,
    *,
    libraries: Libraries | None = None,
    keys: Keys | None = None,
    lifecycle: ServerLifecycle | None = None,
    origins: OriginRules | None = None,
    page: PageConfig | None = None,
    usual: RequestDefaults | None = None,
) -> Iterator[str]:
    """Serve `weave` on a thread; give the address; stop in order and check that it stopped."""
    listener = socket.create_server(("127.0.0.1", 0))  # listens already: no waiting for start-up
    lifecycle = lifecycle or ServerLifecycle(patience_s=1.0)
    server = Server(
        weave,
        limits=limits,
        libraries=libraries,
        access=AccessRules(keys or {}, origins or OriginRules()),
        lifecycle=lifecycle,
        page=page,
        usual=usual,
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(timeout=30)
    assert not thread.is_alive(), "the server did not stop"


class GatedDecoder(Decoder):
    """Each step waits for a permit, so a test decides how far an answer gets."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self.permits = threading.Semaphore(0)
        self.steps = 0

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        assert self.permits.acquire(timeout=60), "a test gave too few permits"
        self.steps += 1
        return super().forward(batch)


class FailingDecoder(Decoder):
    """Breaks at its third step."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self.steps = 0

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("secret detail of the third step")
        return super().forward(batch)


def make_weave(
    folder: Path, wrap: Callable[[Decoder], Decoder] = lambda d: d, name: str = "tiny"
) -> Weave:
    decoder = wrap(load_decoder(folder, device="cpu"))
    return plain_weave(decoder, Tokenizer(folder), name=name)


@dataclass
class KbServer:
    """A server with a folder of knowledge bases."""

    url: str
    weave: Weave
    libraries: Libraries
    root: Path


def make_libraries(
    weave: ModelHost, root: Path, background: BackgroundKV | None = None
) -> Libraries:
    """Small chunks of KV without a filler, which a context of 512 tokens has no room for."""
    kv = KVOptions("isolated", background=background)
    config = LibrariesConfig(root=root, embedder="words", kv=kv)
    return Libraries(weave, config, open_embedder=lambda name: WordEmbedder())


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def health(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/healthz", timeout=30).json())


def wait_for_health(
    url: str, wanted: Callable[[dict[str, Any]], bool], nudge: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Ask /healthz until `wanted` says yes, calling `nudge` in between."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = health(url)
        if wanted(seen):
            return seen
        nudge()
    raise AssertionError(f"still waiting; the server says {seen}")


@contextmanager
def raw_request(url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Send a chat request and give the socket; leaving hangs up."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + payload)
        yield connection


class Interrupted:
    """Runs searches, and what is to happen right after one."""

    def __init__(self) -> None:
        self.then: Callable[[], object] = lambda: None

    def __call__(self, search: Callable[[], T], /) -> T:
        found = search()
        then, self.then = self.then, lambda: None
        then()
        return found
