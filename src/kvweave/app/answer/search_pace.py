"""Whether speculation can pay: how long searches take, and how early their lists stand.

A guess that is right saves the rest of the search, unless the two share cores: if a search takes
twice as long beside a prefill, nothing is gained by having both at once. One that is wrong costs a
wait for the next iteration boundary, because a step that runs is not interrupted. Where a prefill
is short beside the search, as on a GPU, guesses wait until no more than that is left. All of it is
learnt from what happened: an index that probes the nearest clusters first stands early, one that
compares everything in order of arrival stands late, and a small knowledge base is searched before a
single step is over.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_STAGES = 8
STAGE_S = 5e-3  # a stage is no shorter: looking its chunks up takes a part of a millisecond
BINS = 8  # how far a search is: eighths
GAIN = 0.2  # of the newest search or prefill in what one takes
OUTLIER = 4  # times what a search takes: a longer one counts as this, it may be a hiccup
MEMORY = 64  # searches; what is older counts for less and less
FORGET = 0.02  # of the slowdown, with each search by itself: so that guesses are tried again
FEWEST_ROWS = 32  # a prefill of fewer says little about the pace of larger ones


class SearchPace:
    """What earlier searches of one knowledge base tell. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._search_s: float | None = None  # by itself
        self._slowdown = 1.0  # of a search beside a prefill
        # by bin: how often the list was seen there, and how often it was the last one already.
        # Before the first search: once so and once so.
        self._seen = [2.0] * BINS
        self._stood = [1.0] * BINS

    @property
    def search_s(self) -> float | None:
        """A search by itself takes so long; None: none was measured."""
        return self._search_s

    def num_stages(self) -> int:
        """Stages for the next search. 1: it is over too soon for anything to be gained."""
        if self._search_s is None:
            return 1
        return max(1, min(MAX_STAGES, int(self._search_s / STAGE_S)))

    def is_worth(
        self, stage: int, num_stages: int, boundary_s: float, prefill_s: float = math.inf
    ) -> bool:
        """Whether a guess at this stage (1 is the first) is expected to gain time. `boundary_s` is
        what a step of a guess takes, `prefill_s` what all of it does: no more can be hidden, and
        as long as the next stage leaves time for all of it, a guess there is right more often."""
        if self._search_s is None or stage >= num_stages:
            return False
        next_left_s = self._search_s * (1 - (stage + 1) / num_stages)
        if stage + 1 < num_stages and next_left_s >= prefill_s:
            return False
        stands = self.stands(stage, num_stages)
        left_s = min(prefill_s, self._search_s * (1 - stage / num_stages))
        # Beside each other both take `slowdown` times as long. What the prefill gets done in that
        # time, less what the search loses: left * slowdown / slowdown - left * (slowdown - 1).
        gained_s = left_s * (2 - self._slowdown)
        return stands * gained_s > (1 - stands) * min(boundary_s, prefill_s)

    def stands(self, stage: int, num_stages: int) -> float:
        """Share of searches whose list was the last one already after this stage."""
        at = _bin(stage, num_stages)
        with self._lock:
            return self._stood[at] / self._seen[at]

    @property
    def slowdown(self) -> float:
        """How much longer a search takes beside a prefill."""
        return self._slowdown

    def searched(
        self, seconds: float, lists: Sequence[object], num_stages: int, *, guessed: bool = False
    ) -> None:
        """A search is over: its lists after each stage, and whether a guess ran beside it."""
        with self._lock:
            before = self._search_s
            if not guessed:
                took_s = seconds if before is None else min(seconds, OUTLIER * before)
                self._search_s = took_s if before is None else before + GAIN * (took_s - before)
                self._slowdown += FORGET * (1 - self._slowdown)
            elif before:
                self._slowdown += GAIN * (max(1.0, seconds / before) - self._slowdown)
            stood = True
            for stage in range(len(lists) - 1, 0, -1):  # the last one stands by itself
                stood = stood and lists[stage - 1] == lists[-1]
                at = _bin(stage, num_stages)
                if self._seen[at] >= MEMORY:
                    self._seen[at] /= 2
                    self._stood[at] /= 2
                self._seen[at] += 1
                self._stood[at] += stood


class PrefillPace:
    """What a prefill takes with one engine, and a row of it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._row_s: float | None = None
        self._prefill_s = math.inf

    @property
    def row_s(self) -> float | None:
        """None: no prefill was measured."""
        return self._row_s

    @property
    def prefill_s(self) -> float:
        """What a whole one takes; without end if none was measured."""
        return self._prefill_s

    def computed(self, rows: int, seconds: float) -> None:
        """A prefill that had the engine to itself is through."""
        if rows < FEWEST_ROWS:
            return
        with self._lock:
            before, newest = self._row_s, seconds / rows
            if before is None:
                self._prefill_s, self._row_s = seconds, newest
                return
            self._prefill_s += GAIN * (seconds - self._prefill_s)
            self._row_s = before + GAIN * (newest - before)


@dataclass(frozen=True, slots=True)
class Paces:
    """What speculation has learnt: of one knowledge base, and of the engine that all share."""

    search: SearchPace = field(default_factory=SearchPace)
    prefill: PrefillPace = field(default_factory=PrefillPace)


def _bin(stage: int, num_stages: int) -> int:
    return min(BINS, -(-stage * BINS // num_stages)) - 1
