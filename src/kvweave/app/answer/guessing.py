"""Speculative prefill: compute what a search has found so far while it goes on.

    stage 1 ─► list A ─► guess A ────────✗ ended: the list changed
    stage 2 ─► list B            └► guess B ──────────────►  computed, nothing handed out
    stage 3 ─► list B                         goes on      ►
    last    ─► list B            it was right: released ───► tokens

RAGCache's dynamic speculative pipelining, with its loose ends tied: a guess that found the queue
full is tried again at the next stage although its list is the same, and the last list always has
the last word. Speculation changes when something is computed, never what is answered.

Plain bookkeeping over whatever starts a generation; needs no model, no index and no tensors.
"""

import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvweave.errors import RequestError
from kvweave.types import ChunkId

TopK = tuple[ChunkId, ...]  # in order: another order is another prompt
_ids = itertools.count(1)


class FoundList(Protocol):
    """What a search has found after a stage."""

    @property
    def ids(self) -> TopK:
        """The chunks, best first."""
        ...


class GuessFigures(NamedTuple):
    """What became of a generation. Times are by time.perf_counter."""

    saved_tokens: int = 0  # computed before it was released
    wasted_tokens: int = 0  # computed, and of no use to any request
    prefilled_s: float | None = None  # when its prompt was computed; None: not known, or not yet
    finished_s: float | None = None  # when it ended; None: not known, or not yet


class Generation(Protocol):
    """An answer under way. Any thread may say any of this, and twice."""

    @property
    def is_done(self) -> bool:
        """Nothing more comes of it. One that is held can only have failed."""
        ...

    def cancel(self) -> None:
        """It is not wanted: it ends at the next iteration boundary, and exact KV of whole chunks
        stays where the next generation finds it."""

    def release(self) -> None:
        """It may hand out its tokens."""

    @property
    def figures(self) -> GuessFigures: ...


F = TypeVar("F", bound=FoundList)
G = TypeVar("G", bound=Generation)
Start = Callable[[F, bool], G]  # a list, held → a generation; may raise RequestError


class Guess(NamedTuple, Generic[G]):
    """A generation that was started before the search was over."""

    stage: int  # 1 is the first
    top_k: TopK
    generation: G
    started_s: float  # by time.perf_counter


@dataclass(slots=True)
class SpeculationLog(Generic[G]):
    """What was guessed for one request. Filled in while it searches; read it afterwards."""

    id: int  # all guesses of one request share it, and at most one of them is under way
    stages: int = 0  # that the search had
    started: int = 0  # guesses
    wrong: list[Guess[G]] = field(default_factory=list)  # those that were ended
    right: Guess[G] | None = None  # the one that became the answer
    queue_full: int = 0  # stages at which a guess had to wait for other requests
    refused: int = 0  # guesses that could not be computed, such as one that is too long
    search_s: float = 0.0  # of the whole search, the query's embedding not counted
    ended_s: float = 0.0  # when the search was over, by time.perf_counter
    stages_s: list[float] = field(default_factory=list)  # when each stage was, likewise

    @property
    def ahead_s(self) -> float:
        """How much earlier than the end of the search the right guess was started."""
        return 0.0 if self.right is None else self.ended_s - self.right.started_s

    def record(self) -> "SpeculationRecord":
        """What it came to, once the prompt of the answer is computed. Wrong guesses are over by
        then: they were ended before."""
        right, hidden_s = self.right, self.ahead_s
        figures = GuessFigures() if right is None else right.generation.figures
        if right is not None and figures.prefilled_s is not None:  # perhaps before the search was
            hidden_s = min(hidden_s, max(0.0, figures.prefilled_s - right.started_s))
        return SpeculationRecord(
            id=self.id,
            stages=self.stages,
            guesses=self.started,
            right_stage=None if right is None else right.stage,
            search_ms=self.search_s * 1e3,
            hidden_ms=hidden_s * 1e3,
            saved_tokens=figures.saved_tokens,
            wasted_tokens=sum(wrong.generation.figures.wasted_tokens for wrong in self.wrong),
        )


class Speculator(Generic[F, G]):
    """The guesses of one request: at most one is under way. For one thread.

    `start` begins a generation. A guess begins only while `pending()`, the requests whose prompts
    are still to be computed, is below `max_prefill_bs`: speculation never makes others wait.
    `is_worth(stage)` may say no for better reasons. Use as a context manager: whatever ends it
    before `final` ends the guess.
    """

    def __init__(
        self,
        start: Start[F, G],
        pending: Callable[[], int],
        max_prefill_bs: int,
        is_worth: Callable[[int], bool] = lambda stage: True,
    ) -> None:
        self._start = start
        self._pending = pending
        self._max_prefill_bs = max_prefill_bs
        self._is_worth = is_worth
        self._guess: Guess[G] | None = None
        self._settled = False
        self.said: SpeculationLog[G] = SpeculationLog(next(_ids))

    def __enter__(self) -> "Speculator[F, G]":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._settled:
            self._drop()

    def provisional(self, found: F) -> None:
        """The list after a stage that is not the last, as far as is known yet."""
        self.said.stages += 1
        if self._guess is not None and self._guess.top_k != found.ids:
            self._drop()  # first, so that the queue below is without it
        if self._guess is None and found.ids and self._is_worth(self.said.stages):
            self._begin(found)

    def final(self, found: F) -> G:
        """The search is over: the generation of its list, released. Raises what `start` raises."""
        guess = self._guess
        # One that failed is no answer: what went wrong may have been of that moment.
        if guess is not None and guess.top_k == found.ids and not guess.generation.is_done:
            self.said.right = guess
            self._settled = True
            guess.generation.release()
            return guess.generation
        self._drop()
        generation = self._start(found, False)
        self._settled = True
        return generation

    def _begin(self, found: F) -> None:
        if self._pending() >= self._max_prefill_bs:
            self.said.queue_full += 1
            return  # nothing is remembered of this list, so the next stage tries again
        try:
            generation = self._start(found, True)
        except RequestError:  # of this list; the last one may be shorter, and has its own say
            self.said.refused += 1
            return
        self.said.started += 1
        self._guess = Guess(self.said.stages, found.ids, generation, time.perf_counter())

    def _drop(self) -> None:
        if self._guess is not None:
            self._guess.generation.cancel()
            self.said.wrong.append(self._guess)
            self._guess = None


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """What speculation did for one answer."""

    id: int
    stages: int  # that the search had
    guesses: int
    right_stage: int | None  # of the guess that became the answer; None: all were wrong
    search_ms: float  # of the whole search, the query's embedding not counted
    hidden_ms: float  # of these, while the answer's own prompt was computed
    saved_tokens: int  # computed for the answer before the search was over
    wasted_tokens: int  # computed for wrong guesses and of no use to any request

    def document(self) -> dict[str, int | float | None]:
        """For JSON."""
        times = {"search_ms": round(self.search_ms, 1), "hidden_ms": round(self.hidden_ms, 1)}
        return {**asdict(self), **times}

    def summary(self) -> str:
        """One line for people."""
        told = f"searched {self.search_ms:.0f} ms in {self.stages} stages"
        if not self.guesses:
            return f"{told}, no guess was worth it"
        if self.right_stage is None:
            told += ", every guess was wrong"
        else:
            told += f", {self.hidden_ms:.0f} ms of it hidden: right since stage {self.right_stage}"
        return f"{told} ({self.saved_tokens} tokens saved, {self.wasted_tokens} wasted)"


class RetrievalResult(NamedTuple, Generic[G]):
    """The end of a search."""

    generation: G
    said: SpeculationLog[G]
    lists: list[TopK]  # after each stage


def retrieve(stages: Iterator[F], speculator: Speculator[F, G]) -> RetrievalResult[G]:
    """Run a staged search to its end, guessing meanwhile. What the search raises ends the guess.

    That a stage was the last is known when no other follows; `is_worth` may know it earlier.
    """
    started_s = time.perf_counter()
    lists: list[TopK] = []
    found: F | None = None
    with speculator:
        for found in stages:
            lists.append(found.ids)
            speculator.said.stages_s.append(time.perf_counter())
            speculator.provisional(found)
        assert found is not None, "a search has at least one stage"
        said = speculator.said
        said.ended_s = time.perf_counter()
        said.search_s = said.ended_s - started_s
        return RetrievalResult(speculator.final(found), said, lists)


MAX_STAGES = 8
STAGE_S = 5e-3  # a stage is no shorter: looking its chunks up takes a part of a millisecond
BINS = 8  # how far a search is: eighths
GAIN = 0.2  # of the newest search or prefill in what one takes
OUTLIER = 4  # times what a search takes: a longer one counts as this, it may be a hiccup
MEMORY = 64  # searches; what is older counts for less and less
TRIED = 16  # first searches in stages; of those that promise nothing one in so many
FORGET = 0.02  # of the slowdown, with each search by itself: so that guesses are tried again
FEWEST_ROWS = 32  # a prefill of fewer says little about the pace of larger ones


class SearchPace:
    """What earlier searches of one knowledge base tell. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._search_s: float | None = None  # by itself, in one go if one was
        self._staged_s: float | None = None  # by itself, in stages
        self._num_asked = 0  # whether stages pay
        self._slowdown = 1.0  # of a search beside a prefill
        # by bin: how often the list was seen there, and how often it was the last one already.
        # Before the first search: once so and once so.
        self._seen = [2.0] * BINS
        self._stood = [1.0] * BINS
        self._left: list[float | None] = [None] * BINS  # share of the search that was to come

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
        if stage + 1 < num_stages and self._left_s(stage + 1, num_stages) >= prefill_s:
            return False
        return self._gain_s(stage, num_stages, boundary_s, prefill_s) > 0

    def pays(self, num_stages: int, boundary_s: float, prefill_s: float = math.inf) -> bool:
        """Whether to search in stages: a guess is expected to gain more than they cost, or it is
        time to learn about them."""
        with self._lock:
            self._num_asked += 1
            if self._num_asked <= TRIED or self._num_asked % TRIED == 0:
                return True
        cost_s = max(0.0, (self._staged_s or 0.0) - (self._search_s or 0.0))
        stages = range(1, num_stages)
        return any(self._gain_s(s, num_stages, boundary_s, prefill_s) > cost_s for s in stages)

    def _gain_s(self, stage: int, num_stages: int, boundary_s: float, prefill_s: float) -> float:
        """What a guess at this stage is expected to gain."""
        stands = self.stands(stage, num_stages)
        left_s = min(prefill_s, self._left_s(stage, num_stages))
        # Beside each other both take `slowdown` times as long. What the prefill gets done in that
        # time, less what the search loses: left * slowdown / slowdown - left * (slowdown - 1).
        gained_s = left_s * (2 - self._slowdown)
        return stands * gained_s - (1 - stands) * min(boundary_s, prefill_s)

    def _left_s(self, stage: int, num_stages: int) -> float:
        """What is to come of a search after this stage."""
        left = self._left[_bin(stage, num_stages)]
        share = 1 - stage / num_stages if left is None else left
        return (self._staged_s or self._search_s or 0.0) * share

    def stands(self, stage: int, num_stages: int) -> float:
        """Share of searches whose list was the last one already after this stage."""
        at = _bin(stage, num_stages)
        with self._lock:
            return self._stood[at] / self._seen[at]

    def note_search(
        self,
        seconds: float,
        lists: Sequence[object],
        num_stages: int,
        *,
        left_s: Sequence[float] = (),
        guessed: bool = False,
    ) -> None:
        """Learn from a search that is over: its lists after each stage, how long before the end
        they came, and whether a guess ran beside it."""
        with self._lock:
            before = self._staged_s or self._search_s
            if not guessed:
                if num_stages > 1:
                    self._staged_s = _learn(self._staged_s, seconds)
                if num_stages == 1 or self._search_s is None:
                    self._search_s = _learn(self._search_s, seconds)
                self._slowdown += FORGET * (1 - self._slowdown)
            elif before:
                self._slowdown += GAIN * (max(1.0, seconds / before) - self._slowdown)
            for stage, to_come_s in enumerate(left_s[:-1], start=1):
                at, share = _bin(stage, num_stages), to_come_s / seconds
                self._left[at] = share if (past := self._left[at]) is None else (past + share) / 2
            stood = True
            for stage in range(len(lists) - 1, 0, -1):  # the last one stands by itself
                stood = stood and lists[stage - 1] == lists[-1]
                at = _bin(stage, num_stages)
                if self._seen[at] >= MEMORY:
                    self._seen[at] /= 2
                    self._stood[at] /= 2
                self._seen[at] += 1
                self._stood[at] += stood


SearchPaces = defaultdict[str, SearchPace]  # of one knowledge base, by kind of search


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

    def note_prefill(self, rows: int, seconds: float) -> None:
        """Learn from a prefill that had the engine to itself."""
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

    search: SearchPaces = field(default_factory=lambda: SearchPaces(SearchPace))
    prefill: PrefillPace = field(default_factory=PrefillPace)


def _learn(before_s: float | None, took_s: float) -> float:
    if before_s is None:
        return took_s
    return before_s + GAIN * (min(took_s, OUTLIER * before_s) - before_s)


def _bin(stage: int, num_stages: int) -> int:
    return min(BINS, -(-stage * BINS // num_stages)) - 1
