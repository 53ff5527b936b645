"""`kvweave ingest` and `kvweave docs` as a user meets them."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvweave.cli import cli
from kvweave.errors import CorpusError
from worlds.tiny_corpus import WordEmbedder, make_folder, make_tokenizer


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, documents, and word vectors in place of a sentence-transformers model."""
    make_tokenizer(tmp_path / "model")
    make_folder(tmp_path / "docs", 3)
    for module in ("ingest", "docs"):
        monkeypatch.setattr(f"kvweave.cli.{module}.find_embedder", lambda *_: WordEmbedder())
    return tmp_path


def kvweave(world: Path, *arguments: str) -> Result:
    where = ["--kb", str(world / "kb")]
    if arguments[0] == "ingest":
        where += ["--model", str(world / "model")]
    result = CliRunner().invoke(cli, [*arguments, *where], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def as_json(world: Path, *arguments: str) -> Any:
    return json.loads(kvweave(world, *arguments, "--json").stdout)


def test_ingest_tells_what_it_did_and_a_second_run_does_nothing(world: Path) -> None:
    first = kvweave(world, "ingest", str(world / "docs"))
    assert first.return_value is None
    assert "3 added, 0 updated, 0 unchanged" in first.stdout
    assert "0 added, 0 updated, 3 unchanged" in kvweave(world, "ingest", str(world / "docs")).stdout


def test_a_skipped_file_is_named_and_the_exit_code_tells(world: Path) -> None:
    (world / "docs" / "empty.txt").touch()
    result = kvweave(world, "ingest", str(world / "docs"), str(world / "missing.md"))
    assert result.return_value == 1
    assert "3 added" in result.stdout
    assert "empty.txt: the file is empty" in result.stderr
    assert "missing.md: no such file or directory" in result.stderr


def test_ingest_as_json_is_one_document(world: Path) -> None:
    (world / "docs" / "bad.csv").write_text("a,b\n1\n")
    report = as_json(world, "ingest", str(world / "docs"), "--exclude", "doc000*")
    assert report["added"] == 2
    assert report["skipped"] == [
        {
            "source": str(world / "docs" / "bad.csv"),
            "reason": "line 2 has 1 fields, the header has 2",
        }
    ]
    assert report["totals"]["num_documents"] == 2


def test_docs_lists_shows_searches_and_removes(world: Path) -> None:
    kvweave(world, "ingest", str(world / "docs"))
    listed = as_json(world, "docs", "ls")["documents"]
    assert [d["title"] for d in listed] == ["Note 0", "Note 1", "Note 2"]
    assert "Note 1" in kvweave(world, "docs", "ls").stdout
    (shown,) = as_json(world, "docs", "show", str(world / "docs" / "doc001.md"))["documents"]
    assert shown["num_chunks"] == len(shown["chunks"])
    assert shown["chunks"][0]["text"].startswith("Note 1\n")
    assert "Note 1" in kvweave(world, "docs", "show", listed[1]["id"][:8]).stdout
    for mode in ("vector", "words", "hybrid"):
        hits = as_json(world, "docs", "search", "drain node", "-k", "2", "--retrieval", mode)[
            "hits"
        ]
        assert len(hits) == 2
    assert "2 chunks in" in kvweave(world, "docs", "search", "drain node", "-k", "2").stdout
    assert as_json(world, "docs", "rm", listed[1]["id"])["removed"] == 1
    assert "removed 1 documents" in kvweave(world, "docs", "rm", listed[0]["id"][:10]).stdout
    assert len(as_json(world, "docs", "ls")["documents"]) == 1


def test_a_document_named_twice_is_removed_once(world: Path) -> None:
    kvweave(world, "ingest", str(world / "docs"))
    document = as_json(world, "docs", "ls")["documents"][0]
    names = (document["id"], document["id"][:8], document["source"])
    removed = as_json(world, "docs", "rm", *names)
    assert removed["removed"] == 1
    assert len(removed["orphaned_chunks"]) == document["num_chunks"]
    assert len(as_json(world, "docs", "ls")["documents"]) == 2


def test_a_wrong_document_or_knowledge_base_is_one_line(world: Path) -> None:
    with pytest.raises(CorpusError, match="no knowledge base in"):
        kvweave(world, "docs", "ls")
    kvweave(world, "ingest", str(world / "docs"))
    with pytest.raises(CorpusError, match="has no document 'nothing'; see: kvweave docs ls"):
        kvweave(world, "docs", "show", "nothing")
    listed = as_json(world, "docs", "ls")["documents"]
    with pytest.raises(CorpusError, match="has no document"):
        kvweave(world, "docs", "rm", listed[0]["id"], "nothing")
    assert len(as_json(world, "docs", "ls")["documents"]) == 3  # a typo removes nothing


def test_an_interrupt_says_how_to_go_on(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kvweave(world, "ingest", str(world / "docs"))
    (world / "docs" / "new.txt").write_text("One more note.")
    monkeypatch.setattr(WordEmbedder, "embed_passages", interrupt)
    result = CliRunner().invoke(
        cli,
        ["ingest", str(world / "docs"), "--kb", str(world / "kb"), "--model", str(world / "model")],
        standalone_mode=False,
    )
    assert isinstance(result.exception, (KeyboardInterrupt, click.Abort))
    assert "stopped; 3 documents are in, run the same command to go on" in result.stderr


def test_prune_forgets_what_was_deleted(world: Path) -> None:
    kvweave(world, "ingest", str(world / "docs"))
    (world / "docs" / "doc001.md").unlink()
    assert "1 removed" in kvweave(world, "ingest", str(world / "docs"), "--prune").stdout


def test_files_that_are_all_refused_look_like_no_success(world: Path) -> None:
    refused = world / "refused"
    refused.mkdir()
    (refused / "empty.txt").touch()
    (refused / "broken.pdf").write_text("no PDF")
    (refused / "photo.png").touch()
    result = kvweave(world, "ingest", str(refused))
    assert (result.return_value, result.stdout) == (1, "")
    first, *skipped = result.stderr.splitlines()
    assert first == (
        "nothing was taken in: of the files 2 could not be read, 1 of a kind that no parser knows"
    )
    assert len(skipped) == 2


def test_a_folder_without_a_file_that_can_be_read_is_no_success(world: Path) -> None:
    photos = world / "photos"
    photos.mkdir()
    (photos / "one.png").touch()
    result = kvweave(world, "ingest", str(photos))
    assert (result.return_value, result.stdout) == (1, "")
    assert "nothing was taken in" in result.stderr
