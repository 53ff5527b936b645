"""What is measured before a server is ready, so that no request waits for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.auto.machine_profile import find_machine
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig, TextSource
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Weave
from kvweave.corpus.embedder import Vectors
from kvweave.errors import ModelNotFound
from kvweave.model.load import load_decoder
from kvweave.serve.server import Prepare, ServerLifecycle
from kvweave.text.tokenizer import Tokenizer
from worlds.serving import GatedDecoder, make_libraries, make_weave, serving, user
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import plain_weave

NOTE = {"title": "Drain", "text": "To drain a node, cordon it first."}


@contextmanager
def preparing(
    weave: Weave, prepare: Prepare, libraries: Libraries | None = None
) -> Iterator[tuple[str, threading.Event]]:
    """A server that prepares itself: its address, and when it said that it is ready."""
    said = threading.Event()
    lifecycle = ServerLifecycle([prepare], said.set, patience_s=0.5)
    with serving(weave, libraries=libraries, lifecycle=lifecycle) as url:
        yield url, said


def ask(url: str) -> dict[str, Any]:
    body = {"messages": user("drain?"), "kb": "notes", "reuse": "auto", "explain": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 2}, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_server_that_measures_is_alive_and_not_ready_until_it_has(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    decoder = GatedDecoder(load_decoder(chat_model_folder, device="cpu"))
    weave = plain_weave(decoder, Tokenizer(chat_model_folder))
    with preparing(weave, Prepare("measuring this machine", weave.measure)) as (url, said):
        assert httpx.get(f"{url}/healthz", timeout=10).status_code == 200
        reply = httpx.get(f"{url}/readyz", timeout=10)
        assert reply.status_code == 503
        assert "measuring this machine; ready in a moment" in reply.json()["error"]["message"]
        assert reply.headers["Retry-After"] == "1"
        assert not said.is_set()
        decoder.permits.release(10_000)
        assert said.wait(60)
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    weave.close()


def test_the_first_request_for_auto_measures_nothing_once_the_server_is_ready(
    chat_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    for life in (1, 2):
        weave = make_weave(chat_model_folder)
        libraries = make_libraries(weave, tmp_path / "kbs")
        prepare = Prepare("measuring", weave.measure)
        with preparing(weave, prepare, libraries) as (url, said):
            assert said.wait(60)
            assert find_machine(weave.runtime.decoder) is not None
            told = capfd.readouterr().err
            assert ("measuring this machine" in told) is (life == 1), "the second life knows"
            httpx.post(f"{url}/v1/kb/notes/documents?wait_for_kv=true", json=NOTE, timeout=60)
            assert ask(url)["explain"]["decision"]["chosen"]
        assert "measuring" not in capfd.readouterr().err
        libraries.close()
        weave.close()


def test_where_nothing_can_be_kept_it_is_measured_once_for_all_knowledge_bases(
    chat_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    weave = make_weave(chat_model_folder)
    libraries = make_libraries(weave, tmp_path / "kbs")
    weave.measure()
    for name in "ab":
        with libraries.use("", name, create=True) as over:
            over.ingest(("Drain", f"To drain {name}, cordon it first."), chunk_kv=True)
            assert over.ask("drain?", k=1).decision is not None, "a default may price, too"
    libraries.close()
    weave.close()
    assert capfd.readouterr().err.count("measuring this machine") == 1


def test_a_ready_server_has_its_embedder_and_its_knowledge_bases_open(
    chat_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_weave(chat_model_folder)
    libraries = make_libraries(made, tmp_path / "kbs")
    for tenant, name in (("", "old"), ("acme", "notes"), ("", "broken")):
        libraries.ingest(tenant, name, [TextSource("Drain", "Cordon it first.")], chunk_kv=False)
    libraries.close()
    broken = tmp_path / "kbs" / "broken" / "catalogue.sqlite"
    for file in broken.parent.glob("catalogue.sqlite*"):
        file.unlink()
    broken.write_bytes(b"no database")
    loaded: list[str] = []

    class Watched(WordEmbedder):
        def embed_query(self, text: str) -> Vectors:
            loaded.append(threading.current_thread().name)
            return super().embed_query(text)

    config = LibrariesConfig(root=tmp_path / "kbs", embedder="words", kv=KVOptions("isolated"))
    libraries = Libraries(made, config, open_embedder=lambda name: Watched())
    assert libraries.has_some()
    prepare = Prepare("opening", libraries.open_ahead)
    with preparing(made, prepare, libraries) as (url, said):
        assert said.wait(60)
        assert libraries.counts().open == 2
        assert loaded
        assert "knowledge base 'broken' does not open" in caplog.text
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 200
        found = httpx.post(f"{url}/v1/kb/old/search", json={"query": "cordon"}, timeout=30)
        assert found.status_code == 200
        assert libraries.counts().opened == 2, "it was open"
    libraries.close()
    made.close()


def test_an_embedder_that_is_not_there_is_told_of_and_holds_nothing_up(
    weave: Weave, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> WordEmbedder:
        raise ModelNotFound(f"no embedder {name!r}")

    libraries = Libraries(weave, LibrariesConfig(tmp_path, embedder="x"), open_embedder=refuse)
    assert not libraries.has_some()
    libraries.open_ahead()
    assert "the embedder of new knowledge bases does not open: no embedder 'x'" in caplog.text
    libraries.close()


def test_each_step_of_getting_ready_is_named_while_it_is_done(weave: Weave) -> None:
    gates = {"first": threading.Event(), "second": threading.Event()}
    said = threading.Event()
    steps = [Prepare(name, lambda gate=gate: gate.wait(30)) for name, gate in gates.items()]
    with serving(weave, lifecycle=ServerLifecycle(steps, said.set, patience_s=0.5)) as url:
        for name, gate in gates.items():
            while name not in (reply := httpx.get(f"{url}/readyz", timeout=10)).text:
                assert reply.status_code == 503
            gate.set()
        assert said.wait(30)


def test_what_fails_while_preparing_is_logged_and_the_server_goes_on(
    weave: Weave, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    with preparing(weave, Prepare("measuring", fail)) as (url, said):
        assert said.wait(30)
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 200
        assert "kvweave_prepare_failures_total 1.0" in httpx.get(f"{url}/metrics", timeout=10).text
    assert "measuring failed" in caplog.text
    assert "no such device" in caplog.text
