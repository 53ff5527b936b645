"""`kvweave kb` as a user meets it: check, backup, restore, rm."""

import json
import sqlite3
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvweave.cli import cli
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import CorpusDamaged, CorpusError
from kvweave.ingest import ingest
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_tokenizer, open_kb

PAIRS = [("Drain", "Cordon the node, then evict its pods."), ("Taints", "A taint keeps pods away.")]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        ingest(kb, PAIRS)
    return tmp_path / "kb"


def kvweave(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["kb", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def damage(folder: Path) -> None:
    db = sqlite3.connect(folder / "catalogue.sqlite")
    with db:
        db.execute("UPDATE chunks SET token_ids = x'01000000' WHERE vector_id = 1")
    db.close()


def test_a_sound_knowledge_base_is_called_so(folder: Path) -> None:
    result = kvweave("check", "--kb", folder)
    assert result.output == "sound: 2 documents, 2 chunks\n"


def test_a_damaged_one_is_not(folder: Path) -> None:
    damage(folder)
    result = CliRunner().invoke(cli, ["kb", "check", "--kb", str(folder), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["problems"] == ["1 chunks whose tokens were changed"]


def test_the_order_of_chunks_is_set_and_left_to_the_configuration(folder: Path) -> None:
    result = kvweave("set", "--kb", folder, "--order", "free")
    assert result.output == f"{folder}: order free\n"
    with KnowledgeBase.open(folder) as kb:
        assert kb.settings.order == "free"
    kvweave("set", "--kb", folder, "--order", "configured")
    with KnowledgeBase.open(folder) as kb:
        assert kb.settings.order is None
    refused = CliRunner().invoke(cli, ["kb", "set", "--kb", str(folder), "--order", "any"])
    assert refused.exit_code == 2


def test_what_is_restored_is_what_was_backed_up(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with open_kb(folder, tokenizer) as kb, kb.writing():  # beside a writer
        kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
        before = kb.documents(), sorted(kb.catalogue.chunk_ids())
    kvweave("restore", tmp_path / "kb.backup", "--kb", tmp_path / "again")
    with open_kb(tmp_path / "again", tokenizer) as kb:
        assert (kb.documents(), sorted(kb.catalogue.chunk_ids())) == before
        assert kb.search("evict the pods", 1)[0].chunk.title == "Drain"
        assert kb.check() == []
        ingest(kb, [("New", "A new note.")])
        assert kb.totals().num_documents == 3
    assert not list(tmp_path.glob(".kvweave-*"))


def test_nothing_that_is_there_is_overwritten(folder: Path, tmp_path: Path) -> None:
    kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
    with pytest.raises(CorpusError, match="is there already; name another file"):
        kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
    with pytest.raises(CorpusError, match="is there already; name a new folder"):
        kvweave("restore", tmp_path / "kb.backup", "--kb", folder)


def test_a_damaged_one_is_not_backed_up(folder: Path, tmp_path: Path) -> None:
    damage(folder)
    with pytest.raises(CorpusDamaged, match="damaged and not backed up: 1 chunks"):
        kvweave("backup", tmp_path / "kb.backup", "--kb", folder)
    assert not (tmp_path / "kb.backup").exists()


def test_a_damaged_backup_is_not_restored(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "kb.backup"
    kvweave("backup", file, "--kb", folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    for broken in (bytes(data), b"", b"no archive" * 200, bytes(data[: len(data) // 2])):
        file.write_bytes(broken)
        with pytest.raises(CorpusDamaged):
            kvweave("restore", file, "--kb", tmp_path / "again")
        assert not (tmp_path / "again").exists()


def test_a_backup_writes_nowhere_else(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil", "w") as archive:
        archive.add(folder / "kb.json", "../../evil.json")
    with pytest.raises(CorpusDamaged, match="is no backup"):
        kvweave("restore", tmp_path / "evil", "--kb", tmp_path / "again")
    assert not (tmp_path.parent / "evil.json").exists()


def test_a_knowledge_base_is_removed_whole(folder: Path) -> None:
    kvweave("rm", "--kb", folder, "--yes")
    assert not folder.exists()
    with pytest.raises(CorpusError, match="no knowledge base in"):
        kvweave("rm", "--kb", folder, "--yes")


def test_what_is_no_knowledge_base_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(CorpusError, match="no knowledge base in"):
        kvweave("rm", "--kb", tmp_path / "precious", "--yes")
    assert (tmp_path / "precious").exists()


def test_one_that_is_written_is_not_removed(folder: Path, tokenizer: Tokenizer) -> None:
    with open_kb(folder, tokenizer) as kb, kb.writing(), pytest.raises(CorpusError):
        kvweave("rm", "--kb", folder, "--yes")
    with KnowledgeBase.open(folder) as kb:
        assert kb.totals().num_documents == 2


def test_a_removal_that_is_killed_leaves_no_half_under_the_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    def die(path: Path, **_: object) -> None:
        next(Path(path).glob("catalogue.sqlite")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        CliRunner().invoke(cli, ["kb", "rm", "--kb", str(folder), "--yes"])
    assert not folder.exists()
    open_kb(folder, tokenizer).close()  # the name is free
    kvweave("rm", "--kb", folder, "--yes")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".deleted-")]
