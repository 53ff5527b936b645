"""A knowledge base and its backup move between machines that each downloaded their models."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from worlds.running import Run

NOTES = {
    "ferry.md": "# Ferry\n\nThe ferry leaves the harbour at 6:40 and is on the island at eight.\n",
    "market.md": "# Market\n\nThe market on the square opens on Tuesdays and ends at noon.\n",
}
QUESTION = "When does the ferry leave the harbour?"


def make_home(folder: Path, made: str) -> Path:
    """A home with the models of this machine, as if they were downloaded there at `made`."""
    for name in ("smollm2", "minilm"):
        cached = Path(locate(name))
        copy = shutil.copytree(
            cached, folder / "models" / cached.name, copy_function=lambda a, b: os.link(a, b)
        )
        manifest = json.loads((cached / "manifest.json").read_text())
        (copy / "manifest.json").unlink()  # a link to the other one
        (copy / "manifest.json").write_text(json.dumps({**manifest, "made": made}))
    return folder


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    times = ("2026-01-01T00:00:00+00:00", "2026-02-02T00:00:00+00:00")
    first, second = (make_home(tmp_path / f"home{n}", made) for n, made in enumerate(times))
    return first, second


def test_a_knowledge_base_and_its_backup_answer_the_same_in_another_home(
    homes: tuple[Path, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = homes
    (tmp_path / "notes").mkdir()
    for name, text in NOTES.items():
        (tmp_path / "notes" / name).write_text(text)
    made, moved, restored = (tmp_path / name for name in ("kb", "moved", "restored"))
    model = ("--model", "smollm2", "--quant", "none")

    def ask(kb: Path) -> dict[str, Any]:
        how = ("--max-tokens", 12, "--temperature", 0, "--reuse", "weave", "--json")
        return dict(json.loads(run("ask", QUESTION, "--kb", kb, *model, *how).out))

    monkeypatch.setenv("KVWEAVE_HOME", str(here))
    run("ingest", tmp_path / "notes", "--kb", made, *model, "--kv")
    ask(made)  # the chunk that stood in front is stored for that place, too
    answer = ask(made)
    assert answer["explain"]["tokens"]["reused"] > 0
    run("kb", "backup", tmp_path / "kb.backup", "--kb", made)
    made.rename(moved)

    monkeypatch.setenv("KVWEAVE_HOME", str(there))
    elsewhere = ask(moved)
    assert elsewhere["answer"] == answer["answer"]
    assert elsewhere["explain"]["tokens"] == answer["explain"]["tokens"]  # chunk KV is found, too
    run("kb", "restore", tmp_path / "kb.backup", "--kb", restored)
    run("ingest", tmp_path / "notes", "--kb", restored, *model, "--kv")  # KV is in no backup
    again = ask(restored)
    assert again["answer"] == answer["answer"]
    assert [s["chunk"] for s in again["sources"]] == [s["chunk"] for s in answer["sources"]]


def test_the_revision_of_a_model_does_not_tell_when_it_was_downloaded(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    revisions = set()
    for made in ("2026-01-01", "2026-02-02"):
        copy = Path(shutil.copytree(chat_model_folder, tmp_path / made))
        (copy / "manifest.json").write_text(json.dumps({"made": made}))
        revisions.add(load_decoder(copy, device="cpu").revision)
    assert len(revisions) == 1
