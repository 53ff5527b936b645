"""`kvweave demo` with a tiny model: what is done and told, not whether it babbles the answer."""

import json
from pathlib import Path

import pytest

from worlds.running import Run
from worlds.tiny_embedder import make_embedder_folder
from worlds.tiny_models import make_chat_model_folder


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> list[object]:
    """Arguments of a demo that is done in seconds. (`run` first: it forgets variables.)"""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVWEAVE_LIBRARY_EMBEDDER", str(make_embedder_folder(tmp_path / "embedder")))
    monkeypatch.setenv("KVWEAVE_LIBRARY_K", "2")
    monkeypatch.setenv("KVWEAVE_LIBRARY_ENCODING", "isolated")
    return ["--model", make_chat_model_folder(tmp_path / "model", max_position_embeddings=4096)]


def test_each_question_is_answered_in_full_and_with_reuse_and_told_side_by_side(
    run: Run, settings: list[object], tmp_path: Path
) -> None:
    first = run("demo", *settings)
    assert first.code == 0, first.err
    assert "48 passages about an invented valley" in first.out
    assert "that will be found stored in" in first.out
    assert first.out.count("first token") == 3 * 3 + 3
    assert "(known: Patience)" in first.out
    assert "auto took prefix" not in first.out, "that is for --verbose"
    assert "auto reuses no more because this model was never calibrated" in first.out
    assert list((tmp_path / "home" / "demo").iterdir()), "kept for the next time"
    told = json.loads(run("demo", *settings, "--json").out)
    assert told["encoded"] == 0, "its KV is there"
    assert [q["known"] for q in told["questions"]] == [["Patience"], ["Tessamund"], ["viola"]]
    for question in told["questions"]:
        full, named, auto = question["answers"]
        assert [full["way"], named["way"], auto["way"]] == ["full prefill", "weave at 15%", "auto"]
        assert set(full["tokens"]) == set(auto["tokens"])
        assert full["tokens"]["reused"] == 0
        assert named["tokens"]["reused"] > 0
        assert full["answer"] == auto["answer"], "exact"


def test_why_auto_took_what_it_took_is_told_to_those_who_ask(
    run: Run, settings: list[object]
) -> None:
    assert "auto took prefix" in run("demo", *settings, "-v").out
