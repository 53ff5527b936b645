"""Who computes how many rows in the next step. Plain ints and lists, no tensors.

A sequence has tokens that are known and tokens that are computed; the difference is what it still
needs; of a fused prompt that is prepared it is the rows that are not reused (`sparse_rows.py`).
Prefill, a slice of it, decode and recomputing after a preemption are the same bookkeeping.

    1  who is one row short (decodes) comes first, so that answers flow
    2  then those under way, oldest first, as many rows as the step has left; speculations behind
       all others and a few rows at a time, because a wrong one can only end between two steps.
       A slice may be longer than what is left by rows that cannot be cut, once per step
    3  then who waits, while there is room for its whole prompt

When pages run out, the sequence that came last gives its pages back and is computed again later:
its tokens are known, so its answer stays the same. Whoever came first always goes on.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvweave.engine.config import EngineConfig
from kvweave.errors import ConfigError

WINDOW = 32


@dataclass(slots=True)
class SparseRows:
    """What is left of one prompt. Owned by its sequence."""

    positions: Sequence[int]  # of all rows, ascending
    bonds: Sequence[tuple[int, int]] = ()  # [start, end) of them that no slice may cut, ascending
    done: int = 0  # rows that were computed

    @property
    def left(self) -> int:
        return len(self.positions) - self.done

    @property
    def reached(self) -> int:
        """Up to here, not included, everything stands in its final form."""
        return self.positions[self.done] if self.left else self.positions[-1] + 1

    def share(self, most: int) -> int:
        """How many rows the next slice has in a step with room for `most`; 0 only without room.

        A bond that does not fit waits for the next slice, unless it would be all there is of this
        one: then it is computed at once, however long, because it never gets shorter.
        """
        if most <= 0:
            return 0
        end = self.done + min(most, self.left)
        place = bisect_right(self.bonds, (end, 0)) - 1  # the last that starts before `end`
        if place >= 0:
            first, last = self.bonds[place]
            if first < end < last:
                end = first if first > self.done else last
        return end - self.done

    def next(self, count: int) -> Sequence[int]:
        """Positions of the next `count` rows."""
        return self.positions[self.done : self.done + count]


@dataclass(slots=True, eq=False)
class Seq:
    """The numbers of one sequence."""

    arrival: int  # smaller came first
    known: int  # tokens of the prompt and of the answer so far
    held: bool = False  # speculation: computed, not answered
    computed: int = 0  # of the known ones, those whose KV is there
    pages: int = 0  # that it has
    own_step: bool = False  # its next step is its own: a fused prefill, or what prepares one
    sparse: SparseRows | None = None  # a prepared fused prompt: what of it is still to compute
    preempted: int = field(default=0)

    @property
    def needed(self) -> int:
        """Rows that it still has to compute."""
        return self.known - self.computed if self.sparse is None else self.sparse.left

    def share(self, most: int) -> int:
        """Rows of it in a step that has room for `most`."""
        return min(self.needed, most) if self.sparse is None else self.sparse.share(most)

    def advance(self, num_rows: int) -> None:
        """So many of its rows were computed."""
        if self.sparse is None:
            self.computed += num_rows
            return
        self.sparse.done += num_rows
        self.computed = self.sparse.reached
        if not self.sparse.left:
            self.sparse = None


S = TypeVar("S", bound=Seq)


class Waits(Protocol):
    """What waits."""

    @property
    def held(self) -> bool: ...


T = TypeVar("T", bound=Waits)


@dataclass(slots=True)
class _Waiting(Generic[T]):
    request: T
    overtaken: int = 0


class WaitingQueue(Generic[T]):
    """In order of arrival. Not thread-safe: the scheduler owns it.

    `lengths(request)` says how many of its tokens are cached and how many must be computed now. It
    is asked again for every choice, because the cache changes while requests wait.
    """

    def __init__(self, lengths: Callable[[T], tuple[int, int]], window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"WaitingQueue.window must be at least 1, got {window}")
        self._lengths = lengths
        self._window = window
        self._queue: list[_Waiting[T]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request: T) -> bool:
        return any(waiting.request is request for waiting in self._queue)

    def requests(self) -> list[T]:
        return [waiting.request for waiting in self._queue]

    def push(self, request: T, *, first: bool = False) -> None:
        """At the end, or before all others: who had begun already."""
        if first:
            self._queue.insert(0, _Waiting(request, overtaken=self._window))
        else:
            self._queue.append(_Waiting(request))

    def best(self) -> T:
        """Who should run next. IndexError when nobody waits. Changes nothing."""
        front = self._queue[0]
        if front.overtaken >= self._window and not front.request.held:
            return front.request
        return max(self._queue[: self._window], key=lambda w: self._rank(w.request)).request

    def remove(self, request: T, *, counts: bool = True) -> None:
        """It runs now, ahead of who came before it; without `counts` it just leaves."""
        place = [waiting.request for waiting in self._queue].index(request)
        if counts:
            for waiting in self._queue[:place]:
                waiting.overtaken += 1
        del self._queue[place]

    def _rank(self, request: T) -> tuple[bool, float]:
        return not request.held, order_priority(*self._lengths(request))


def order_priority(cached_tokens: int, compute_tokens: int) -> float:
    """Cached ÷ to compute; larger first."""
    return cached_tokens / max(1, compute_tokens)


class Work(NamedTuple, Generic[S]):
    """The next `num_rows` rows of one sequence in one step."""

    seq: S
    num_rows: int


class Scheduler(Generic[S]):
    """Not thread-safe: the engine thread owns it. Asks others to move pages:

    admit(seq)        give it pages for all it knows; False: not now
    grow(seq, pages)  more pages for a running one; False: there are none
    retire(seq)       take its pages away; it will be computed again
    aside(seq)        before it waits again: True if it has to get something first, and will be
                      added, in front, when it has
    """

    def __init__(
        self,
        cfg: EngineConfig,
        lengths: Callable[[S], tuple[int, int]],
        admit: Callable[[S], bool],
        grow: Callable[[S, int], bool],
        retire: Callable[[S], None],
        aside: Callable[[S], bool],
    ) -> None:
        assert cfg.page_tokens is not None, "a config for a device says how large pages are"
        assert cfg.step_rows is not None, "and how long steps"
        assert cfg.alone_rows is not None, "in both cases"
        self._step_rows, self._alone_rows = cfg.step_rows, cfg.alone_rows
        self._cfg = cfg
        self._page_tokens = cfg.page_tokens
        self._admit = admit
        self._grow = grow
        self._retire = retire
        self._aside = aside
        self.waiting: WaitingQueue[S] = WaitingQueue(lengths)
        self.running: list[S] = []
        self.parked: list[S] = []  # speculations whose pages somebody else needed
        self.preemptions = 0
        self._own_next = False

    def add(self, seq: S, *, first: bool = False) -> None:
        """It waits for its turn; `first` before all others, if it had begun before."""
        self.waiting.push(seq, first=first)

    def release(self, seq: S) -> None:
        """A held sequence becomes an ordinary one."""
        seq.held = False
        if seq in self.parked:
            self.parked.remove(seq)
            self._wait_again(seq)

    def remove(self, seq: S) -> None:
        """It is finished, cancelled or failed. Its pages are the caller's to take back."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.parked:
            self.parked.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq, counts=False)

    @property
    def is_busy(self) -> bool:
        """Whether somebody runs or waits to. Any thread; as it was a moment ago."""
        return bool(self.running or self.waiting)

    def is_alone(self, seq: S) -> bool:
        """Whether nobody else has anything to compute now."""
        others = (other for other in self.running if other is not seq)
        return not self.waiting and not any(other.needed for other in others)

    def next_step(self) -> list[Work[S]]:
        """The rows of the next step; empty when there is nothing to compute.

        A sequence that wants a step of its own is alone in the list, with 0 rows.
        """
        own = [seq for seq in self.running if seq.own_step]
        together = [seq for seq in self.running if seq.needed and not seq.own_step]
        self._own_next = bool(own) and (self._own_next or not together)
        if self._own_next:  # they take turns with the common step
            self._own_next = False
            return [Work(min(own, key=lambda seq: seq.arrival), 0)]
        self._own_next = True
        left = self._alone_rows
        if any(seq.needed == 1 for seq in together):
            left = self._step_rows
        works: dict[S, int] = {}
        for seq in sorted(together, key=lambda seq: (seq.needed > 1, seq.held, seq.arrival)):
            rows = self._share(seq, left)
            if rows and seq in self.running and self._make_room(seq, seq.computed + rows, works):
                works[seq] = rows
                left = max(0, left - rows)
        while left and (new := self._next_in(works)) is not None:
            if new.own_step:  # at once if nobody else runs, else in turn
                if not works:
                    return self.next_step()
                break
            works[new] = self._share(new, left)
            left -= works[new]
        if not works and any(seq.own_step for seq in self.running):
            return self.next_step()  # all who were to compute together had to leave: its turn
        return [Work(seq, rows) for seq, rows in works.items()]

    def _share(self, seq: S, left: int) -> int:
        """Rows of it in a step that has `left` of them."""
        most = self._cfg.guess_rows if seq.held else None
        return seq.share(left if most is None else min(left, most))

    def _next_in(self, works: dict[S, int]) -> S | None:
        """Let one more sequence in, if there is room for it; speculations may have to leave."""
        busy = sum(not seq.held for seq in self.running)
        if not self.waiting or busy >= self._cfg.max_running:
            return None
        seq = self.waiting.best()
        while not self._admit(seq):
            idle = [held for held in self.running if held.held and held is not seq]
            if not idle or seq.held:
                return None
            self._preempt(max(idle, key=lambda held: held.arrival), works)
        self.waiting.remove(seq)
        self.running.append(seq)
        return seq

    def _make_room(self, seq: S, num_tokens: int, works: dict[S, int]) -> bool:
        """Pages for so many tokens of a running sequence; others may have to leave for it."""
        missing = -(-num_tokens // self._page_tokens) - seq.pages
        while missing > 0 and not self._grow(seq, missing):
            # speculation goes first, then who came last; perhaps that is the sequence itself
            victim = max(self.running, key=lambda other: (other.held, other.arrival))
            self._preempt(victim, works)
            if victim is seq:
                return False
        return True

    def _preempt(self, victim: S, works: dict[S, int]) -> None:
        works.pop(victim, None)  # it may have had rows in the step that is being made
        self.running.remove(victim)
        self._retire(victim)
        victim.computed, victim.sparse = 0, None
        victim.preempted += 1
        self.preemptions += 1
        if victim.held:
            self.parked.append(victim)
        else:
            self._wait_again(victim)

    def _wait_again(self, seq: S) -> None:
        if not self._aside(seq):
            self.add(seq, first=True)
