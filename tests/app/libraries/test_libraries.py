"""Answers over a knowledge base by name: what is reused unless told, and how long it stays open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.app.libraries.libraries import Libraries, LibraryKey
from kvweave.app.weave import Sampling
from kvweave.errors import RequestError
from worlds.serving import make_libraries, make_weave

NOTES = LibraryKey("", "notes")
SHORT = Sampling(max_tokens=2)


@pytest.fixture
def libraries(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Libraries]:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    weave = make_weave(chat_model_folder)
    made = make_libraries(weave, tmp_path / "kbs")
    with made.use("", "notes", create=True) as over:
        over.ingest(("Drain", "To drain a node, cordon it first."), chunk_kv=True)
    yield made
    made.close()
    weave.close()


def test_a_named_knowledge_base_is_auto_also_on_a_machine_that_was_never_measured(
    libraries: Libraries,
) -> None:
    assert libraries.stream(NOTES, "drain?", sampling=SHORT).finish().decision is not None


def test_behind_another_system_prompt_nothing_is_reused(libraries: Libraries) -> None:
    answer = libraries.stream(NOTES, "drain?", sampling=SHORT, system="Be exact.").finish()
    assert answer.explain is not None
    assert (answer.explain.strategy, answer.decision) == ("full", None)


def test_a_ratio_alone_means_what_it_means_to_a_weave(libraries: Libraries) -> None:
    answer = libraries.stream(NOTES, "drain?", sampling=SHORT, ratio=0.5).finish()
    assert answer.explain is not None
    assert answer.explain.strategy == "weave"


def test_it_stays_open_until_the_answer_is_closed(libraries: Libraries) -> None:
    answer = libraries.stream(NOTES, "drain?", sampling=SHORT)
    answer.finish()
    assert libraries.counts().in_use == 1
    answer.close()
    assert libraries.counts().in_use == 0


@pytest.mark.parametrize("reuse", ["magic", "qcfuse"])
def test_a_strategy_that_cannot_be_used_is_a_request_error_and_keeps_nothing_open(
    libraries: Libraries, reuse: str
) -> None:
    with pytest.raises(RequestError, match=reuse):
        libraries.stream(NOTES, "drain?", reuse=reuse)
    assert libraries.counts().in_use == 0
