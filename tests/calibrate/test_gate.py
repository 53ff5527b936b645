"""The gate and its numbers: who is chosen, and what an interval claims."""

from dataclasses import replace

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


def test_equal_prices_go_to_the_lower_kl() -> None:
    chosen = choose([make_cell("a", kl=0.011), make_cell("b", kl=0.009)], 0.02)
    assert chosen is not None
    assert chosen.strategy == "b"


def test_nothing_measured_means_exact() -> None:
    assert choose([], 0.02) is None
