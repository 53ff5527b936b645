"""Which way of multiplying rounded weights is fastest here, by shape and number of rows: measured.

All ways of a shape take turns, and the least time of each counts, so that a busy machine disturbs
all of them alike. For few rows the caches are emptied in between: in a pass over a model no weight
is found where the last pass left it. A way that is far behind is not tried with more rows.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.products import FLOAT32, WAYS
from kvweave.kernels.rounded import GROUP, RoundedWeight, round_weight

ROWS = (1, 8, 64, 512)  # measured; up to BOUNDS rows it is taken
BOUNDS = (2, 16, 160)  # rows up to which the way of ROWS[i] serves; beyond them the last
COLD_ROWS = 8  # up to here caches are emptied
COLD_BYTES = 48 << 20
TURNS = 15
BUDGET_S = 0.4  # for one number of rows
COLD_BUDGET_S = 1.2  # where emptying the caches takes most of it
BEHIND = 3.0  # times the fastest: is not tried again
GAIN = 0.95  # of float32's time that a way must stay below: ties go to exact weights
COPY = 1.2  # times the fastest that a way may take which saves a copy of the weights
MOST_OUT = 16384  # output dims that are measured of a larger matrix

log = logging.getLogger(__name__)

Clock = Callable[[Callable[[], object]], float]


def extra_columns(in_dim: int) -> int:
    """Columns that dims with large values are split into: an eighth more at most, to whole 64s.
    More brings little: 0.0085 nats on SmolLM2 at an eighth, 0.0080 at a fifth, 0.032 without."""
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
    weight = round_weight(_on_grid(exact), None, parts, four_bits=True)
    products: dict[str, Projection] = {FLOAT32: Linear(exact)}
    times: Times = {}
    products |= _made(weight, torch.randn(1, shape.in_dim, generator=generator))
    cold = torch.zeros(COLD_BYTES, dtype=torch.int8)
    for rows in ROWS:
        x = torch.randn(rows, shape.in_dim, generator=generator)
        out = torch.empty(rows, shape.out_dim)
        found = _take_turns(products, x, out, cold if rows <= COLD_ROWS else None, time_of)
        for name, seconds in found.items():
            times.setdefault(name, {})[rows] = seconds
        fastest = min(found.values())
        products = {
            n: p for n, p in products.items() if n == FLOAT32 or found[n] < BEHIND * fastest
        }
    return times


def _made(weight: RoundedWeight, x: torch.Tensor) -> dict[str, Projection]:
    """The ways that this torch and CPU have: made and run once."""
    made: dict[str, Projection] = {}
    for name, make in WAYS.items():
        try:
            product = make(weight)
            product(x)
            product(torch.cat([x, x]))
        except Exception as error:  # whatever it is: not a candidate
            log.debug("no way %r here: %s", name, error)
            continue
        made[name] = product
    return made


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


def _on_grid(weight: torch.Tensor) -> torch.Tensor:
    """The same on a 4-bit grid, so that such ways can be measured."""
    if weight.shape[1] % GROUP:
        return weight
    grouped = weight.view(len(weight), -1, GROUP)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    return ((grouped - low) / step).round_().mul_(step).add_(low).view_as(weight)


def choose_ways(times: Times, allowed: Sequence[str] | None = None) -> tuple[str, ...]:
    """The way to take for each of ROWS: the fastest of those allowed (None: all), and float32
    wherever none of them is faster. Every way has a copy of the weights in memory, which takes time
    to make: one that is hardly faster than another that is taken anyway is not."""
    chosen = _fastest(times, allowed)
    ends = {chosen[0], chosen[-1]}
    for place, rows in enumerate(ROWS):
        near = {
            name: times[name][rows]
            for name in ends
            if rows in times[name] and times[name][rows] < COPY * times[chosen[place]][rows]
        }
        if near:
            chosen[place] = min(near, key=near.__getitem__)
    return tuple(chosen)


def _fastest(times: Times, allowed: Sequence[str] | None) -> list[str]:
    chosen = []
    for rows in ROWS:
        exact_s = times[FLOAT32][rows]
        tried = {
            name: seconds[rows]
            for name, seconds in times.items()
            if rows in seconds and name != FLOAT32 and (allowed is None or name in allowed)
        }
        best = min(tried, key=tried.__getitem__, default=FLOAT32)
        chosen.append(best if best in tried and tried[best] < GAIN * exact_s else FLOAT32)
    return chosen
