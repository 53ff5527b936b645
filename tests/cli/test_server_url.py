"""Commands against a running server: --url, and `kvweave chat` there and here."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvweave.app.weave import Weave
from kvweave.cli import cli
from kvweave.cli.docs import show_server_kb
from worlds.serving import KbServer, make_libraries, make_weave, serving

GREEDY = ("--max-tokens", "4", "--temperature", "0")


@pytest.fixture(scope="module")
def weave(chat_model_folder: Path) -> Weave:
    return make_weave(chat_model_folder)


@pytest.fixture(scope="module")
def server(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    root = tmp_path_factory.mktemp("kbs")
    libraries = make_libraries(weave, root)
    with serving(weave, libraries=libraries) as url:
        yield KbServer(url, weave, libraries, root)
    libraries.close()


@pytest.fixture
def notes(server: KbServer, tmp_path: Path) -> KbServer:
    """The knowledge base `notes` with two documents in it, by the command line."""
    folder = tmp_path / "docs"
    for name, text in (("a/zorb.md", "# Zorbs\nA zorb is 14 cm wide."), ("b/zorb.md", "# Two\nX.")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    said = kvweave(server, "ingest", str(folder), "--kb", "notes", "--meta", "kind=tool")
    assert said.exit_code == 0, said.output
    return server


def kvweave(server: KbServer, *typed: str, stdin: str = "") -> Result:
    command = [*typed, "--url", server.url]
    return CliRunner().invoke(cli, command, input=stdin, standalone_mode=False)


def as_json(server: KbServer, *typed: str) -> dict[str, object]:
    return dict(json.loads(kvweave(server, *typed, "--json").stdout))


def test_documents_come_are_listed_found_and_go(notes: KbServer) -> None:
    kb = ("--kb", "notes")
    listed = as_json(notes, "docs", "ls", *kb)["documents"]
    assert isinstance(listed, list)
    assert {d["source"] for d in listed} == {"upload:a:zorb.md", "upload:b:zorb.md"}
    assert {json.dumps(d["metadata"]) for d in listed} == {'{"kind": "tool"}'}
    found = kvweave(notes, "docs", "search", "how wide", *kb, "--filter", "kind=tool")
    assert "14 cm wide" in found.stdout
    none = kvweave(notes, "docs", "search", "x", *kb, "--filter", "kind=x")
    assert none.stdout.strip() == "0 chunks"
    assert "14 cm wide" in kvweave(notes, "docs", "show", "a:zorb.md", *kb).stdout
    assert "2 documents" in kvweave(notes, "kb", "stat", *kb).stdout
    assert "2 documents" in kvweave(notes, "docs", "status", *kb).stdout
    rows = as_json(notes, "kb", "ls")["kbs"]
    assert {"name": "notes", "documents": 2, "chunks": 2}.items() <= rows[0].items()  # type: ignore[index]
    assert "removed 1 documents" in kvweave(notes, "docs", "rm", "b:zorb.md", *kb).stdout
    assert "removed 'notes' and 1 documents" in kvweave(notes, "kb", "rm", "--yes", *kb).stdout
    assert as_json(notes, "kb", "ls")["kbs"] == []


def test_what_a_server_has_on_its_disk_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    kv = {"state": "making", "chunks_done": 2, "chunks_total": 3, "chunks_in_front": 1}
    told = {"documents": 1, "chunks": 3, "tokens": 30, "problem": None}
    show_server_kb({**told, "kv": {**kv, "bytes": 27_900_000}}, as_json=False)
    assert "making, 28 MB, 1 also for the first place" in capsys.readouterr().out


def test_files_that_a_server_refuses_look_like_no_success(server: KbServer, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    said = kvweave(server, "ingest", str(tmp_path / "empty.txt"), "--kb", "refused")
    assert (said.return_value, said.stdout) == (1, "")
    assert said.stderr.startswith(f"nothing was taken in by {server.url}: every file was refused")


def test_a_question_is_answered_there_with_its_sources(notes: KbServer) -> None:
    asked = ("ask", "How wide is a zorb?", "--kb", "notes", *GREEDY)
    reply = as_json(notes, *asked)
    told = reply["sources"]
    assert isinstance(told, list)
    assert told[0]["title"] == "Zorbs"
    history = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]'
    more = ("--history", "-", "--rewrite", "--json")
    followed = json.loads(kvweave(notes, *asked, *more, stdin=history).stdout)
    assert followed["query"] is not None, "the model was asked for it"
    plain = kvweave(notes, *asked, "--cite", "--chunks", "1")
    assert plain.exit_code == 0
    assert "[1] Zorbs" in plain.stderr
    assert "prompt" in plain.stderr
    bad = kvweave(notes, "ask", "q", "--kb", "nowhere")
    assert "no knowledge base 'nowhere'" in str(bad.exception)


def test_a_conversation_with_a_server(notes: KbServer) -> None:
    typed = "\n".join(
        [
            "/explain",
            "How wide is a zorb?",
            "/sources",
            "/explain",
            "/reuse full",
            "And how heavy?",
            "/explain",
            "/reuse magic",
            "/kb nowhere",
            "/kb",
            "Hello",
            "/sources",
            "/nonsense",
            "/help",
            "/clear",
            "/quit",
            "never read",
        ]
    )
    talk = kvweave(notes, "chat", "--kb", "notes", *GREEDY, stdin=typed)
    assert talk.exit_code == 0, talk.output
    assert len(talk.stdout.splitlines()) >= 3, "three answers"
    for words in (
        "nothing was answered yet",
        "[1] Zorbs",
        "first token after",
        "full: ",
        "reuse 'magic' is unknown",
        "no knowledge base 'nowhere'",
        "answers are from the model alone",
        "no sources",
        "/nonsense is unknown; known: /help /kb /reuse",
        "/clear       begin another conversation",
    ):
        assert words in talk.stderr, words


def test_a_conversation_goes_on_where_it_was(notes: KbServer) -> None:
    """The second question is answered behind the first one and its answer."""
    talk = kvweave(notes, "chat", *GREEDY, stdin="Hello there\nAnd then?\n/explain\n")
    assert "exact" in talk.stderr, "the first turn is not computed again"


def test_a_conversation_here(
    chat_model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVWEAVE_CONFIG", "/dev/null")
    command = ["chat", "--model", str(chat_model_folder), *GREEDY]
    typed = "Hello\n/explain\n/reuse weave\nAgain\n/kb nowhere\n/quit\n"
    talk = CliRunner().invoke(cli, command, input=typed, standalone_mode=False)
    assert talk.exit_code == 0, talk.output
    assert talk.stdout.strip()
    assert "first token after" in talk.stderr
    assert "needs a knowledge base" in talk.stderr
    assert "no knowledge base in nowhere" in talk.stderr


def test_the_folder_of_knowledge_bases_is_listed(server: KbServer, notes: KbServer) -> None:
    command = ["kb", "ls", "--kb-root", str(notes.root), "--json"]
    rows = json.loads(CliRunner().invoke(cli, command, standalone_mode=False).stdout)["kbs"]
    assert [row["name"] for row in rows] == ["notes"]
    assert rows[0]["documents"] == 2
    stat = ["kb", "stat", "--kb", str(notes.root / "notes"), "--json"]
    told = json.loads(CliRunner().invoke(cli, stat, standalone_mode=False).stdout)
    assert (told["num_documents"], told["embedder"]) == (2, "words")
    assert told["document_bytes"] > 0
