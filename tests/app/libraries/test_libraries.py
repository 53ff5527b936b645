"""Answers over a knowledge base by name: what is reused unless told, and how long it stays open."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvweave.app.answer.question import SpeculationMode
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig, LibraryKey
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.runtime import EngineClient
from kvweave.app.weave import Sampling
from kvweave.calibrate.profiles import user_path
from kvweave.config import SpeculationSettings
from kvweave.errors import RequestError
from worlds.serving import make_libraries, make_weave
from worlds.tiny_corpus import WordEmbedder

NOTES = LibraryKey("", "notes")
SHORT = Sampling(max_tokens=2)
T = TypeVar("T")


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


def test_behind_another_system_prompt_what_is_exact_is_reused(libraries: Libraries) -> None:
    for _ in range(2):
        answer = libraries.stream(NOTES, "drain?", sampling=SHORT, system="Be exact.").finish()
    assert answer.explain is not None
    assert answer.explain.strategy == "prefix"
    assert {chunk.tier for chunk in answer.explain.chunks} == {"tree"}


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


@pytest.mark.parametrize("reuse", ["magic", "qcfuse:magic"])
def test_a_strategy_that_cannot_be_used_is_a_request_error_and_keeps_nothing_open(
    libraries: Libraries, reuse: str
) -> None:
    with pytest.raises(RequestError, match=reuse):
        libraries.stream(NOTES, "drain?", reuse=reuse)
    assert libraries.counts().in_use == 0


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_first_plan_is_waited_for_on_the_thread_that_asks_not_by_those_that_search(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: SpeculationMode
) -> None:
    """Or the few that search would stand still for every knowledge base while one is planned."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    waited: list[str] = []
    run_alone = EngineClient.run_alone

    def noted(self: EngineClient, job: Callable[[], T]) -> T:
        waited.append(threading.current_thread().name)
        return run_alone(self, job)

    with make_weave(chat_model_folder) as weave:
        config = LibrariesConfig(
            tmp_path / "kbs",
            embedder="words",
            kv=KVOptions("isolated"),
            speculation=SpeculationSettings(mode),
        )
        libraries = Libraries(weave, config, open_embedder=lambda _: WordEmbedder())
        with libraries.use("", "notes", create=True) as over:
            over.ingest(("Drain", "To drain a node, cordon it first."), chunk_kv=True)
        monkeypatch.setattr(EngineClient, "run_alone", noted)
        answer = libraries.stream(NOTES, "drain?", sampling=SHORT, reuse="auto")
        answer.finish()
        answer.close()
        libraries.close()
    assert waited
    assert set(waited) == {threading.current_thread().name}


def test_a_profile_that_cannot_be_read_costs_no_answer_and_is_named(libraries: Libraries) -> None:
    with libraries.use("", "notes") as over:
        path = user_path(over.runtime.decoder.weights.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    answer = libraries.stream(NOTES, "drain?", sampling=SHORT, reuse="auto")
    explain = answer.finish().explain
    answer.close()
    assert explain is not None
    assert (explain.strategy, path.name in (explain.why or "")) == ("prefix", True)
    assert libraries.counts().in_use == 0
