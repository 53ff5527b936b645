"""Which way of multiplying rounded weights is fastest here, by shape and number of rows: measured.

All ways of a shape take turns, and the least time of each counts, so that a busy machine disturbs
all of them alike. For few rows the caches are emptied in between: in a pass over a model no weight
is found where the last pass left it. A first start waits for this, so little is measured that
cannot matter: one row and many rows with every way (but for the fastest, one that is far behind
with one row is not tried with more), what lies between with float32 and the two that were fastest.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.products import FLOAT32, WAYS, IntegerRows, plain_integers
from kvweave.kernels.rounded import RoundedWeight, round_weight

ROWS = (1, 8, 64, 512)  # measured; up to BOUNDS rows it is taken
BOUNDS = (2, 16, 160)  # rows up to which the way of ROWS[i] serves; beyond them the last
COLD_ROWS = 8  # up to here caches are emptied
COLD_BYTES = 48 << 20
TURNS = 10
BUDGET_S = 0.25  # for one number of rows; two turns are always taken
COLD_BUDGET_S = 0.6  # where emptying the caches takes most of it
BEHIND = 3.0  # times the fastest: is not tried again
GAIN = 0.9  # of float32's time that a way must stay below with many rows
LOSS = 1.05  # of float32's time that it may take with any number of them
COPY = 1.2  # times the fastest that a way may take which saves a copy of the weights
MOST_OUT = 4096  # output dims that are measured of a larger matrix
LARGE = 1 << 18  # values of a matrix whose reading, not its calls, is what a single row takes

log = logging.getLogger(__name__)

Clock = Callable[[Callable[[], object]], float]


def extra_columns(in_dim: int) -> int:
    """Columns that dims with large values are split into: an eighth more at most, to whole 64s."""
    return max((in_dim + in_dim // 8) // 64 * 64 - in_dim, 0)


class Shape(NamedTuple):
    """A product's size."""

    in_dim: int
    out_dim: int

    @property
    def measured(self) -> "Shape":
        """What stands for it: the time of a larger matrix grows with its output dims."""
        return Shape(self.in_dim, min(self.out_dim, MOST_OUT))


Times = dict[str, dict[int, float]]  # way → rows → seconds; a way that fell behind ends early


def clock(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


@torch.inference_mode()
def measure_ways(shape: Shape, time_of: Clock = clock) -> Times:
    """Seconds of every way that works here, float32 among them."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(shape.out_dim, shape.in_dim, generator=generator).mul_(0.02)
    parts = torch.ones(shape.in_dim, dtype=torch.int64)
    parts[: extra_columns(shape.in_dim)] = 2
    weight = round_weight(exact, None, parts)
    products: dict[str, Projection] = {FLOAT32: Linear(exact)}
    times: Times = {}
    products |= working_ways(weight, torch.randn(1, shape.in_dim, generator=generator))
    cold = torch.zeros(COLD_BYTES, dtype=torch.int8)
    ends = (ROWS[0], ROWS[-1])
    for rows in (*ends, *(each for each in ROWS if each not in ends)):
        x = torch.randn(rows, shape.in_dim, generator=generator)
        out = torch.empty(rows, shape.out_dim)
        found = _take_turns(products, x, out, cold if rows <= COLD_ROWS else None, time_of)
        for name, seconds in found.items():
            times.setdefault(name, {})[rows] = seconds
        if rows == ends[0]:
            most_s = BEHIND * min(found.values())
            kept = {FLOAT32, _fastest(times, rows), *(n for n in found if found[n] < most_s)}
            products = {name: product for name, product in products.items() if name in kept}
        elif rows == ends[1]:
            kept = {FLOAT32, *(_fastest(times, end) for end in ends)}
            products = {name: product for name, product in products.items() if name in kept}
    return times


def is_doubtful(shape: Shape, times: Times) -> bool:
    """Whether something else ran meanwhile: integers that win with many rows and lose with one,
    though they are a quarter of the bytes. A team of threads waits for the last of them, which a
    busy core keeps; float32's single row often has one thread, and waits for none."""
    if shape.in_dim * shape.out_dim < LARGE:
        return False
    one, many = ROWS[0], ROWS[-1]
    exact = times[FLOAT32]
    return any(
        each.get(many, math.inf) < GAIN * exact[many] and each[one] > LOSS * exact[one]
        for name, each in times.items()
        if name != FLOAT32
    )


def _fastest(times: Times, rows: int) -> str:
    """The way in integers that took least, of those that were tried with so many rows."""
    tried = {name: each[rows] for name, each in times.items() if rows in each and name != FLOAT32}
    return min(tried, key=tried.__getitem__, default=FLOAT32)


def working_ways(weight: RoundedWeight, x: torch.Tensor) -> dict[str, Projection]:
    """The ways that this torch and CPU have: made, run with rows like x [1, I], and right. Some
    CPUs multiply 8-bit integers in 16 bits, which overflow; oneDNN's dynamic product on Arm is
    right with as many rows as it was first called with, and with no other number."""
    made: dict[str, Projection] = {}
    x = torch.cat([x, x.abs(), torch.full_like(x, 3.0)])  # the last: every integer is the largest
    right = IntegerRows(weight, plain_integers(weight))(x)
    for name, make in WAYS.items():
        try:
            product = make(weight)
            is_right = _alike(product(x), right) and _alike(product(x[:1]), right[:1])
        except Exception as error:  # whatever it is: not a candidate
            log.debug("no way %r here: %s", name, error)
            continue
        if is_right:
            made[name] = product
        else:
            log.debug("no way %r here: it multiplies wrongly", name)
    return made


def _alike(found: torch.Tensor, right: torch.Tensor) -> bool:
    return found.shape == right.shape and torch.allclose(found, right, rtol=1e-3, atol=1e-3)


def _take_turns(
    products: Mapping[str, Projection],
    x: torch.Tensor,
    out: torch.Tensor,
    cold: torch.Tensor | None,
    time_of: Clock,
) -> dict[str, float]:
    best = dict.fromkeys(products, float("inf"))
    for product in products.values():
        product(x, out)
    ends_s = time.perf_counter() + (BUDGET_S if cold is None else COLD_BUDGET_S)
    for turn in range(TURNS):
        if turn > 1 and time.perf_counter() > ends_s:
            break
        for name, product in products.items():
            if cold is not None:
                cold.add_(1)
            best[name] = min(best[name], time_of(partial(product, x, out)))
    return best


def choose_ways(times: Times, *, doubtful: bool = False, least_rows: int = 1) -> tuple[str, ...]:
    """The way to take for each of ROWS: the fastest, in integers for all of them or in float32 for
    all, so that a row is the same whatever runs beside it. In integers only where they win with
    many rows and lose with none; what they lose by `doubtful` times does not count, nor what they
    lose with fewer than `least_rows`.

    Every way has a copy of the weights in memory, which takes time to make: one that is hardly
    faster than another that is taken anyway is not."""
    exact = times[FLOAT32]
    tried = {name: each for name, each in times.items() if name != FLOAT32}
    chosen = []
    for rows in ROWS:
        timed = {name: each[rows] for name, each in tried.items() if rows in each}
        best = min(timed, key=timed.__getitem__, default=FLOAT32)
        if best == FLOAT32:
            return (FLOAT32,) * len(ROWS)
        loses = rows >= least_rows and timed[best] > LOSS * exact[rows]
        if loses and not doubtful:
            return (FLOAT32,) * len(ROWS)
        chosen.append(best)
    if tried[chosen[-1]][ROWS[-1]] > GAIN * exact[ROWS[-1]]:
        return (FLOAT32,) * len(ROWS)
    ends = (chosen[-1], chosen[0])
    for place, rows in enumerate(ROWS):
        most_s = COPY * tried[chosen[place]][rows]
        near = [name for name in ends if tried[name].get(rows, math.inf) < most_s]
        chosen[place] = near[0] if near else chosen[place]
    return tuple(chosen)
