"""The model that nobody named, and the one that somebody did: as a user meets them, offline.

Tiny models stand in the cache under the real names; pip and huggingface_hub are the real ones, and
there is nothing that they can reach.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvweave.model.files.embedded import DEFAULT, EMBEDDED, FALLBACK
from kvweave.model.files.model_cache import ModelCache, no_progress
from worlds.running import Run, run, run_alone
from worlds.tiny_corpus import WordEmbedder

__all__ = ["run", "run_alone"]  # the fixtures

Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, chat_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts the tiny chat model into an empty cache as an embedded one; nothing else can be had."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    def put(name: str, *, tokenizer_tail: str = "") -> None:
        def fill(folder: Path, scratch: Path) -> None:
            shutil.copytree(chat_model_folder, folder)
            tokenizer = folder / "tokenizer.json"
            tokenizer.write_text(tokenizer.read_text() + tokenizer_tail)

        model = EMBEDDED[name]
        ModelCache().make(model.folder_name, model.origin, fill, no_progress)

    return put


def test_a_default_that_cannot_be_had_is_replaced_and_said_so(put: Put, run_alone: Run) -> None:
    put(FALLBACK)
    ran = run_alone("ask", "how?", "--max-tokens", "3", "--no-stats")
    assert ran.code == 0, ran.err
    assert ran.out.strip()
    said = [line for line in ran.err.splitlines() if not line.startswith(f"{DEFAULT}: downl")]
    assert len(said) == 1, ran.err
    assert said[0].startswith(f"{FALLBACK} answers, a smaller and poorer model than {DEFAULT}: ")
    assert f"kvweave models pull {DEFAULT}" in said[0]


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_model_that_was_named_is_refused_in_one_line(
    how: str, put: Put, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(FALLBACK)
    if how == "variable":
        monkeypatch.setenv("KVWEAVE_MODEL", DEFAULT)
    ran = run("ask", "how?", *(["--model", DEFAULT] if how == "flag" else []))
    assert (ran.code, ran.out) == (2, "")
    last = ran.err.splitlines()[-1]
    assert last.startswith(f"kvweave: {DEFAULT} can be had from no source: hub Qwen/")
    assert FALLBACK not in ran.err
    assert "Traceback" not in ran.err


def test_the_default_that_is_here_answers_without_a_word(put: Put, run_alone: Run) -> None:
    put(DEFAULT)
    ran = run_alone("ask", "how?", "--max-tokens", "3", "--no-stats")
    assert (ran.code, ran.err) == (0, "")


def test_a_knowledge_base_of_the_old_default_says_how_to_open_it(
    put: Put, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(FALLBACK)
    put(DEFAULT, tokenizer_tail="\n")  # another fingerprint, so another tokenizer
    monkeypatch.setattr("kvweave.cli.ingest.find_embedder", lambda *_: WordEmbedder())
    opened = "kvweave.app.library.library.open_sentence_embedder"
    monkeypatch.setattr(opened, lambda *_: WordEmbedder())
    (tmp_path / "a.md").write_text("The zorb is 14 cm wide.")
    kb = ("--kb", tmp_path / "kb")
    assert run("ingest", tmp_path / "a.md", *kb, "--model", FALLBACK).code == 0
    for again in (["ask", "How wide?"], ["ingest", tmp_path / "a.md"]):
        ran = run(*again, *kb)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
        assert "was cut with another tokenizer" in ran.err
        assert "--model smollm2" in ran.err
    ran = run("ask", "How wide?", *kb, "--model", FALLBACK, "--max-tokens", "3", "--no-stats")
    assert (ran.code, ran.err) == (0, "")
