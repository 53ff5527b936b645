"""What the last requests say about the next one: paths that come back, later turns, close calls.

A fused request leaves nothing for the next one: the same question ten times is fused ten times. An
exact one takes longer and leaves its path in the knowledge tree, where the next finds it for next
to nothing. So a path may be worth computing exactly, once, instead of fusing it again and again:

    exact now   E + n · P         P: price of the request with its whole path in the tree
    fused       F + n · F         n: times the path will come back

How often that will be is not known; that a path which came back c times will come back c times more
is the guess that never costs more than twice what foresight would (a ski rental). So a path is
computed as soon as c · (F - P) >= E - F.

Calibration measured which share of fused answers are close calls, computed a second time. What
people ask may be less clear cut: where every second answer is a close call, fusing costs more than
it saves, and only those who count see it.
"""

from collections.abc import Sequence
from itertools import takewhile

from kvweave.plan.ordering import WINDOW, AccessTable
from kvweave.types import ChunkId

TURN_GAIN = 0.1  # weight of the newest request
LIKELY_TURNS = 0.2  # share of later turns from which on a first one is expected to go on
# answers that calibration's figure counts as; few, because a close call costs a whole prefill
MEASURED_WEIGHT = 4.0
FADE = 0.98  # of what was seen, with every answer, fused or not: about the last fifty count


class PathReturns:
    """How many of the last requests began with a path. Not thread-safe; a few MB at most."""

    def __init__(self, window: int = WINDOW) -> None:
        self._beginnings = AccessTable(window)

    def push(self, path: Sequence[ChunkId]) -> None:
        """Count an answered request with this path, from the first part behind the preamble on."""
        self._beginnings.push(_names(path))

    def count(self, path: Sequence[ChunkId]) -> int:
        """Return how many requests had the whole of this path, before this one."""
        return self._beginnings.count(_names(path)[-1]) if path else 0

    def num_known_parts(self, path: Sequence[ChunkId]) -> int:
        """Return how many of its leading parts an earlier request began with."""
        return sum(1 for _ in takewhile(self._beginnings.count, _names(path)))


class TurnShare:
    """How many of the last requests were later turns of conversations that keep their chunks. Not
    thread-safe."""

    def __init__(self) -> None:
        self._share = 0.0

    def push(self, is_later: bool) -> None:
        self._share += TURN_GAIN * (is_later - self._share)

    @property
    def is_likely(self) -> bool:
        """Whether a request may well be followed by another turn."""
        return self._share >= LIKELY_TURNS


class CloseCalls:
    """Fused answers of one planner, and those that were close. Not thread-safe."""

    def __init__(self) -> None:
        self._answers = 0.0
        self._close = 0.0

    def push(self, is_close: bool | None) -> None:
        """Count an answer that got its first token. None: it was not fused. What was seen fades all
        the same, so that fusing is tried again after a while."""
        self._answers = FADE * self._answers + (is_close is not None)
        self._close = FADE * self._close + bool(is_close)

    def share(self, measured: float) -> float:
        """Return the chance that the next one is close; `measured` by calibration."""
        weight = MEASURED_WEIGHT + self._answers
        return (MEASURED_WEIGHT * measured + self._close) / weight


def is_worth_computing(exact_s: float, fused_s: float, known_s: float, returns: int) -> bool:
    """Whether a path that came back so often should be computed exactly. `known_s` is the price
    once its path is in the tree."""
    return returns > 0 and returns * (fused_s - known_s) >= exact_s - fused_s


def _names(path: Sequence[ChunkId]) -> tuple[int, ...]:
    """Return a name for each beginning of a path, good in this process alone."""
    names, name = [], 0
    for part in path:
        name = hash((name, part))
        names.append(name)
    return tuple(names)
