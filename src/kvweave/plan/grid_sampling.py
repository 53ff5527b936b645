"""Few runs for a whole grid of prices: measured along a cross, the rest put together from it."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvweave.plan.profile import Grid

SAMPLES = 5  # of a point, as far as the budget goes; the median of them counts
LONGEST = 8192  # tokens up to which prices are put together from measured ones


class CrossSamples:
    """Seconds over two axes, measured along a cross: all of `ys` at one x, all `xs` at one y.

    What stands in front of a row costs each row the same, so any other point is the row's price and
    what the column says x adds, times the rows. Points a budget has no time for are not in it.
    """

    def __init__(
        self, base: int, middle: int, row: dict[int, float], column: dict[int, float]
    ) -> None:
        """`row` by y at x = base, `column` by x at y = middle; both have (base, middle)."""
        self.row = row
        self._middle = middle
        self._more = {x: (s - column[base]) / middle for x, s in sorted(column.items())}

    def at(self, x: int, y: int) -> float:
        """Seconds of `y` rows; y is one of the row's."""
        return max(0.2 * self.row[y], self.row[y] + y * self._per_row(x))

    def _per_row(self, x: int) -> float:
        known = list(self._more.items())
        if len(known) < 2:
            return known[0][1]
        pairs = list(pairwise(known))
        (x1, s1), (x2, s2) = next((p for p in pairs if x <= p[1][0]), pairs[-1])
        return s1 + (x - x1) * (s2 - s1) / (x2 - x1)


def measure_cross(
    run: Callable[[int, int], float],
    xs: Sequence[int],
    ys: Sequence[int],
    base: int,
    budget_s: float,
    now_s: Callable[[], float] = time.perf_counter,
) -> CrossSamples:
    """Medians along a cross, cheap points first, round after round until the budget is spent.

    `run` gives the seconds of one run. Two of `ys` are measured whatever they take.
    """
    middle = ys[len(ys) // 2]
    points = sorted(
        {*((base, y) for y in ys), *((x, middle) for x in xs)}, key=lambda p: (p[1], p[0] != base)
    )
    samples: dict[tuple[int, int], list[float]] = {}
    deadline_s = now_s() + budget_s
    for number in range(SAMPLES):
        for x, y in points:
            known = {p: statistics.median(times) for p, times in samples.items()}
            rows = [p[1] for p in known if p[0] == base]
            expected_s = known.get((x, y), 0.0)
            if not expected_s and rows:
                expected_s = known[base, max(rows)] * y / max(rows)
            is_needed = number == 0 and x == base and len(rows) < 2
            if is_needed or now_s() + expected_s <= deadline_s:
                samples.setdefault((x, y), []).append(run(x, y))
    known = {p: statistics.median(times) for p, times in samples.items()}
    row = {y: known[base, y] for y in ys if (base, y) in known}
    for less, more in reversed(list(pairwise(row))):  # no point is dearer than one with more rows
        row[less] = min(row[less], row[more])
    if (base, middle) not in known:  # too slow even for that: what stands in front is not priced
        return CrossSamples(base, max(row), row, {base: row[max(row)]})
    column = {x: known[x, middle] for x in xs if (x, middle) in known}
    return CrossSamples(base, middle, row, column)


def grid_of(cross: CrossSamples, xs: Sequence[int], *, in_slices: bool) -> Grid:
    """A cross as a grid, with `xs` continued by doubling.

    `in_slices`: more rows than were measured run in slices, each behind the one before, and their
    price is the slices' together. Otherwise a grid goes on along its last slope.
    """
    ys = sorted(cross.row)
    if in_slices:
        ys = _longer(ys)

    def seconds(x: int, y: int) -> float:
        if y in cross.row:
            return cross.at(x, y)
        return seconds(x, y // 2) + seconds(x + y // 2, y // 2)

    xs = _longer(xs)
    return Grid(tuple(xs), tuple(ys), [[seconds(x, y) for y in ys] for x in xs])


def _longer(axis: Sequence[int]) -> list[int]:
    longer = list(axis)
    while longer[-1] * 2 <= LONGEST:
        longer.append(longer[-1] * 2)
    return longer
