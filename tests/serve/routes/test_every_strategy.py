"""Every strategy that is offered works: on any knowledge base, asked or compared."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.dial import REUSES
from kvweave.app.library.library_kv import BackgroundKV
from kvweave.reasons import Reason
from worlds.running import Run, run
from worlds.serving import KbServer, make_libraries, make_weave, serving, user
from worlds.tiny_corpus import WordEmbedder, make_text
from worlds.tiny_models import make_chat_model_folder

__all__ = ["run"]

QUESTION = "How do I drain a node and evict its pods?"
TEXTS = {f"part {number}": make_text(40, seed=number) for number in range(4)}
WITH_EXTRAS = ("qcfuse", "qcfuse:sink", "qcfuse:knorm", "qcfuse:sink:20%", "cachecraft-like")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    """Knowledge bases of the same texts, brought in every way there is."""
    root, weave = tmp_path_factory.mktemp("kbs"), make_weave(folder)
    docs = tmp_path_factory.mktemp("docs")
    for name, text in TEXTS.items():
        (docs / f"{name}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        find_words(patch)
        ingest(patch, docs, root / "ingested", folder, "--kv")
        ingest(patch, docs, root / "plain", folder)
    libraries = make_libraries(weave, root, BackgroundKV())
    with serving(weave, libraries=libraries) as url:
        for name, text in TEXTS.items():
            document = {"title": name, "text": text}
            # what was asked before there is KV would be exact from then on
            to = f"{url}/v1/kb/uploaded/documents?wait_for_kv=true"
            sent = httpx.post(to, json=document, timeout=60)
            assert sent.status_code == 200, sent.text
        server = KbServer(url, weave, libraries, root)
        assert reused(ask(server, "uploaded", "reuse")), "chunk KV is made in the background"
        yield server
    libraries.close()


def find_words(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvweave.cli.ingest.find_embedder", lambda *_: WordEmbedder())
    patch.setattr("kvweave.app.library.library.SentenceEmbedder", lambda *_, **__: WordEmbedder())
    patch.setattr("kvweave.app.library.library.locate", Path)


def ingest(patch: pytest.MonkeyPatch, docs: Path, kb: Path, model: Path, *options: str) -> None:
    from kvweave.cli import main

    plain = ["--encoding", "isolated", "--quant", "none"] if options else []
    args = ["ingest", docs, "--kb", kb, "--model", model, "--chunk-tokens", 64, *options, *plain]
    patch.setattr("sys.argv", ["kvweave", *map(str, args)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0


def ask(server: KbServer, kb: str, reuse: str) -> dict[str, Any]:
    """Ask as a client does; the explain record of the answer."""
    body = {"messages": user(QUESTION), "kb": kb, "k": 3, "reuse": reuse, "explain": True}
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 2}, timeout=120
    )
    assert reply.status_code == 200, (kb, reuse, reply.text)
    explain: dict[str, Any] = reply.json()["explain"]
    return explain


def reused(explain: dict[str, Any]) -> bool:
    """Whether stored KV of a chunk was taken, or what is exact."""
    return any(chunk["state"] == "reused" for chunk in explain["chunks"])


def offered(server: KbServer) -> list[str]:
    info = httpx.get(f"{server.url}/v1/info", timeout=60).json()
    return [way["name"] for way in info["strategies"]]


@pytest.mark.parametrize("reuse", WITH_EXTRAS)
def test_what_a_strategy_wants_beside_an_uploaded_chunk_is_made_and_used(
    server: KbServer, reuse: str
) -> None:
    kb = "own" + "".join(filter(str.isalnum, reuse))  # whose paths no other request has computed
    for name, text in TEXTS.items():
        document = {"title": name, "text": f"{reuse} {text}"}
        url = f"{server.url}/v1/kb/{kb}/documents?wait_for_kv=true"
        assert httpx.post(url, json=document, timeout=60).status_code == 200
    explain = ask(server, kb, reuse)
    assert explain["strategy"] == reuse
    assert explain["tokens"]["recomputed"] > 0
    assert [chunk["why"] for chunk in explain["chunks"][1:]] == [None, None]


@pytest.mark.parametrize("reuse", REUSES)
def test_every_strategy_answers_on_the_command_line(
    server: KbServer, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, reuse: str
) -> None:
    find_words(monkeypatch)
    options = ["--kb", server.root / "ingested", "--model", folder, "--quant", "none"]
    ran = run("ask", QUESTION, *options, "--max-tokens", 2, "--reuse", reuse, "--json")
    assert ran.code == 0, ran.err
    if reuse not in ("full", "auto", "prefix"):
        assert reused(json.loads(ran.out)["explain"])


def test_all_there_is_is_offered_for_a_model_that_was_never_calibrated(server: KbServer) -> None:
    assert offered(server) == list(REUSES)
    assert {"qcfuse", "qcfuse:sink", "qcfuse:knorm", "cachecraft-like", "epic:16"} <= set(REUSES)


@pytest.mark.parametrize("kb", ["uploaded", "ingested", "plain"])
def test_every_strategy_answers_over_every_knowledge_base(server: KbServer, kb: str) -> None:
    for reuse in (*offered(server), *WITH_EXTRAS):
        explain = ask(server, kb, reuse)
        assert Reason.NEEDS_MISSING not in {chunk["why"] for chunk in explain["chunks"]}, reuse


@pytest.mark.parametrize("kb", ["uploaded", "ingested", "plain"])
def test_every_strategy_can_be_compared_over_every_knowledge_base(
    server: KbServer, kb: str
) -> None:
    names = [name for name in offered(server) if name != "full"]
    for pair in zip(names[::2], [*names[1::2], "reuse"], strict=False):
        ways = [{"reuse": "full"}, *({"reuse": name} for name in pair)]
        body = {"messages": user(QUESTION), "kb": kb, "k": 3, "ways": ways, "max_tokens": 2}
        reply = httpx.post(f"{server.url}/v1/compare", json=body, timeout=240)
        assert reply.status_code == 200, (kb, pair, reply.text)
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", (kb, pair, lines[-1])
        measured = [event for event in map(json.loads, lines[:-1]) if "quality" in event]
        assert [event["way"] for event in measured] == [0, 1, 2], (kb, pair)
