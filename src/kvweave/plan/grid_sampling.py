"""Few runs for a whole grid of prices: measured along a cross, the rest put together from it.

Other work on the machine makes a run longer, never shorter. So the lower quartile of a point's
samples counts, and samples of one point lie far apart in time.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvweave.plan.profile import Grid

SAMPLES = 5  # of a point, as far as the budget goes
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


class CrossSampling:
    """A cross that is being measured, run after run. For one thread at a time.

    Runs go round after round over all points, cheap ones first. Points that the budget, or the
    longest run that is allowed, has no time for are left out; two of `ys` are measured whatever
    they take.
    """

    def __init__(
        self,
        run: Callable[[int, int], float],
        xs: Sequence[int],
        ys: Sequence[int],
        base: int,
        budget_s: float,
        longest_s: float = float("inf"),
    ) -> None:
        """`run` gives the seconds of one run. `longest_s`: of one that is not the first two."""
        self._run = run
        self._xs, self._ys, self._base = xs, ys, base
        self._middle = ys[len(ys) // 2]
        points = sorted(
            {*((base, y) for y in ys), *((x, self._middle) for x in xs)},
            key=lambda p: (p[1], p[0] != base),
        )
        self._left_s = budget_s
        self._longest_s = longest_s
        self._samples: dict[tuple[int, int], list[float]] = {}
        self._waiting = points * SAMPLES

    def step(self, now_s: Callable[[], float] = time.perf_counter) -> bool:
        """Make the next run. False: there is none left."""
        while self._waiting:
            point = self._waiting.pop(0)
            expected_s = self._expected_s(point)
            is_first_two = point[0] == self._base and self._num_rows < 2
            may_run = expected_s <= min(self._left_s, self._longest_s)
            if may_run or (is_first_two and point not in self._samples):
                started_s = now_s()
                self._samples.setdefault(point, []).append(self._run(*point))
                self._left_s -= now_s() - started_s
                return True
        return False

    def samples(self) -> CrossSamples:
        """What was measured so far: at least two points of the row."""
        known = {point: _typical(times) for point, times in self._samples.items()}
        base, middle = self._base, self._middle
        row = {y: known[base, y] for y in self._ys if (base, y) in known}
        for less, more in reversed(list(pairwise(row))):  # no point is dearer than one of more rows
            row[less] = min(row[less], row[more])
        if (base, middle) not in known:  # too slow even for that: x is priced at another y, or not
            middle = max(row)
        column = {x: known[x, middle] for x in self._xs if (x, middle) in known}
        return CrossSamples(base, middle, row, column)

    @property
    def _num_rows(self) -> int:
        return sum(x == self._base for x, _ in self._samples)

    def _expected_s(self, point: tuple[int, int]) -> float:
        times = self._samples.get(point)
        if times is not None:
            return _typical(times)
        rows = [y for x, y in self._samples if x == self._base]
        if not rows:
            return 0.0
        most = max(rows)
        return _typical(self._samples[self._base, most]) * point[1] / most


def measure_in_turns(samplings: Sequence[CrossSampling]) -> None:
    """Until all of them are done, a run of each in turn: a burst of other work does not hit one of
    them alone."""
    going = list(samplings)
    while going:
        going = [sampling for sampling in going if sampling.step()]


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


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: of five the second lowest, of fewer the lowest."""
    return sorted(times)[(len(times) - 1) // 4]


def _longer(axis: Sequence[int]) -> list[int]:
    longer = list(axis)
    while longer[-1] * 2 <= LONGEST:
        longer.append(longer[-1] * 2)
    return longer
