"""Uploads while they come and while they wait: refused or admitted first, then on the disk."""

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Weave
from kvweave.serve.access.limits import Limits
from kvweave.serve.server import ServerLifecycle
from kvweave.serve.uploads.forms import FormFile, FormFiles, Spool
from worlds.serving import serving
from worlds.tiny_corpus import WordEmbedder

NOTE = {"title": "Note", "text": "A quota limits the pods of a namespace."}
MIB = 1 << 20


def note(word: str) -> dict[str, str]:
    return {"title": "Note", "text": f"The node {word} has pods of its own."}


def _target(link: Path) -> str:
    """Where a link of /proc points; "" if its file was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


class HeldEmbedder(WordEmbedder):
    """Embeds passages when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def embed_passages(self, texts: Sequence[str]) -> Any:
        self.begun.set()
        assert self.go_on.wait(60), "a test held it for too long"
        return super().embed_passages(texts)


class Held:
    """A server that takes in one upload at a time, once it is let, and a folder of its own for
    what waits."""

    def __init__(self, url: str, embedder: HeldEmbedder, spools: Path) -> None:
        self.url = url
        self.embedder = embedder
        self._spools = spools

    def upload(self, name: str = "notes", **how: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/kb/{name}/documents", timeout=60, **how)

    def num_spools(self) -> int:
        """Temporary files that are open; they have no names, and so leave nothing behind."""
        assert not list(self._spools.iterdir())
        links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        return sum(str(self._spools) in _target(link) for link in links)

    def spooled_bytes(self) -> int:
        links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        mine = (x for x in links if str(self._spools) in _target(x))
        return sum(x.stat().st_size for x in mine)

    def connect(self, head: str) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=30)
        connection.sendall(
            f"POST /v1/kb/notes/documents HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode()
        )
        return connection


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


@contextmanager
def holding(
    weave: Weave, folder: Path, limits: Limits, *, patience_s: float = 1.0, release_s: float = 0.0
) -> Iterator[Held]:
    """`release_s` after the server was told to stop, what is held goes on."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("open files are counted in /proc; Linux has it, as CI does")
    spools, embedder = folder / "spools", HeldEmbedder()
    spools.mkdir()
    config = LibrariesConfig(root=folder / "kbs", embedder="words", kv=KVOptions("isolated"))
    libraries = Libraries(weave, config, open_embedder=lambda name: embedder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(spools))
        lifecycle = ServerLifecycle(patience_s=patience_s)
        with serving(weave, limits, libraries=libraries, lifecycle=lifecycle) as url:
            held = Held(url, embedder, spools)
            yield held
            threading.Timer(release_s, embedder.go_on.set).start()
        wait_until(lambda: held.num_spools() == 0)
    libraries.close()


@pytest.fixture
def held(weave: Weave, tmp_path: Path) -> Iterator[Held]:
    limits = Limits(tasks=1, waiting_tasks=1, upload_bytes=32 * MIB)
    with holding(weave, tmp_path, limits) as world:
        yield world


def test_a_search_never_stands_behind_uploads(held: Held) -> None:
    assert held.upload(json=NOTE).status_code == 200
    held.embedder.go_on.clear()
    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(held.upload, json=note(key)) for key in "ab"]
        try:
            wait_until(lambda: held.num_spools() == 2)
            words = {"query": "quota", "retrieval": "words"}
            found = httpx.post(f"{held.url}/v1/kb/notes/search", json=words, timeout=20)
            assert found.json()["data"][0]["title"] == "Note"
            refused = held.upload(json=NOTE)
            assert refused.status_code == 429
            assert "2 uploads are under way" in refused.json()["error"]["message"]
        finally:
            held.embedder.go_on.set()
        assert [reply.result().status_code for reply in waiting] == [200, 200]
    assert held.num_spools() == 0


def test_a_full_house_refuses_an_upload_before_anything_of_it_came(held: Held) -> None:
    held.embedder.go_on.clear()
    with ThreadPoolExecutor(2) as clients:
        for key in "ab":
            clients.submit(held.upload, json=note(key))
        try:
            wait_until(lambda: held.num_spools() == 2)
            head = "Content-Type: application/json\r\nContent-Length: 1000000\r\n"
            with held.connect(head) as connection:
                assert b" 429 " in connection.recv(65536).split(b"\r\n")[0]
            large = iter([b"x" * MIB] * 8)  # who sends without listening hears it all the same
            form = {"Content-Type": "multipart/form-data; boundary=x"}
            assert held.upload(content=large, headers=form).status_code == 429
        finally:
            held.embedder.go_on.set()


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_body_announced_too_large_is_refused_before_anything_of_it_came(
    held: Held, expect: str
) -> None:
    head = f"Content-Type: application/json\r\nContent-Length: {33 * MIB}\r\n{expect}"
    with held.connect(head) as connection:
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]
    assert held.num_spools() == 0


def test_uploads_that_wait_are_on_the_disk_and_not_in_memory(weave: Weave, tmp_path: Path) -> None:
    many, size = 8, 16 * MIB

    def form() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.exe"\r\n\r\n'
        for _ in range(size // MIB):
            yield b"a" * MIB
        yield b"\r\n--x--\r\n"

    def upload() -> int:
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        return held.upload(content=form(), headers=kind).status_code

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    limits = Limits(tasks=1, waiting_tasks=2 * many, upload_bytes=2 * size)
    with holding(weave, tmp_path, limits) as held, ThreadPoolExecutor(many + 1) as clients:
        assert upload() == 400  # no parser: nothing is taken in
        held.embedder.go_on.clear()
        first = clients.submit(held.upload, json=NOTE)
        assert held.embedder.begun.wait(30)
        before = resident()
        replies = [clients.submit(upload) for _ in range(many)]
        wait_until(lambda: held.spooled_bytes() >= many * size)
        grown = resident() - before
        held.embedder.go_on.set()
        assert first.result().status_code == 200
        assert [reply.result() for reply in replies] == [400] * many
    assert grown < many * size // 2, f"{grown / MIB:.0f} MiB for {many * size / MIB:.0f} waiting"


@pytest.mark.parametrize("piece", [7, 4096, 3 * MIB])
def test_files_of_one_form_come_out_of_one_spool_as_they_were(piece: int) -> None:
    files = {f"{n}.bin": bytes([n, 13, 10, 45, 45]) * (n**6 % 9000) for n in range(9)}
    if piece > 7:
        files["large.bin"] = os.urandom(2 * MIB + 5)
    form = b"".join(
        f'--x\r\nContent-Disposition: form-data; name="f"; filename="{name}"\r\n\r\n'.encode()
        + data
        + b"\r\n"
        for name, data in files.items()
    )
    form += b"--x--\r\n"

    async def parse(spool: Spool) -> list[FormFile]:
        parsed = FormFiles("multipart/form-data; boundary=x", spool, len(files))
        for start in range(0, len(form), piece):
            await parsed.feed(form[start : start + piece])
        await spool.flush()
        return parsed.finish()

    with closing(Spool()) as spool:
        found = asyncio.run(parse(spool))
        assert {file.name: spool.read(file.start, file.end) for file in found} == files
        assert spool.size_bytes == sum(map(len, files.values()))


FORM = "Content-Type: multipart/form-data; boundary=x\r\n"
PART = '--x\r\nContent-Disposition: form-data; name="f"; filename="a.md"\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (f"{PART}half a fi", "ends before its last boundary"),
        ("--y\r\n", "does not parse"),
        (f"--x\r\nA: {'a' * 20_000}\r\n\r\n", "does not parse"),
        ("--x--\r\n", "has no file"),
    ],
    ids=["cut", "no-boundary", "long-headers", "empty"],
)
def test_a_form_that_is_none_is_refused_and_leaves_nothing(
    held: Held, body: str, says: str
) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    reply = held.upload(content=body.encode(), headers=kind)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]
    assert held.num_spools() == 0


def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):  # one place of two would be lost each time
        with held.connect(f"{FORM}Content-Length: 3000000\r\n") as connection:
            connection.sendall(PART.encode() + b"a" * 2_000_000)
            wait_until(lambda: held.num_spools() == 1)
        wait_until(lambda: held.num_spools() == 0)
    assert held.upload(json=NOTE).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_client_that_leaves_an_upload_under_way_leaves_nothing(held: Held, accept: str) -> None:
    held.embedder.go_on.clear()
    body = b'{"title": "left", "text": "A node has a name."}'
    head = f"Content-Type: application/json\r\nAccept: {accept}\r\nContent-Length: {len(body)}\r\n"
    with held.connect(head) as connection:
        connection.sendall(body)
        assert held.embedder.begun.wait(30)
    held.embedder.go_on.set()
    wait_until(lambda: held.num_spools() == 0)
    listed = httpx.get(f"{held.url}/v1/kb/notes/documents").json()["data"]
    assert [d["title"] for d in listed] == ["left"], "it was taken in to its end"


def test_a_server_that_stops_leaves_nothing_of_what_waited(weave: Weave, tmp_path: Path) -> None:
    limits = Limits(tasks=1, waiting_tasks=2)
    with ThreadPoolExecutor(2) as clients, ExitStack() as stack:
        with holding(weave, tmp_path, limits, patience_s=0.2, release_s=1.0) as held:
            held.embedder.go_on.clear()
            replies = [clients.submit(held.upload, json=note(word)) for word in ("one", "two")]
            wait_until(lambda: held.num_spools() == 2)
            cut = stack.enter_context(held.connect(f"{FORM}Content-Length: 3000\r\n"))
            cut.sendall(PART.encode())
            wait_until(lambda: held.num_spools() == 3)
        assert [reply.result().status_code for reply in replies] == [503, 503]
