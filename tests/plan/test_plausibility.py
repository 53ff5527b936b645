"""A profile that was measured on a busy machine is found out, in words, and put right."""

import pytest

from kvweave.plan.plausibility import correct, find_doubts, relation_of
from kvweave.plan.profile import Grid, MachineProfile, TierLink

CACHED, NEW = (0, 512, 2048), (16, 64, 256, 1024)
PROMPTS, ROWS = (512, 2048), (32, 128, 384)


def row_s(x: int) -> float:
    return 0.002 + 2e-7 * x


def make_profile(relation: float = 1.2, device: str = "cpu, 2 threads") -> MachineProfile:
    """SmolLM2 on two cores, about."""
    prefill = Grid(CACHED, NEW, [[0.02 + y * row_s(x + y // 2) for y in NEW] for x in CACHED])
    recompute = [[relation * (0.02 + y * row_s(x)) for y in ROWS] for x in PROMPTS]
    links = {"host": TierLink(9e9)}
    return MachineProfile("m", device, 30, prefill, Grid(PROMPTS, ROWS, recompute), links, 1e-4)


def only(profile: MachineProfile) -> str:
    (doubt,) = find_doubts(profile)
    return doubt


@pytest.mark.parametrize("relation", [0.5, 1.0, 2.0])
def test_nothing_is_said_of_a_machine_that_can_be(relation: float) -> None:
    profile = make_profile(relation)
    assert find_doubts(profile) == []
    assert relation_of(profile) == pytest.approx(relation, rel=0.1)


@pytest.mark.parametrize(("relation", "words"), [(10.0, "times what"), (0.1, "1/1")])
def test_recomputing_that_costs_another_order_of_magnitude_than_prefill_is_doubted(
    relation: float, words: str
) -> None:
    doubt = only(make_profile(relation))
    assert doubt.startswith("recomputing ")
    assert words in doubt


def test_one_point_that_met_other_work_is_enough() -> None:
    profile = make_profile()
    profile.recompute.seconds[1][0] = 4.3  # 32 rows of 2,048
    assert any("recomputing 32 rows of 2,048 took" in doubt for doubt in find_doubts(profile))


def test_answers_of_both_kinds_overrule_what_is_usual() -> None:
    profile = make_profile(10.0)
    profile.heard.exact = profile.heard.fused = 3
    assert find_doubts(profile) == []


def test_more_rows_that_cost_less_are_doubted() -> None:
    profile = make_profile()
    profile.prefill.seconds[0][1] = 3 * profile.prefill.seconds[0][2]
    assert "prefill 256 rows was cheaper" in find_doubts(profile)[0]


def test_a_small_pass_as_dear_as_a_large_one_is_doubted_on_a_cpu_alone() -> None:
    """A GPU takes for a few rows what it takes to start a pass."""
    for device, is_doubted in (("cpu, 2 threads", True), ("NVIDIA H200", False)):
        profile = make_profile(device=device)
        profile.prefill.seconds[0] = [2.0, 2.0, 2.0, 2.2]
        found = [doubt for doubt in find_doubts(profile) if "16 tokens took" in doubt]
        assert bool(found) == is_doubted


def test_a_row_of_a_large_pass_that_costs_far_more_than_one_of_a_small_is_doubted() -> None:
    profile = make_profile()
    profile.prefill.seconds[0] = [0.01, 0.1, 2.0, 9.0]
    assert any("one among 16 only" in doubt for doubt in find_doubts(profile))


def test_samples_that_lie_far_apart_are_doubted() -> None:
    profile = make_profile()
    profile.spread = 2.4
    assert "busy: a run took 2.4 times" in only(profile)


@pytest.mark.parametrize("speed", [1e7, 1e14])
def test_host_memory_that_no_machine_has_is_doubted(speed: float) -> None:
    profile = make_profile()
    profile.links["host"].bytes_per_s = speed
    assert "host memory gave" in only(profile)


def test_laying_a_token_that_takes_longer_than_computing_it_is_doubted_and_capped() -> None:
    profile = make_profile()
    profile.stitch_s = 0.05
    assert "laying a stored token took" in only(profile)
    correct(profile)
    assert find_doubts(profile) == []


def test_passes_of_a_few_milliseconds_say_nothing() -> None:
    """A tiny model: a pass costs what starting it does, whatever its rows."""
    grid = Grid((0,), (16, 1024), [[0.002, 0.0021]])
    again = Grid((512,), (32, 384), [[0.008, 0.009]])
    profile = MachineProfile("m", "cpu, 2 threads", 2, grid, again, {}, 1e-4)
    assert find_doubts(profile) == []


def test_recomputing_that_is_too_dear_gets_the_price_of_prefilling_as_many_rows() -> None:
    profile = make_profile(10.0)
    correct(profile)
    for x in PROMPTS:
        for y in ROWS:
            assert profile.recompute.at(x, y) == pytest.approx(profile.prefill.at(x - y, y))
    assert find_doubts(profile) == []
    assert profile.relation == pytest.approx(1.0)


def test_only_the_points_that_cannot_be_are_put_right() -> None:
    profile, right = make_profile(), make_profile()
    profile.recompute.seconds[1][0] = 4.3
    correct(profile)
    assert profile.recompute.seconds[0] == right.recompute.seconds[0]
    assert profile.recompute.at(2048, 32) == pytest.approx(right.recompute.at(2048, 32), rel=0.3)


def test_of_two_prices_that_do_not_fit_the_higher_is_wrong() -> None:
    profile = make_profile()
    profile.prefill.scale(20.0)
    assert find_doubts(profile)
    correct(profile)
    right = make_profile()
    assert profile.prefill.at(0, 1024) == pytest.approx(1.2 * right.prefill.at(0, 1024), rel=0.2)
    assert profile.recompute.seconds == right.recompute.seconds
