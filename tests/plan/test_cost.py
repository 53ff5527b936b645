"""Prices follow the layer-by-layer pipeline they stand for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.plan.cost import CostModel, StrategyInfo, row_budget
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from worlds.plan import price_fused

EPIC = StrategyInfo("epic")


def make_costs(
    layers: int = 10,
    bytes_per_s: float = 1e6,
    token_s: float = 0.001,
    latency_s: float = 0.0,
    pending: int = 0,
) -> CostModel:
    """Every token costs the same, cached or not: easy to check by hand."""
    grid = Grid((0,), (1, 1000), [[token_s, 1000 * token_s]])
    links = {"disk": TierLink(bytes_per_s, latency_s), "host": TierLink(1e12)}
    profile = MachineProfile("m", "test", layers, grid, grid, links)
    return CostModel(profile, {"disk": pending}, {"disk": 0.0})


def loop(
    layers: int,
    start: float,
    ready: float,
    layer_bytes: list[float],
    bw: float,
    lat: float,
    c: float,
) -> float:
    done = start
    for layer in range(layers):
        if layer_bytes[layer]:
            ready += lat + layer_bytes[layer] / bw
            done = max(done, ready)
        done += c
    return done


@given(
    layers=st.integers(1, 40),
    size=st.integers(1, 10**8),
    rows=st.integers(1, 2000),
    latency=st.floats(0, 0.1),
    pending=st.integers(0, 10**7),
)
def test_three_lines_equal_the_loop_over_layers(
    layers: int, size: int, rows: int, latency: float, pending: int
) -> None:
    costs = make_costs(layers, 1e7, 0.001, latency, pending)
    c = 0.001 * rows / layers
    price = price_fused(costs, EPIC, rows, 4000, 1, 1000, {"disk": size})
    expected = loop(layers, 0.0, pending / 1e7, [size / layers] * layers, 1e7, latency, c)
    assert price.seconds == pytest.approx(expected, rel=1e-6)


def test_full_prefill_loads_nothing() -> None:
    assert make_costs(bytes_per_s=1.0).full(500).seconds == pytest.approx(0.5)


def test_a_fast_link_is_hidden_and_a_slow_one_is_named() -> None:
    assert make_costs(bytes_per_s=1e9).prefix(500, 1000, {"disk": 1000}).waits_for is None
    slow = make_costs(bytes_per_s=1e3).prefix(500, 1000, {"disk": 10_000})
    assert slow.waits_for == "disk"
    assert slow.seconds == pytest.approx(10 + 0.05)


def test_bytes_others_wait_for_come_first() -> None:
    assert make_costs(pending=10**6).prefix(500, 1000, {"disk": 10}).seconds > 1.0


def test_a_probe_and_its_evidence_delay_the_start() -> None:
    costs = make_costs(bytes_per_s=1e6)
    loads = {"disk": 1000}
    plain = price_fused(costs, EPIC, 100, 1000, 50, 800, loads).seconds
    probing = StrategyInfo("q", probe_layers=5)
    assert price_fused(costs, probing, 100, 1000, 50, 800, loads).seconds == pytest.approx(
        plain + 0.025, abs=2e-4
    )
    looking = StrategyInfo("f", selection_bytes_per_token=1000.0)
    assert price_fused(costs, looking, 100, 1000, 50, 800, loads).seconds == pytest.approx(
        0.8 + 0.1, abs=2e-4
    )
    scoring = StrategyInfo("s", score_s_per_token=0.001)
    assert price_fused(costs, scoring, 100, 1000, 50, 800, loads).seconds == pytest.approx(
        plain + 0.8, abs=2e-4
    )


def test_a_full_view_loses_the_overlap() -> None:
    """What the papers see: on a slow link the difference is the whole fused compute."""
    costs = make_costs(bytes_per_s=1e6)
    loads = {"disk": 900_000}
    overlapped = price_fused(costs, EPIC, 500, 1000, 10, 800, loads).seconds
    waiting = price_fused(
        costs, StrategyInfo("p", waits_for_all=True), 500, 1000, 10, 800, loads
    ).seconds
    assert waiting == pytest.approx(0.9 + 0.5)
    full_view = StrategyInfo("p", waits_for_all=True)
    assert price_fused(costs, full_view, 500, 1000, 10, 800, loads).waits_for == "disk"
    assert overlapped < waiting - 0.3


def test_selection_inside_the_pass_pays_for_whole_layers() -> None:
    costs = make_costs(layers=10)
    plain = price_fused(costs, EPIC, 100, 1000, 10, 800, {}).seconds
    blend = price_fused(
        costs, StrategyInfo("b", full_width_layers=1.3), 100, 1000, 10, 800, {}
    ).seconds
    assert blend == pytest.approx(plain + 0.13)


def test_a_ratio_is_at_least_one_row_and_at_most_all() -> None:
    assert [
        row_budget(h, r) for h, r in ((0, 0.5), (10, 0.0), (10, 1e-9), (10, 0.3), (10, 1.0))
    ] == [
        0,
        0,
        1,
        3,
        10,
    ]


def test_break_even_of_the_reference() -> None:
    """Full 1 s for 10,240 tokens; 1.47 GB of KV: 10 GB/s is enough for fusion, 0.5 GB/s is not."""
    for bytes_per_s, wins in ((1e10, True), (3e9, True), (5e8, False)):
        grid = Grid((0,), (1, 10_240), [[1e-4, 1.0]])
        profile = MachineProfile("m", "t", 36, grid, grid, {"disk": TierLink(bytes_per_s)})
        fused = price_fused(
            CostModel(profile), EPIC, 3072 + 64, 10_304, 64, 10_240, {"disk": 1_470_000_000}
        )
        assert (fused.seconds < CostModel(profile).full(10_304).seconds) is wins


def test_what_comes_ahead_of_the_layers_is_counted_once() -> None:
    costs = replace(make_costs(bytes_per_s=1e6), shares={"disk": 0.0})
    ahead = StrategyInfo("a", extra_bytes_per_token=100.0)  # 80,000 of the bytes that are loaded
    loads = {"disk": 900_000}
    plain = price_fused(costs, EPIC, 100, 1000, 10, 800, loads).seconds
    assert price_fused(costs, ahead, 100, 1000, 10, 800, loads).seconds == pytest.approx(plain)
    assert plain == pytest.approx(0.9 + 0.1 / costs.profile.num_layers)
