"""Files made to hurt: reported and skipped, while others are served and the server can stop."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Weave
from kvweave.corpus.parsers import ParseLimits
from worlds.bombs import many_paragraphs, shared_pages, wide_cell
from worlds.serving import serving
from worlds.tiny_corpus import WordEmbedder
from worlds.watching import DEAF_S, listening

BOMBS = {
    "shared pages.pdf": shared_pages(3_000),
    "paragraphs.docx": many_paragraphs(300_000),
    "wide cell.docx": wide_cell(400_000_000),
    "nested.html": b"<b><p>" * 200_000,
    "columns.csv": b"a," * 4_000 + b"a\n" + b"1," * 4_000 + b"1\n",
    "lines.jsonl": b'"a"\n' * 3_000,
    "title.md": b"# x" + b" " * 60_000 + b"y",
}


@contextmanager
def bombed(weave: Weave, root: Path, seconds: float) -> Iterator[str]:
    config = LibrariesConfig(
        root=root,
        embedder="words",
        kv=KVOptions("isolated"),
        parsing=ParseLimits(seconds=seconds, memory_bytes=512 << 20),
    )
    libraries = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
    try:
        with serving(weave, libraries=libraries) as url:
            yield url
    finally:
        libraries.close()


@pytest.fixture(scope="module")
def bombed_url(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bombed(weave, tmp_path_factory.mktemp("kbs"), 2.0) as url:
        yield url


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_holds_up_nothing_and_leaves_a_knowledge_base_that_works(
    bombed_url: str, name: str
) -> None:
    place = f"{bombed_url}/v1/kb/notes/documents"
    files = [
        ("file", (name, BOMBS[name])),
        ("file", (f"{name}.txt", f"A zorb of {name}.".encode())),
    ]
    with listening(bombed_url) as heard:
        reply = httpx.post(place, files=files, timeout=120)
    assert reply.status_code == 200, reply.text
    sources = [d["source"] for d in httpx.get(place, timeout=60).json()["data"]]
    assert f"upload:{name}.txt" in sources
    skipped = [each["source"] for each in reply.json()["skipped"]]
    assert (f"upload:{name}" in sources) != (f"upload:{name}" in skipped)
    assert heard.longest_s < DEAF_S


def test_a_server_that_is_parsing_a_bomb_stops(weave: Weave, tmp_path: Path) -> None:
    """`serving` asserts that it is gone within 30 s."""
    with bombed(weave, tmp_path, 600.0) as url:
        send = threading.Thread(
            target=httpx.post,
            args=(f"{url}/v1/kb/notes/documents",),
            kwargs={"files": [("file", ("x.pdf", BOMBS["shared pages.pdf"]))], "timeout": 60},
        )
        send.start()
        time.sleep(2.0)
    send.join(timeout=30)
    assert not send.is_alive()


def test_a_large_text_as_json_holds_up_nothing(bombed_url: str) -> None:
    body = b'{"title": "large", "text": "x' + b"\\n" * 4_000_000 + b'"}'
    with listening(bombed_url) as heard:
        reply = httpx.post(
            f"{bombed_url}/v1/kb/large/documents",
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=120,
        )
    assert reply.status_code == 200, reply.text
    assert heard.longest_s < DEAF_S
