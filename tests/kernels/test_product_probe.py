"""The probe takes the fastest way that works, and never one that is slower than float32."""

from collections.abc import Callable

import torch

from kvweave.kernels import product_probe
from kvweave.kernels.linear import Projection
from kvweave.kernels.product_probe import ROWS, Shape, choose_ways, measure_ways
from kvweave.kernels.products import FLOAT32, WAYS, IntegerRows
from kvweave.kernels.rounded import RoundedWeight

SMALL = Shape(128, 64)
FAST, SLOW = "int8 rows, int_mm", "int8 rows, onednn"


def make_times(**seconds: float) -> product_probe.Times:
    return {name.replace("_", " "): dict.fromkeys(ROWS, s) for name, s in seconds.items()}


def test_the_fastest_way_is_taken_by_rows() -> None:
    times = {FLOAT32: dict.fromkeys(ROWS, 1.0), FAST: dict.fromkeys(ROWS, 0.5)}
    times[SLOW] = {1: 0.2, 8: 0.9}  # fell behind: not measured with more rows
    assert choose_ways(times) == (SLOW, FAST, FAST, FAST)


def test_a_way_that_is_hardly_faster_is_not_worth_a_copy() -> None:
    other = "int8 rows, dynamic fbgemm"
    times = {FLOAT32: dict.fromkeys(ROWS, 1.0), FAST: dict.fromkeys(ROWS, 0.5)}
    times[SLOW] = {1: 0.2, 8: 0.55, 64: 0.55, 512: 0.6}
    times[other] = {1: 0.5, 8: 0.48, 64: 0.48, 512: 0.6}
    assert choose_ways(times) == (SLOW, FAST, FAST, FAST)


def test_what_is_no_faster_than_float32_is_never_taken() -> None:
    times = {FLOAT32: dict.fromkeys(ROWS, 1.0), FAST: dict.fromkeys(ROWS, 0.99)}
    times[SLOW] = dict.fromkeys(ROWS, 7.0)
    assert choose_ways(times) == (FLOAT32,) * len(ROWS)


def test_a_row_is_the_same_beside_others_so_it_is_integers_for_all_or_for_none() -> None:
    times = {FLOAT32: dict.fromkeys(ROWS, 1.0), FAST: {1: 1.5, 8: 0.5, 64: 0.4, 512: 0.3}}
    assert choose_ways(times) == (FLOAT32,) * len(ROWS)
    times[FAST][1] = 1.04
    assert choose_ways(times) == (FAST,) * len(ROWS)


def test_what_is_lost_with_fewer_rows_than_there_ever_are_does_not_count() -> None:
    times = {FLOAT32: dict.fromkeys(ROWS, 1.0), FAST: {1: 1.5, 8: 0.5, 64: 0.5, 512: 0.5}}
    assert choose_ways(times) == (FLOAT32,) * len(ROWS)
    assert choose_ways(times, least_rows=8) == (FAST,) * len(ROWS)
    assert choose_ways(times, least_rows=1) == (FLOAT32,) * len(ROWS)
    times[FAST][8] = 1.5
    assert choose_ways(times, least_rows=8) == (FLOAT32,) * len(ROWS)


def test_every_way_that_works_here_is_timed_and_float32_for_all_rows() -> None:
    times = measure_ways(SMALL)
    assert set(times[FLOAT32]) == set(ROWS)
    assert set(times) <= {FLOAT32, *WAYS}
    assert all(seconds > 0 for each in times.values() for seconds in each.values())


def test_a_way_far_behind_is_not_tried_with_more_rows() -> None:
    calls: list[float] = []

    def timed(run: Callable[[], object]) -> float:
        run()
        calls.append(1.0)
        return 1.0 if len(calls) % num_ways == 1 else 10.0  # float32 comes first in every turn

    num_ways = len(measure_ways(SMALL))
    times = measure_ways(SMALL, timed)
    assert set(times[FLOAT32]) == set(ROWS)
    # but for the fastest of them: one row may have been disturbed (is_doubtful)
    tried = [set(each) for name, each in times.items() if name != FLOAT32]
    assert sum(each != {ROWS[0]} for each in tried) <= 1
    assert len(tried) > 1


def test_a_way_that_raises_is_no_candidate() -> None:
    def broken(weight: object) -> torch.nn.Module:
        raise RuntimeError("no such operator")

    name = "int8 rows, of a machine to come"
    WAYS[name] = broken  # type: ignore[assignment]
    try:
        assert name not in measure_ways(SMALL)
    finally:
        del WAYS[name]


def test_a_way_that_multiplies_wrongly_is_no_candidate() -> None:
    """As CPUs do that multiply 8-bit integers in 16 bits: right for small ones."""

    def overflowing(weight: RoundedWeight) -> Projection:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            codes = x.floor_().clamp(-100, 100).double()
            return (codes @ weight.codes.double().T * weight.scale).float()

        return IntegerRows(weight, multiply)

    name = "int8 rows, in 16 bits"
    WAYS[name] = overflowing
    try:
        found = measure_ways(SMALL)
        assert name not in found
        assert FAST in found
    finally:
        del WAYS[name]
