"""A few runs along a cross give the whole grid, within a budget, whatever one run meets."""

import pytest

from kvweave.plan.grid_sampling import (
    SAMPLES,
    CrossSamples,
    CrossSampling,
    grid_of,
    measure_in_turns,
)

XS, YS = (0, 512, 2048), (16, 64, 256, 1024)


def seconds(x: int, y: int) -> float:
    """What prefill takes: each row costs the same, and a little for each token in front."""
    return 0.001 * y + 1e-7 * y * (x + y / 2)


class Machine:
    def __init__(self, slower: float = 1.0) -> None:
        self.now_s = 0.0
        self.runs: list[tuple[int, int]] = []
        self.slower = slower
        self.stalls: set[int] = set()  # numbers of runs that meet something else at work

    def __call__(self, x: int, y: int) -> float:
        took_s = self.slower * seconds(x, y) * (20 if len(self.runs) in self.stalls else 1)
        self.runs.append((x, y))
        self.now_s += took_s
        return took_s

    def clock(self) -> float:
        return self.now_s


def measure(machine: Machine, budget_s: float = 1e9) -> CrossSamples:
    sampling = CrossSampling(machine, XS, YS, 0, budget_s)
    while sampling.step(machine.clock):
        pass
    return sampling.samples()


def test_points_that_were_never_run_are_priced_from_the_cross() -> None:
    machine = Machine()
    grid = grid_of(measure(machine), XS, in_slices=True)
    assert set(machine.runs) == {(0, y) for y in YS} | {(x, 256) for x in XS}
    for x in XS:
        for y in YS:
            assert grid.at(x, y) == pytest.approx(seconds(x, y), rel=0.02)


def test_a_long_prefill_is_its_slices_one_after_another() -> None:
    grid = grid_of(measure(Machine()), XS, in_slices=True)
    assert grid.at(0, 4096) == pytest.approx(seconds(0, 4096), rel=0.02)
    assert grid.at(4096, 2048) == pytest.approx(seconds(4096, 2048), rel=0.05)


def test_a_stall_among_several_samples_is_forgiven() -> None:
    machine = Machine()
    machine.stalls = {3, 9}
    grid = grid_of(measure(machine), XS, in_slices=True)
    assert len(machine.runs) == SAMPLES * 6
    assert grid.at(0, 1024) == pytest.approx(seconds(0, 1024), rel=0.02)


@pytest.mark.parametrize("slower", [1.0, 5.0, 100.0])
def test_the_budget_holds_but_for_two_points_that_are_always_run(slower: float) -> None:
    machine = Machine(slower)
    cross = measure(machine, budget_s=3.0)
    least = slower * (seconds(0, 16) + seconds(0, 64))
    assert machine.now_s <= max(3.0, least) * 1.1
    assert len(cross.row) >= 2
    grid = grid_of(cross, XS, in_slices=True)
    assert grid.at(0, 512) == pytest.approx(slower * seconds(0, 512), rel=0.15)


def test_a_machine_that_is_busy_most_of_the_time_is_priced_as_when_it_is_not() -> None:
    machine = Machine()
    machine.stalls = {n for n in range(30) if n % 5 > 1}  # three runs of five
    grid = grid_of(measure(machine), XS, in_slices=True)
    assert grid.at(0, 1024) == pytest.approx(seconds(0, 1024), rel=0.02)


def test_no_run_is_longer_than_may_be_and_the_rest_follows_from_short_ones() -> None:
    machine = Machine()
    sampling = CrossSampling(machine, XS, (16, 64, 128, 1024), 0, 1e9, longest_s=0.1)
    while sampling.step(machine.clock):
        pass
    assert max(y for _, y in machine.runs) == 64, "128 rows take 0.13 s"
    grid = grid_of(sampling.samples(), XS, in_slices=True)
    assert grid.at(0, 1024) == pytest.approx(seconds(0, 1024), rel=0.1)


def test_grids_that_are_measured_in_turns_share_a_burst_of_other_work() -> None:
    order: list[str] = []

    def runner(name: str) -> CrossSampling:
        def run(x: int, y: int) -> float:
            order.append(name)
            return seconds(x, y)

        return CrossSampling(run, XS, YS, 0, 1e9)

    measure_in_turns([runner("a"), runner("b")])
    assert order == ["a", "b"] * (SAMPLES * 6)
