"""Evidence that may be looked at after every answer, and that finds what is there."""

import random

import pytest

from kvweave.app.audit.audit_log import SURE, AuditFigures, evidence_above, evidence_of_flips

BOUND = 0.02


def heavy(rng: random.Random, mean: float) -> float:
    """KL as answers have it: mostly small, now and then large."""
    return rng.lognormvariate(0.0, 1.5) * mean / 3.08  # e^(1.5² / 2)


def is_ever_sure(rng: random.Random, mean: float, looks: int) -> int | None:
    """After how many answers it was found over the bound, looked at after each."""
    kl: list[float] = []
    for n in range(looks):
        kl.append(heavy(rng, mean))
        if evidence_above(kl, BOUND) >= SURE:
            return n + 1
    return None


def test_what_is_within_the_bound_is_hardly_ever_found_over_it_however_often_one_looks() -> None:
    rng = random.Random(1)
    found = sum(is_ever_sure(rng, BOUND, 200) is not None for _ in range(200))
    assert found <= 16  # 10 on average at most


@pytest.mark.parametrize(("times", "most"), [(10.0, 16), (4.0, 40)])
def test_what_is_far_over_the_bound_is_found_soon(times: float, most: int) -> None:
    rng = random.Random(2)
    needed = [is_ever_sure(rng, times * BOUND, 300) or 300 for _ in range(50)]
    assert sorted(needed)[25] <= most


def test_flips_are_found_by_their_share() -> None:
    assert evidence_of_flips(4, 10, 0.02) >= SURE
    assert evidence_of_flips(1, 8, 0.02) < SURE
    assert evidence_of_flips(2, 100, 0.02) < SURE
    rng = random.Random(3)
    wrong = 0
    for _ in range(200):
        flips = 0
        for n in range(1, 301):
            flips += rng.random() < 0.02
            if evidence_of_flips(flips, n, 0.02) >= SURE:
                wrong += 1
                break
    assert wrong <= 16


def test_a_bound_of_nothing_is_no_division_by_it() -> None:
    assert evidence_above([1e-9] * 20, 0.0) < SURE
    assert evidence_above([1e-3] * 20, 0.0) >= SURE


def test_figures_have_an_interval_from_two_answers_on() -> None:
    assert AuditFigures.from_answers([], []).document()["kl"] is None
    assert AuditFigures.from_answers([0.1], [True]).document() == {
        "answers": 1, "kl": 0.1, "kl_low": None, "kl_high": None, "flips": 1,
    }  # fmt: skip
    figures = AuditFigures.from_answers([0.01, 0.03] * 20, [False] * 40)
    assert figures.kl == pytest.approx(0.02)
    assert 0.016 < figures.kl_low < 0.018 < 0.022 < figures.kl_high < 0.024
