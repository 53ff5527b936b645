"""The folder of a knowledge base comes and goes as one: killed or cut off, no half of it stays."""

import shutil
from pathlib import Path

import pytest

from kvweave.corpus import kb_folder
from kvweave.corpus.kb_folder import CATALOGUE, DOOMED, remove_folder
from kvweave.corpus.settings import FILE
from kvweave.text.tokenizer import Tokenizer
from worlds.syncs import is_synced_behind, watched_disk
from worlds.tiny_corpus import open_kb


def test_the_name_of_the_catalogue_is_on_the_disk_before_the_settings_are(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Settings without a catalogue mean that it was lost: a power cut must not make that up."""
    folder = tmp_path / "kb"
    with watched_disk() as events:
        open_kb(folder, tokenizer).close()
    made = events.index(("rename", folder / FILE))
    assert ("sync", folder) in events[:made]
    assert (folder / CATALOGUE).is_file()


def test_a_deleted_knowledge_base_has_lost_its_name_before_anything_in_it_goes(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave its name with half of its files."""
    folder = tmp_path / "kb"
    open_kb(folder, tokenizer).close()
    steps: list[str] = []
    rmtree = shutil.rmtree

    def noted(path: Path) -> None:
        steps.extend("synced" for event in events if event == ("sync", tmp_path))
        steps.append("emptied")
        rmtree(path)

    monkeypatch.setattr(kb_folder.shutil, "rmtree", noted)
    with watched_disk() as events:
        remove_folder(folder)
    assert steps == ["synced", "emptied"]
    (doomed,) = (path for word, path in events if word == "rename")
    assert doomed.name.startswith(DOOMED)
    assert is_synced_behind(events, ("rename", doomed), tmp_path, ("unlink", doomed))


def test_a_catalogue_whose_making_was_cut_off_in_its_first_change_is_made_again(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Its journal is there then: before the log, SQLite works with that."""
    folder = tmp_path / "kb"
    folder.mkdir()
    (folder / CATALOGUE).touch()
    (folder / f"{CATALOGUE}-journal").write_bytes(bytes(512))
    with open_kb(folder, tokenizer) as kb:
        assert kb.documents() == []
        assert kb.check() == []
