"""The gate and its numbers: who is chosen, and what an interval claims."""

from dataclasses import replace

import numpy as np
import pytest

from kvweave.calibrate.answer_scores import exact_match, token_f1
from kvweave.calibrate.bootstrap import Bootstrap
from kvweave.calibrate.gate import Cell, cheapest, choose


def make_cell(strategy: str = "weave", **changes: float) -> Cell:
    cell = Cell(
        strategy,
        ratio=0.15,
        work=0.2,
        kl=0.01,
        kl_low=0.008,
        kl_high=0.012,
        kl_p95=0.03,
        kl_max=0.2,
        flips=0.0,
        top1=0.98,
        nll_gap=0.01,
    )
    return replace(cell, **changes)  # type: ignore[arg-type]


def test_the_cheapest_within_the_bound_is_chosen() -> None:
    cells = [
        make_cell("dear", work=0.5),
        make_cell("cheap", work=0.1),
        make_cell("bad", work=0.01, kl=0.1, kl_high=0.2),
    ]
    chosen = choose(cells, 0.02)
    assert chosen is not None
    assert chosen.strategy == "cheap"


def test_the_upper_end_of_the_interval_decides_not_the_mean() -> None:
    assert choose([make_cell(kl=0.019, kl_high=0.021)], 0.02) is None
    assert choose([make_cell(kl=0.019, kl_high=0.02)], 0.02) is not None


def test_flipping_first_tokens_is_out_whatever_the_mean() -> None:
    assert choose([make_cell(flips=0.03)], 0.02) is None
    assert choose([make_cell(flips=0.02)], 0.02) is not None


def test_what_costs_as_much_as_full_prefill_is_no_shortcut() -> None:
    assert choose([make_cell(work=1.0)], 0.02) is None


def test_of_several_encodings_the_least_work_wins_then_the_lower_kl() -> None:
    dear, near, far = make_cell(work=0.3, kl=0.0), make_cell(kl=0.004), make_cell(kl=0.009)
    assert cheapest({"isolated": dear, "filler:4": far, "neighbours:3": near}) == "neighbours:3"
    assert cheapest({"isolated": dear, "filler:4": None}) == "isolated"
    assert cheapest({"isolated": None, "filler:4": None}) is None


def test_the_planners_own_price_decides_the_order() -> None:
    cells = [make_cell("a", work=0.1), make_cell("b", work=0.3)]
    seconds = {"a": 0.9, "b": 0.4}
    chosen = choose(cells, 0.02, cost=lambda cell: seconds[cell.strategy], exact_cost=0.8)
    assert chosen is not None
    assert chosen.strategy == "b"
    assert choose(cells, 0.02, cost=lambda cell: seconds[cell.strategy], exact_cost=0.4) is None


def test_equal_prices_go_to_the_lower_kl() -> None:
    chosen = choose([make_cell("a", kl=0.011), make_cell("b", kl=0.009)], 0.02)
    assert chosen is not None
    assert chosen.strategy == "b"


def test_nothing_measured_means_exact() -> None:
    assert choose([], 0.02) is None


def test_an_interval_holds_the_mean_and_narrows_with_questions() -> None:
    rng = np.random.default_rng(3)
    few, many = (Bootstrap(n).mean(rng.exponential(1.0, n)) for n in (20, 500))
    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 2
    flat = Bootstrap(5).mean(np.full(5, 0.25))
    assert flat == pytest.approx((0.25, 0.25, 0.25))


def test_a_difference_is_paired() -> None:
    """Questions differ a hundred times more than strategies do; pairing sees through that."""
    rng = np.random.default_rng(4)
    hard = rng.exponential(10.0, 50)
    found = Bootstrap(50).difference(hard + 0.1, hard)
    assert found == pytest.approx((0.1, 0.1, 0.1))


def test_recovery_is_a_ratio_of_means() -> None:
    boot = Bootstrap(2)
    found = boot.recovered(np.array([1.0, 0.0]), np.array([1.0, 3.0]))
    assert found is not None
    assert found.mean == 0.75
    assert boot.recovered(np.zeros(2), np.zeros(2)) is None


def test_scores_forgive_case_punctuation_and_articles() -> None:
    assert exact_match("The Moon.", ["sun", "moon"]) == 1.0
    assert token_f1("the pale moon", ["moon"]) == pytest.approx(2 / 3)
    assert token_f1("sun", ["moon"]) == 0.0
