"""A model that nobody calibrated: its documents are asked about themselves until the gate knows."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvweave import Weave
from kvweave.app.auto.self_calibration import SelfCalibration
from kvweave.app.libraries.quality_view import quality_of
from kvweave.app.library.library_kv import BackgroundKV
from kvweave.app.weave import BOUND, Sampling
from kvweave.calibrate.own_evidence import (
    LOOKS,
    NOISE_QUESTIONS,
    SCREEN_QUESTIONS,
    EvidenceState,
)
from kvweave.cli.tables import progress_text
from kvweave.model.load import load_decoder
from kvweave.plan.plan import PromptShape
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds.auto import World
from worlds.made_kv import Model, opened
from worlds.tiny_corpus import make_text
from worlds.tiny_models import make_chat_model_folder

TEXTS = [(f"Note {i}", make_text(24, seed=i)) for i in range(40)]
BACKGROUND = BackgroundKV(bound=BOUND, calibrates=True)
GREEDY = Sampling(max_tokens=4)


def make_folder(folder: Path, *, attention: float = 1.0, logits: float = 1.0) -> Path:
    """A tiny model, with what attention gives and its logits made so many times as large."""
    made = make_chat_model_folder(folder, max_position_embeddings=4096)
    weights = load_file(made / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name:
            weights[name] = weight * attention
        if "lm_head" in name:
            weights[name] = weight * logits
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def load_model(folder: Path, dtype: str = "float32") -> Model:
    return load_decoder(folder, device="cpu", dtype=dtype), Tokenizer(folder)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are not fast: their heads are too small for compiled kernels."""
    monkeypatch.setattr("kvweave.app.auto.self_calibration.WATCHED_TOKENS", 3)


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """It hardly looks at what it has read, and has clear favourites: reuse costs it next to
    nothing."""
    folder = tmp_path_factory.mktemp("certain")
    return load_model(make_folder(folder, attention=1e-3, logits=300.0))


@pytest.fixture(scope="module")
def uncertain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """It has no favourites: all its first tokens are close calls."""
    return load_model(make_folder(tmp_path_factory.mktemp("uncertain")))


def state_of(weave: Weave) -> EvidenceState:
    return weave.library.kv.worth.evidence.state()


def calibration_of(weave: Weave) -> SelfCalibration:
    found = weave._target.calibration
    assert found is not None
    return found


def until(is_true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def weave(tmp_path: Path, certain: Model) -> Iterator[Weave]:
    with opened(tmp_path / "kb", certain, BACKGROUND) as weave:
        weave.ingest(*TEXTS)
        weave.library.start()
        yield weave


def test_a_model_that_bears_it_opens_its_own_gate_and_answers_are_fused(weave: Weave) -> None:
    weave.measure()
    first = weave.ask("How do I drain a node?", k=3, reuse="auto", sampling=GREEDY)
    assert first.explain is not None
    assert first.explain.why == Reason.CALIBRATING
    until(lambda: state_of(weave).state == "open")
    state = state_of(weave)
    assert state.asked >= SCREEN_QUESTIONS + LOOKS[0]
    plan = weave.plan("How do I drain a node?", k=3)
    ways = {option.name: option.reason for option in plan.options if "fused" in option.name}
    gate = weave._target.router.planner(weave.library.own)._growing
    assert gate.speaks
    assert ways[f"fused {state.strategy}"] != Reason.NOT_CALIBRATED


def test_a_model_that_does_not_bear_it_is_given_up_and_no_more_kv_is_made(
    tmp_path: Path, uncertain: Model
) -> None:
    with opened(tmp_path / "kb", uncertain, BACKGROUND) as weave:
        weave.ingest(*TEXTS)
        weave.library.start()
        calibration = calibration_of(weave)
        assert calibration.wait(120.0)
        state = state_of(weave)
        assert state.state == "shut"
        weave.library.maker.look()
        until(lambda: (p := weave.kv_progress()) is not None and p.state == "unused")
        progress = weave.kv_progress()
        assert progress is not None
        assert state.why in progress.why


def test_a_restart_goes_on_where_it_was(tmp_path: Path, certain: Model) -> None:
    with opened(tmp_path / "kb", certain, BACKGROUND) as weave:
        weave.ingest(*TEXTS)
        weave.library.start()
        until(lambda: state_of(weave).asked >= 3)
    asked = state_of(weave).asked
    with opened(tmp_path / "kb", certain, BACKGROUND) as again:
        assert state_of(again).asked >= asked


def test_documents_that_come_later_are_asked_as_well(tmp_path: Path, certain: Model) -> None:
    """One note gives no question that finds two chunks."""
    with opened(tmp_path / "kb", certain, BACKGROUND) as weave:
        weave.ingest(TEXTS[0])
        weave.library.start()
        time.sleep(1.0)
        assert state_of(weave) == EvidenceState("measuring", 0, 208, None, None, "")
        weave.ingest(*TEXTS[1:])
        until(lambda: state_of(weave).asked >= 3)


def test_a_question_that_fails_is_left_out(
    tmp_path: Path, certain: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.app.auto.self_calibration.FAILED_S", 0.01)
    find, times = SelfCalibration._find, iter(range(10**6))

    def fail_now_and_then(self: SelfCalibration, question: str) -> list[Chunk]:
        if next(times) % 5 == 0:
            raise sqlite3.OperationalError("database is locked")
        return find(self, question)

    monkeypatch.setattr(SelfCalibration, "_find", fail_now_and_then)
    with opened(tmp_path / "kb", certain, BACKGROUND) as weave:
        weave.ingest(*TEXTS)
        weave.library.start()
        until(lambda: state_of(weave).asked >= 6)
        assert calibration_of(weave).metrics.value("calibration_skipped_total", why="failed") > 2


@pytest.fixture
def calibrated(
    tmp_path: Path, certain: Model, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], Weave]]:
    """Opens a knowledge base whose model lets `weave` through at some ratio, for all kinds of
    questions; a moment without answers is a rest, and fewer questions are enough."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvweave.app.auto.self_calibration.REST_S", 0.1)
    for module in ("gate", "own_evidence"):
        monkeypatch.setattr(f"kvweave.calibrate.{module}.ENOUGH_QUESTIONS", LOOKS[0])
    with ExitStack() as stack:

        def open_at(ratio: float) -> Weave:
            world = World(tmp_path / "kb", *certain)
            world.calibrate(("weave", ratio, 0.01), kind="document", num_questions=250)
            return stack.enter_context(opened(tmp_path / "kb", certain, BACKGROUND))

        yield open_at


def test_a_base_that_bears_less_recomputes_less_by_itself(
    calibrated: Callable[[float], Weave],
) -> None:
    weave = calibrated(0.3)
    weave.measure()
    weave.ingest(*TEXTS)
    time.sleep(0.5)
    assert state_of(weave)[1:] == (0, LOOKS[-1], "weave", 0.3, ""), "its KV comes first"
    with weave.runtime.client.answers.one():
        weave.library.start()
        assert weave.library.maker.wait(60.0)
        time.sleep(0.5)
        assert state_of(weave).asked == 0, "somebody is answered"
    gate = weave._target.router.planner(weave.library.own)._growing
    shape = PromptShape(1000, 5)
    before = gate.min_ratio("weave", 0.02, shape)
    assert (before.ratio, before.evidence) == (0.3, "250 document questions, 0 chunks")
    until(lambda: state_of(weave).ratio == 0.15)
    after = gate.min_ratio("weave", 0.02, shape)
    assert (after.ratio, after.evidence[:16]) == (0.15, f"{LOOKS[0]} questions of ")
    for other in (PromptShape(1000, 10), PromptShape(1000, 5, has_history=True)):
        assert gate.min_ratio("weave", 0.02, other).ratio != 0.15, "none like it was asked"
    (table,) = weave.library.kv.worth.evidence.tables()
    works = [cell.work for cell in table.cells]
    assert works == sorted(works), "the first way that is tried pays for nothing that others take"
    assert calibration_of(weave).wait(10.0)
    progress = weave.kv_progress()
    assert progress is not None
    assert progress.state == "ready"
    assert "fused at 15%" in progress_text(progress)
    view = quality_of(weave, over_library=True)
    assert {line.strategy: line.ratio for line in view.gate}["weave"] == 0.15


@pytest.fixture
def in_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Weave]]:
    """Opens a knowledge base of a model in bfloat16, with logits so many times as large, whose
    weights have a table in float32."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:

        def open_with(logits: float) -> Weave:
            folder = make_folder(tmp_path / "model", logits=logits)
            exact, half = load_model(folder), load_model(folder, "bfloat16")
            World(tmp_path / "kb", *exact).calibrate(
                ("weave", 0.3, 0.01), kind="document", num_questions=250
            )
            World(tmp_path / "kb", *half).set_machine()
            weave = stack.enter_context(opened(tmp_path / "kb", half, BACKGROUND))
            weave.ingest(*TEXTS)
            weave.library.start()
            return weave

        yield open_with


def test_tables_in_float32_count_for_a_half_type_once_its_rounding_was_measured(
    in_half: Callable[[float], Weave],
) -> None:
    weave = in_half(1.0)
    first = weave.ask("How do I drain a node?", reuse="auto", sampling=GREEDY)
    assert first.explain is not None
    assert first.explain.why == Reason.CALIBRATING
    evidence = weave.library.kv.worth.evidence
    until(lambda: evidence.is_rounding_small)
    assert state_of(weave).asked >= NOISE_QUESTIONS
    assert state_of(weave)[3:] == ("weave", 0.3, "")
    assert weave.library.maker.wait(60.0)
    fused = 0
    for question in (text[:40] for _, text in TEXTS[20:26]):
        answer = weave.ask(question, reuse="auto", sampling=GREEDY)
        assert answer.explain is not None
        assert answer.decision is not None
        if answer.explain.strategy == "weave":
            assert answer.explain.ratio == 0.3
            assert answer.decision.plan.evidence == "250 document questions, 0 chunks"
            fused += 1
    assert fused >= 3, "others have come back, and are exact"


def test_tables_in_float32_do_not_count_where_rounding_costs_too_much(
    in_half: Callable[[float], Weave],
) -> None:
    weave = in_half(100.0)
    assert calibration_of(weave).wait(120.0)
    state = state_of(weave)
    assert (state.state, state.asked, state.ratio) == ("shut", NOISE_QUESTIONS, None)
    assert "rounding alone" in state.why
    until(lambda: (p := weave.kv_progress()) is not None and p.state == "unused")
    answer = weave.ask("How do I drain a node?", reuse="auto", sampling=GREEDY)
    assert answer.explain is not None
    assert answer.explain.ratio == 0.0


def test_nothing_is_asked_where_nothing_less_is_tried(
    calibrated: Callable[[float], Weave],
) -> None:
    assert calibrated(0.15)._target.calibration is None


def test_nothing_is_asked_where_that_was_switched_off(tmp_path: Path, certain: Model) -> None:
    with opened(tmp_path / "kb", certain, BackgroundKV(bound=0.02)) as weave:
        assert weave._target.calibration is None
