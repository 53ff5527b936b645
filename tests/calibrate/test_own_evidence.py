"""Evidence of a knowledge base's own documents: what is asked next, and when enough was."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.calibrate.gate import MADE_ALONE, Cell, choose, worst_cells
from kvweave.calibrate.measure import Outcome
from kvweave.calibrate.own_evidence import (
    CANDIDATES,
    LOOKS,
    NOISE_QUESTIONS,
    RATIOS,
    SCREEN_QUESTIONS,
    SCREEN_RATIO,
    AnsweredQuestion,
    EvidenceSubject,
    OwnEvidence,
    SettingName,
    _chance_of,
)
from kvweave.calibrate.trials import TrialScore

SUBJECT = EvidenceSubject("revision", "bfloat16", "filler:4", "context", "preamble", 12, "int8")
BOUND = 0.02  # that answers are held to
SET = BOUND / MADE_ALONE  # that is set: made questions are held to less


def make_answer(
    evidence: OwnEvidence,
    kl: dict[float, float],
    *,
    best: str = "weave-deep",
    flips: bool = False,
    margin: float = 3.0,
    noise: float = 1e-4,
    spread: float = 0.2,
) -> AnsweredQuestion:
    """What one question gave: `kl` by ratio, twice as much for all candidates but `best`."""
    settings, checks_noise = evidence.next_settings()
    rng = random.Random(evidence.num_answered)
    outcomes = {}
    for name in settings:
        times = (1.0 if name.strategy == best else 2.0) * (1 + spread * (rng.random() - 0.5))
        cost = kl[name.ratio] * times
        score = TrialScore(cost, cost, cost, 1.0, 1.0, flips, 0.0, margin)
        outcomes[name] = Outcome(score, 0.0, name.ratio + 0.1, None)
    return AnsweredQuestion(1000, 5, 900, noise if checks_noise else None, outcomes)


def fill(evidence: OwnEvidence, questions: int, kl: dict[float, float], **how: object) -> None:
    for _ in range(questions):
        evidence.add(make_answer(evidence, kl, **how))  # type: ignore[arg-type]


GOOD = {0.15: 0.03, 0.25: 0.015, 0.3: 0.012, 0.35: 0.01, 0.5: 0.004}
BAD = {0.15: 0.5, 0.25: 0.4, 0.3: 0.35, 0.35: 0.3, 0.5: 0.2}


ALLOWED = Cell("weave", 0.35, 0.5, 0.01, 0.008, 0.012, 0.02, 0.1, 0.0, 1.0, 0.0)


def test_where_something_is_let_through_only_less_of_it_is_tried() -> None:
    evidence = OwnEvidence(SUBJECT, SET, allowed=ALLOWED)
    assert evidence.next_settings() == ((("weave", 0.15), ("weave", 0.25)), False)
    assert evidence.state() == ("measuring", 0, LOOKS[-1], "weave", 0.35, "")
    least = OwnEvidence(SUBJECT, SET, allowed=replace(ALLOWED, ratio=RATIOS[0]))
    assert least.is_over, "nothing that is tried is less"
    wants_more = OwnEvidence(SUBJECT, SET, allowed=replace(ALLOWED, strategy="qcfuse"))
    assert wants_more.is_over, "it reads more than chunk KV, which nobody has made here"


def test_less_is_let_through_from_a_hundred_questions_on() -> None:
    evidence = OwnEvidence(SUBJECT, SET, allowed=ALLOWED)
    fill(evidence, LOOKS[1], GOOD, best="weave")
    assert evidence.tables() == (), "few questions take nothing back that many have shown"
    assert evidence.state()[3:5] == ("weave", 0.35)
    fill(evidence, LOOKS[2] - LOOKS[1], GOOD, best="weave")
    assert evidence.state()[0] == "open"
    assert evidence.state()[3:] == ("weave", 0.25, "")
    (table,) = evidence.tables()
    assert [cell.ratio for cell in table.cells] == [0.25], "0.15 costs too much"
    assert evidence.is_over, "and that is sure"


def test_what_may_still_be_cheaper_is_asked_for_until_the_last_look() -> None:
    evidence = OwnEvidence(SUBJECT, SET, allowed=ALLOWED)
    close = {**GOOD, 0.15: BOUND}
    fill(evidence, LOOKS[2], close, best="weave", spread=1.5)
    assert evidence.state().ratio == 0.25
    assert not evidence.is_over
    fill(evidence, LOOKS[3] - LOOKS[2], close, best="weave", spread=1.5)
    assert evidence.is_over


@pytest.mark.parametrize(
    ("kl", "how", "why"), [(BAD, {}, "still costs"), (GOOD, {"margin": 0.01}, "too close to call")]
)
def test_what_was_let_through_stays_where_no_less_is_enough(
    kl: dict[float, float], how: dict[str, object], why: str
) -> None:
    evidence = OwnEvidence(SUBJECT, SET, allowed=ALLOWED)
    fill(evidence, LOOKS[0], kl, best="weave", **how)
    state = evidence.state()
    assert evidence.is_over, "at the first look"
    assert (state.state, state.strategy, state.ratio) == ("open", "weave", 0.35)
    assert why in state.why
    assert evidence.tables() == ()


def test_fewer_rows_with_more_close_calls_are_not_taken() -> None:
    """`margin` is below the lead of a close call in every other question: they are computed in
    full besides."""
    evidence = OwnEvidence(SUBJECT, SET, allowed=ALLOWED)
    for number in range(LOOKS[2]):
        margin = 3.0 if number % 2 else 0.01
        fill(evidence, 1, GOOD, best="weave", margin=margin)
    assert choose(evidence._table().cells, BOUND) is not None  # type: ignore[union-attr]
    assert evidence.tables() == ()


def make_noise(evidence: OwnEvidence, noises: Iterable[float]) -> None:
    for noise in noises:
        assert evidence.next_settings() == ((), True), "everything recomputed, and no more"
        evidence.add(AnsweredQuestion(1000, 5, 900, noise, {}))


def test_lent_tables_count_once_rounding_is_surely_small(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    evidence = OwnEvidence(SUBJECT, BOUND, path, ALLOWED, is_beside=True, is_lent=True)
    make_noise(evidence, [5e-4] * (NOISE_QUESTIONS - 1))
    assert (evidence.is_rounding_small, evidence.allowed, evidence.look) == (False, None, 0)
    assert evidence.state()[:5] == ("measuring", 23, 24 + 8 + 200, None, None)
    make_noise(evidence, [5e-4])
    assert (evidence.is_rounding_small, evidence.allowed) == (True, ALLOWED)
    assert evidence.look > 0, "gates look anew"
    assert evidence.state()[3:5] == ("weave", 0.35)
    assert evidence.next_settings()[0][0] == ("weave", 0.15), "and perhaps less is enough"
    again = OwnEvidence(SUBJECT, BOUND, path, ALLOWED, is_beside=True, is_lent=True)
    assert (again.is_rounding_small, again.state()) == (True, evidence.state())


@pytest.mark.parametrize(
    ("noises", "state"),
    [
        ([0.003] * NOISE_QUESTIONS, "shut"),
        ([math.nan] * NOISE_QUESTIONS, "shut"),
        # on average a tenth of the bound is not reached; one question in eight says that more
        # questions may well reach it: what is fused is measured by itself then
        ([0.009, *[0.0006] * 7] * 3, "measuring"),
    ],
)
def test_lent_tables_do_not_count_where_rounding_may_be_too_much(
    noises: list[float], state: str
) -> None:
    evidence = OwnEvidence(SUBJECT, BOUND, None, ALLOWED, is_beside=True, is_lent=True)
    make_noise(evidence, noises)
    assert (evidence.is_rounding_small, evidence.allowed) == (False, None)
    assert evidence.state().state == state
    assert evidence.is_over == (state == "shut")
    assert evidence.next_settings()[0][0] == (CANDIDATES[0], SCREEN_RATIO), "as without tables"


def test_the_candidate_that_cost_least_in_the_screening_is_measured() -> None:
    evidence = OwnEvidence(SUBJECT, SET)
    settings, checks_noise = evidence.next_settings()
    assert settings == tuple(SettingName(name, SCREEN_RATIO) for name in CANDIDATES)
    assert not checks_noise
    fill(evidence, SCREEN_QUESTIONS, GOOD, best="weave-through")
    settings, checks_noise = evidence.next_settings()
    assert settings == tuple(SettingName("weave-through", ratio) for ratio in RATIOS)
    assert checks_noise
    assert evidence.tables() == (), "the screening chose; it counts for nothing else"


def test_the_gate_opens_after_the_first_look_and_more_is_asked_until_it_decides_alone() -> None:
    evidence = OwnEvidence(SUBJECT, SET)
    fill(evidence, SCREEN_QUESTIONS + LOOKS[0] - 1, GOOD)
    assert evidence.state().state == "measuring"
    fill(evidence, 1, GOOD)
    state = evidence.state()
    assert (state.state, state.strategy) == ("open", "weave-deep")
    assert state.ratio in RATIOS
    assert not evidence.is_over, "24 questions open it, and say little"
    (table,) = evidence.tables()
    assert (table.num_questions, table.kind, table.num_chunks) == (24, "own", 5)
    fill(evidence, LOOKS[2] - LOOKS[0], GOOD)
    assert evidence.is_over
    (table,) = evidence.tables()
    assert table.num_questions == 100


@pytest.mark.parametrize(
    ("kl", "how", "why"),
    [
        (BAD, {}, "still costs"),
        (GOOD, {"margin": 0.01}, "too close to call"),
        (GOOD, {"noise": 0.01}, "rounding alone"),
        (GOOD, {"flips": True}, "still costs"),
    ],
)
def test_what_cannot_come_within_the_bound_is_given_up_at_the_first_look(
    kl: dict[float, float], how: dict[str, object], why: str
) -> None:
    evidence = OwnEvidence(SUBJECT, SET)
    fill(evidence, SCREEN_QUESTIONS + LOOKS[0], kl, **how)
    state = evidence.state()
    assert (state.state, state.ratio) == ("shut", None)
    assert choose(worst_cells(evidence.tables()), BOUND) is None, "the gate says the same"
    assert why in state.why
    assert evidence.is_over


def test_what_stays_undecided_is_shut_in_the_end() -> None:
    evidence = OwnEvidence(SUBJECT, SET)
    undecided = dict.fromkeys(GOOD, BOUND)
    fill(evidence, SCREEN_QUESTIONS + LOOKS[0], undecided, spread=1.5)
    assert evidence.state().state == "measuring"
    fill(evidence, LOOKS[-1] - LOOKS[0], undecided, spread=1.5)
    assert evidence.state().state == "shut"
    assert evidence.is_over


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "calibration.json"
    path.parent.mkdir()
    evidence = OwnEvidence(SUBJECT, SET, path)
    fill(evidence, SCREEN_QUESTIONS + LOOKS[0] + 3, GOOD)
    again = OwnEvidence(SUBJECT, SET, path)
    assert again.num_answered == evidence.num_answered
    assert again.state() == evidence.state()
    assert again.tables() == evidence.tables()
    assert again.next_settings() == evidence.next_settings()


def test_evidence_of_another_subject_or_a_broken_file_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    fill(OwnEvidence(SUBJECT, SET, path), SCREEN_QUESTIONS, GOOD)
    other = replace(SUBJECT, revision="another")
    assert OwnEvidence(other, SET, path).num_answered == 0
    less = OwnEvidence(SUBJECT, SET, path, ALLOWED)
    fill(less, LOOKS[0], GOOD, best="weave")
    more = replace(ALLOWED, ratio=0.5)
    assert OwnEvidence(SUBJECT, SET, path, more).num_answered == 0, "0.35 was never tried"
    path.write_text('{"format": 1, "subject": ')
    assert OwnEvidence(SUBJECT, SET, path).num_answered == 0


def test_a_lead_without_a_second_choice_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    evidence = OwnEvidence(SUBJECT, SET, path)
    fill(evidence, SCREEN_QUESTIONS + LOOKS[0], GOOD, margin=math.inf)
    assert OwnEvidence(SUBJECT, SET, path).tables() == evidence.tables()


def test_the_chance_of_many_flips_is_that_of_a_binomial() -> None:
    assert _chance_of(0, 24, 0.02) == 1.0
    assert math.isclose(_chance_of(1, 24, 0.02), 1 - 0.98**24)
    assert _chance_of(3, 24, 0.02) > 0.01 > _chance_of(4, 24, 0.02)
