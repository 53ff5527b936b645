"""Grids are exact where measured, sane elsewhere, and follow what happens."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import ConfigError
from kvweave.plan.loading_cost import PaidShares
from kvweave.plan.profile import (
    FARTHEST,
    GAIN,
    Grid,
    MachineProfile,
    TierLink,
    load_profile,
)

XS, YS = (0, 128, 512), (32, 64, 256)


def seconds(x: int, y: int) -> float:
    return 0.01 + 0.001 * y + 1e-6 * x * y


def make_grid() -> Grid:
    return Grid(XS, YS, [[seconds(x, y) for y in YS] for x in XS])


@pytest.mark.parametrize("x", XS)
@pytest.mark.parametrize("y", YS)
def test_at_a_measured_point_the_measurement_is_returned(x: int, y: int) -> None:
    assert make_grid().at(x, y) == pytest.approx(seconds(x, y))


def test_between_points_a_bilinear_function_is_met_exactly() -> None:
    assert make_grid().at(300, 100) == pytest.approx(seconds(300, 100))


def test_nothing_to_compute_costs_nothing() -> None:
    assert make_grid().at(100, 0) == 0.0


def test_beyond_the_grid_new_tokens_go_on_along_the_slope_and_cached_ones_stop() -> None:
    grid = make_grid()
    assert grid.at(0, 512) == pytest.approx(seconds(0, 512))
    assert grid.at(10_000, 64) == grid.at(512, 64)
    assert grid.at(0, 1) == grid.at(0, 32)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_more_new_tokens_never_cost_less(x: int, y: int, more: int) -> None:
    grid = make_grid()
    assert grid.at(x, y + more) >= grid.at(x, y) - 1e-12


@pytest.mark.parametrize("last_s", [0.9, 1.0, 1.01])
def test_a_noisy_last_step_is_not_taken_as_flat(last_s: float) -> None:
    grid = Grid((0,), (32, 64), [[1.0, last_s]])
    assert grid.at(0, 640) == pytest.approx(last_s * (1 + 0.5 * 9), rel=0.01)


def test_observations_move_the_grid_to_the_truth() -> None:
    grid = make_grid()
    for _ in range(200):
        grid.observe(300, 100, 2 * seconds(300, 100))
    assert grid.at(300, 100) == pytest.approx(2 * seconds(300, 100), rel=0.02)
    assert grid.at(0, 256) <= 2 * seconds(0, 256)


@pytest.mark.parametrize("x", [0, 300, 5000])
@pytest.mark.parametrize("y", [1, 100, 256, 5000])
def test_observations_move_the_grid_at_its_edges_too(x: int, y: int) -> None:
    grid = make_grid()
    want = 3 * grid.at(x, y)
    for _ in range(400):
        grid.observe(x, y, want)
    assert grid.at(x, y) == pytest.approx(want, rel=0.05)


def test_one_outlier_moves_little() -> None:
    grid = make_grid()
    grid.observe(128, 64, 1.5 * seconds(128, 64))
    assert grid.at(128, 64) == pytest.approx(1.5**0.25 * seconds(128, 64))
    for stalled in (100.0, 0.001):
        grid = make_grid()
        grid.observe(128, 64, stalled * seconds(128, 64))
        assert 0.6 < grid.at(128, 64) / seconds(128, 64) < 1.6


@pytest.mark.parametrize("off", [10.0, 0.1])
def test_a_grid_that_is_ten_times_off_is_back_within_a_dozen_answers_all_of_it(off: float) -> None:
    grid = make_grid()
    grid.scale(off)
    for _ in range(12):
        grid.observe(128, 64, seconds(128, 64))
    assert grid.at(128, 64) == pytest.approx(seconds(128, 64), rel=0.3)
    assert 0.6 < grid.at(500, 256) / seconds(500, 256) < 1.6, "though never observed there"


def test_places_that_are_off_in_opposite_ways_both_come_to_the_truth() -> None:
    grid = make_grid()
    for _ in range(200):
        grid.observe(0, 32, 0.5 * seconds(0, 32))
        grid.observe(512, 256, 2 * seconds(512, 256))
    assert grid.at(0, 32) == pytest.approx(0.5 * seconds(0, 32), rel=0.15)
    assert grid.at(512, 256) == pytest.approx(2 * seconds(512, 256), rel=0.15)
    assert 0.7 < grid.at(128, 64) / seconds(128, 64) < 1.4, "between them little changed"


@given(st.floats(0.05, 20), st.integers(0, 600), st.integers(1, 2000))
def test_an_observation_never_moves_the_price_past_what_was_observed(
    error: float, x: int, y: int
) -> None:
    grid = make_grid()
    before, want = grid.at(x, y), error * grid.at(x, y)
    grid.observe(x, y, want)
    low, high = sorted((before, want))
    assert low * (1 - 1e-9) <= grid.at(x, y) <= high * (1 + 1e-9)


def test_a_link_follows_its_transfers_without_their_latency() -> None:
    link = TierLink(1e9, latency_s=0.5)
    for _ in range(100):
        link.observe(1_000_000, 0.501)
    assert link.bytes_per_s == pytest.approx(1e9)
    link.observe(1_000_000, 0.4)  # faster than its latency: says nothing about bandwidth
    assert link.bytes_per_s == pytest.approx(1e9)


def test_a_link_that_got_slow_is_believed_before_one_that_got_fast() -> None:
    slow, fast = TierLink(1e9), TierLink(1e9)
    for _ in range(5):
        slow.observe(1_000_000, 0.01)  # a tenth of its speed
        fast.observe(1_000_000, 0.0001)  # ten times
    assert slow.bytes_per_s < 0.25e9
    assert 1.2e9 < fast.bytes_per_s < 4e9


def test_a_profile_from_before_shares_were_learnt_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    MachineProfile("m", "a CPU", 30, make_grid(), make_grid(), {"disk": TierLink(5e8)}).save(path)
    saved = json.loads(path.read_text())
    del saved["links"]["disk"]["paid"], saved["links"]["disk"]["paid_beside"]
    path.write_text(json.dumps(saved))
    assert load_profile(path).links["disk"] == TierLink(5e8)


@pytest.mark.parametrize("name", ["paid", "paid_beside"])
@pytest.mark.parametrize("paid", [([-1.0], 0.0), ([math.nan], 0.0), ([1.0], math.nan)])
def test_a_share_or_a_time_that_is_no_number_is_named(
    tmp_path: Path, paid: tuple[list[float], float], name: str
) -> None:
    path = tmp_path / "profile.json"
    links = {"disk": replace(TierLink(5e8), **{name: PaidShares(*paid)})}
    MachineProfile("m", "a CPU", 30, make_grid(), make_grid(), links).save(path)
    with pytest.raises(ConfigError, match="share of loading"):
        load_profile(path)


def test_a_saved_profile_comes_back(tmp_path: Path) -> None:
    alone, beside = PaidShares([1.5, 0.25], 99.0), PaidShares([2.0], 98.0)
    links = {
        "disk": TierLink(5e8, 1e-4),
        "disk/int8": TierLink(3e8, paid=alone, paid_beside=beside),
    }
    profile = MachineProfile("m", "a CPU", 30, make_grid(), make_grid(), links)
    profile.relation, profile.measured_s, profile.unpriced_s = 1.4, 5.0, 0.002
    profile.saw_exact(0, 256, 1.0)
    profile.saw_fused(512, 64, 0.5)
    profile.save(tmp_path / "profile.json")
    back = load_profile(tmp_path / "profile.json")
    assert back == profile
    assert back.link("disk/int8") == links["disk/int8"]
    assert back.link("disk/raw") == links["disk"]
    assert back.link("redis") is None


def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"model": "m"}))
    with pytest.raises(ConfigError, match=r"p\.json is not a machine profile"):
        load_profile(tmp_path / "p.json")


@pytest.mark.parametrize(("xs", "ys"), [((), (1,)), ((4, 2), (1,)), ((0,), (1, 1))])
def test_a_grid_whose_axes_do_not_rise_is_refused(xs: tuple[int, ...], ys: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must rise"):
        Grid(xs, ys, [[1.0] * len(ys)] * len(xs))


@pytest.mark.parametrize(
    "wrong", [{"relation": 0.0}, {"relation": math.inf}, {"measured_s": -1}, {"heard": {"told": 3}}]
)
def test_what_answers_taught_must_be_numbers_too(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    MachineProfile("m", "a CPU", 30, make_grid(), make_grid()).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ConfigError, match=r"p\.json is not a machine profile"):
        load_profile(path)


# ---- what one kind of answer says of the other's price


def make_profile(prefill: float = 1.0, recompute: float = 1.0) -> MachineProfile:
    """A machine on which a token takes 1 ms either way, measured so many times too slow."""
    grids = [
        Grid((0, 2048), (16, 1024), [[s * 0.016, s * 1.024] for _ in range(2)])
        for s in (prefill, recompute)
    ]
    return MachineProfile("m", "cpu", 30, *grids)


def test_a_stall_beside_the_rows_of_a_fused_answer_counts_as_a_few_times_its_price() -> None:
    profile = make_profile()
    profile.saw_unpriced(60.0, 0.1)
    assert profile.unpriced_s == pytest.approx(GAIN * FARTHEST * 0.1)
    for _ in range(40):
        profile.saw_unpriced(-0.01, 0.1)  # less than its price: nothing that is not priced
    assert profile.unpriced_s < 1e-5


@pytest.mark.parametrize("off", [10.0, 0.1])
def test_exact_answers_bring_back_prices_of_recomputing_that_no_fused_one_told_of(
    off: float,
) -> None:
    profile = make_profile(recompute=off)
    for _ in range(12):
        profile.saw_exact(32, 2000, 2.0)
    assert profile.recompute.at(2048, 300) == pytest.approx(0.3, rel=0.55)


def test_fused_answers_bring_down_prices_of_prefill_that_no_exact_one_told_of() -> None:
    profile = make_profile(prefill=10.0, recompute=10.0)  # busy from first to last run
    for _ in range(20):
        profile.saw_fused(2000, 300, 0.3)
    assert profile.recompute.at(2000, 300) == pytest.approx(0.3, rel=0.2)
    assert profile.prefill.at(0, 2000) == pytest.approx(2.0, rel=0.6)


def test_an_exact_answer_now_and_then_does_not_leave_prefill_too_dear() -> None:
    profile = make_profile(prefill=10.0, recompute=10.0)
    profile.saw_exact(0, 200, 0.2)
    for _ in range(60):
        profile.saw_fused(2000, 300, 0.3)
    assert profile.prefill.at(0, 2000) < 7.0, "it was 20 s"


def test_fused_answers_alone_make_prefill_no_dearer() -> None:
    """Whether the machine or fusing got slow is for an exact answer to tell."""
    profile = make_profile()
    for _ in range(20):
        profile.saw_fused(2000, 300, 3.0)
    assert profile.recompute.at(2000, 300) == pytest.approx(3.0, rel=0.2)
    assert profile.prefill.at(0, 2000) == pytest.approx(2.0)


def test_prices_that_fused_answers_told_of_lately_do_not_follow() -> None:
    profile = make_profile()
    for _ in range(60):
        profile.saw_exact(0, 1000, 1.0)
        profile.saw_fused(2000, 300, 1.5)  # recomputing is slow here, five times
    assert profile.recompute.at(2000, 300) == pytest.approx(1.5, rel=0.1)
    assert profile.relation == pytest.approx(5.0, rel=0.1)


def test_a_machine_whose_relation_is_known_keeps_it_when_all_of_it_gets_faster() -> None:
    profile = make_profile(recompute=5.0)
    profile.relation = 5.0
    for _ in range(30):
        profile.saw_exact(0, 1000, 0.1)
    assert 0.1 < profile.recompute.at(2000, 300) < 0.3, "it was 1.5 s"


def test_a_new_measurement_takes_the_place_of_prices_but_not_of_tiers() -> None:
    old, new = make_profile(10.0, 10.0), make_profile()
    old.links = {"host": TierLink(1.0), "disk": TierLink(5e8)}
    new.links, new.measured_s = {"host": TierLink(1e10)}, 9.0
    old.saw_exact(0, 1000, 1.0)
    old.renew(new)
    assert (old.prefill, old.recompute) == (new.prefill, new.recompute)
    assert (old.measured_s, old.heard.exact) == (9.0, 0)
    assert (old.links["host"].bytes_per_s, old.links["disk"].bytes_per_s) == (1e10, 5e8)


def test_a_relation_that_no_fused_answer_confirms_is_forgotten() -> None:
    """A fused way that was slow once must not be shut out for good."""
    profile = make_profile(recompute=5.0)
    profile.relation = 5.0
    for _ in range(1000):
        profile.saw_exact(0, 1000, 1.0)
    assert profile.relation < 1.5
    assert profile.recompute.at(2000, 300) < 0.8, "it was 1.5 s"


def test_threads_that_save_at_once_leave_one_whole_profile(tmp_path: Path) -> None:
    """They wrote the same temporary file: one of them did not find it any more."""
    path = tmp_path / "profile.json"
    profile = MachineProfile("m", "a CPU", 30, make_grid(), make_grid(), {"disk": TierLink(5e8)})
    with ThreadPoolExecutor(8) as threads:
        for saved in [threads.submit(profile.save, path) for _ in range(200)]:
            saved.result()
    assert load_profile(path).links == profile.links
    assert list(tmp_path.iterdir()) == [path]
