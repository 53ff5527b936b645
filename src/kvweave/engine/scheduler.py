"""Which sequences compute how many rows in the next step. Plain ints and lists, no torch.

A sequence has tokens that are known and tokens that are computed; the difference is what it still
needs; of a fused prompt that is prepared it is the rows that are not reused (`SparseRows`).
Prefill, a slice of it, decode and recomputing after a preemption are the same bookkeeping.

    1  sequences that are one row short (decode) come first, so that answers flow
    2  then those under way, oldest first, as many rows as the step has left; speculations behind
       all others and a few rows at a time, because a wrong one can only end between two steps.
       Where nothing else is to be computed they may have more, if the config says so: a step that
       has nothing but speculations then may stop between two layers (`common_steps.py`).
       A slice may be longer than what is left by rows that cannot be cut, once per step
    3  then those that wait, while there is room for their whole prompt
    4  if none of these has a row: one in the background, in short steps, the first to come

Tenants share all of this: whose turn it is comes before which of their sequences it is
(`waiting_queue.py`). A tenant of which nothing runs while others have all pages or all places gets
those of one of them that has several.

When pages run out, the sequence that came last gives its pages back and is computed again later:
its tokens are known, so its answer stays the same. The one that came first always goes on. Those in
the background leave before all others, then speculations.

Which of those that wait comes next says `waiting_queue.py`.
"""

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvweave.engine.config import EngineConfig
from kvweave.engine.progress import Scheduled
from kvweave.engine.waiting_queue import FairRanks, WaitingQueue

NEWCOMER = "\0"  # stands for a tenant of which nothing runs yet
MOST_GIVEN_UP = 3  # steps of a sequence in a row; the next runs through

S = TypeVar("S", bound=Scheduled)
S_contra = TypeVar("S_contra", bound=Scheduled, contravariant=True)


class PageSource(Protocol[S_contra]):
    """Gives sequences their pages and takes them back. Called on the engine thread; never waits."""

    def lengths(self, sequence: S_contra) -> tuple[int, int]:
        """Tokens of it that are cached, and that must be computed."""
        ...

    def is_coming(self, sequence: S_contra) -> bool:
        """Whether a running sequence computes what this one, which waits, would have to compute
        next, and will share it. False as soon as that one stops, so that none waits for ever."""
        ...

    def admit(self, sequence: S_contra) -> bool:
        """Give it pages for all it knows. False, and nothing changed: not now."""
        ...

    def grow(self, sequence: S_contra, num_pages: int) -> bool:
        """Give a running one more pages. False, and nothing changed: there are none."""
        ...

    def retire(self, sequence: S_contra) -> None:
        """Take its pages away; it will be computed again."""
        ...


class ByteSource(Protocol[S_contra]):
    """Loads what sequences are made from. Called on the engine thread; never waits."""

    def load_first(self, sequence: S_contra, *, others_ready: bool) -> bool:
        """Whether a sequence has to load something before it may wait for its turn. If so loading
        has begun, and the sequence is added again when it ends."""
        ...


class StepSlice(NamedTuple, Generic[S]):
    """The next `num_rows` rows of one sequence in one step."""

    sequence: S
    num_rows: int


class Scheduler(Generic[S]):
    """Decides what every step computes. The engine thread owns it; `is_busy`, `preemptions` and the
    lengths of its lists are read by any."""

    def __init__(self, cfg: EngineConfig, pages: PageSource[S], loader: ByteSource[S]) -> None:
        """`cfg` is one that `for_device` completed."""
        assert cfg.page_tokens is not None, "a config for a device says how large pages are"
        assert cfg.step_rows is not None, "and how long steps"
        assert cfg.alone_rows is not None, "in both cases"
        assert cfg.background_rows is not None, "and in idle time"
        self._guess_rows = cfg.guess_rows or cfg.alone_rows
        self._guess_alone_rows = max(cfg.guess_alone_rows or 0, self._guess_rows)
        self._step_rows, self._alone_rows = cfg.step_rows, cfg.alone_rows
        self._background_rows = cfg.background_rows
        self._cfg = cfg
        self._page_tokens = cfg.page_tokens
        self._pages = pages
        self._loader = loader
        self.waiting: WaitingQueue[S] = WaitingQueue(pages.lengths, is_coming=pages.is_coming)
        self.running: list[S] = []
        self.parked: list[S] = []  # speculations whose pages others needed
        self.background: list[S] = []  # those that wait for idle time, first come first
        self.preemptions = 0
        self.ranks = FairRanks()
        self._apart: Collection[S] = ()  # their own steps are under way: they are left alone

    def add(self, sequence: S) -> None:
        """Let a sequence wait for its turn. One that has to load something first stays outside, and
        is added again when it has its bytes."""
        if self._loader.load_first(sequence, others_ready=self.is_busy):
            return
        progress = sequence.progress
        if progress.background:
            self.background.append(sequence)
            self.background.sort(key=lambda one: one.progress.arrival)
        else:
            self.waiting.push(sequence)

    def begin_again(self, sequence: S) -> None:
        """Throw away what was computed of a running sequence and let it wait in its old place."""
        self.running.remove(sequence)
        self._pages.retire(sequence)
        sequence.progress.computed, sequence.progress.sparse = 0, None
        self.add(sequence)

    def release(self, sequence: S) -> None:
        """Make a held sequence an ordinary one."""
        sequence.progress.held = False
        if sequence in self.parked:
            self.parked.remove(sequence)
            self.add(sequence)

    def remove(self, sequence: S) -> None:
        """Forget a sequence that is finished, cancelled or failed. The caller takes its pages
        back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        elif sequence in self.background:
            self.background.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence, counts=False)

    @property
    def is_busy(self) -> bool:
        """Whether sequences run or wait to, those in the background left out. Any thread; as it was
        a moment ago."""
        running = self.running.copy()  # in one go: the engine thread changes it
        return bool(self.waiting) or not all(one.progress.background for one in running)

    def is_alone(self, sequence: S) -> bool:
        """Whether no other sequence has anything to compute now; those in the background do not
        count."""
        others = (other for other in self._foreground() if other is not sequence)
        return not self.waiting and not any(other.progress.needed for other in others)

    def next_step(self) -> list[StepSlice[S]]:
        """The rows of the next step; empty when there is nothing to compute.

        A sequence that wants a step of its own is alone in the list, with 0 rows.
        """
        return self._common_step() or self._idle_step()

    def step_beside(self, apart: Collection[S]) -> list[StepSlice[S]]:
        """The rows of a common step while the own steps of others are under way; empty when there
        are none. No speculations: who waits for those would wait for them."""
        self._apart = apart
        try:
            step = self._common_step()
        finally:
            self._apart = ()
        return [each for each in step if each.num_rows and not each.sequence.progress.held]

    def let_in_beside(self, apart: Collection[S]) -> bool:
        """Let one more sequence in while others take their own steps, if somebody waits for it and
        its next step is its own. Returns whether it was let in."""
        best = self.waiting.best()
        if best is None or not best.progress.own_step or best.progress.held:
            return False
        self._apart = apart
        try:
            new = self._let_next_in({})
        finally:
            self._apart = ()
        return new is not None and new.progress.own_step

    @property
    def has_own_step(self) -> bool:
        """Whether one that was let in takes the next step, alone."""
        return any(one.progress.own_step for one in self._foreground())

    def _foreground(self) -> list[S]:
        """Running sequences that are not in the background."""
        return [one for one in self.running if not one.progress.background]

    def _common_step(self) -> list[StepSlice[S]]:
        """The next step of all that are not in the background."""
        others = [one for one in self._foreground() if one not in self._apart]
        for one in others:
            if one.progress.own_step:  # let in by the last common step: they take turns
                return [StepSlice(one, 0)]
        rows_of: dict[S, int] = {}
        left = self._share_among_running([one for one in others if one.progress.needed], rows_of)
        while left and (new := self._let_next_in(rows_of)) is not None:
            if new.progress.own_step:  # at once if no other computes, else in turn
                if not rows_of:
                    return [StepSlice(new, 0)]
                break
            rows_of[new] = self._share(new, left, rows_of)
            left -= rows_of[new]
        for one in rows_of:  # behind all who need pages
            drafted = self._share_for_draft(one, left)
            rows_of[one] += drafted
            left -= drafted
        return [StepSlice(one, rows) for one, rows in rows_of.items()]

    def _share_among_running(self, running: Sequence[S], rows_of: dict[S, int]) -> int:
        """Enter the rows of a step that running sequences get. Returns how many are left of it."""
        is_decoding = any(one.progress.needed == 1 for one in running)
        left = self._step_rows if is_decoding else self._alone_rows
        parts = self._rows_per_tenant(running, left)
        for one in sorted(running, key=_turn_order):
            tenant, is_prompt = one.progress.tenant, one.progress.needed > 1
            most = min(left, parts.get(tenant, left)) if is_prompt else left
            rows = self._share(one, most, rows_of)
            if rows and one in self.running and self._make_room(one, rows, rows_of):
                rows_of[one] = rows
                left = max(0, left - rows)
                if is_prompt and tenant in parts:
                    parts[tenant] = max(0, parts[tenant] - rows)
        return left

    def _rows_per_tenant(self, together: Sequence[S], left: int) -> dict[str, int]:
        """Rows of a step that prompts of each tenant may have, so that a long prompt of one tenant
        does not hold up the others. Empty if only one tenant has prompts."""
        tenants = {one.progress.tenant for one in together if one.progress.needed > 1}
        running = {one.progress.tenant for one in self._foreground()}
        if self.waiting.first_of(lambda one: one.progress.tenant not in running) is not None:
            tenants.add(NEWCOMER)
        if len(tenants) < 2:
            return {}
        return dict.fromkeys(tenants, -(-left // len(tenants)))

    def _idle_step(self) -> list[StepSlice[S]]:
        """The next step of one sequence in the background. One at a time takes few pages and few
        rows from others."""
        for one in self.running:
            if one.progress.background:
                rows = one.progress.share(self._background_rows)
                if self._make_room(one, rows, {}):
                    rows += self._share_for_draft(one, self._background_rows - rows)
                    return [StepSlice(one, rows)]
                break  # it gave its own pages back, and begins again
        if self.waiting or not self.background or not self._pages.admit(self.background[0]):
            return []
        new = self.background.pop(0)
        self.running.append(new)
        is_apart = new.progress.own_step
        return [StepSlice(new, 0 if is_apart else new.progress.share(self._background_rows))]

    def _share(self, sequence: S, left: int, rows_of: dict[S, int]) -> int:
        """Rows that a sequence gets in a step that has `left` rows, besides those in `rows_of`."""
        if not sequence.progress.held:
            return sequence.progress.share(left)
        alone = all(_can_stop(one) for one in (sequence, *rows_of))
        alone = alone and all(one.progress.held for one in self.waiting.sequences())
        most = self._guess_alone_rows if alone else self._guess_rows
        return sequence.progress.share(min(left, most))

    def may_stop(self, step: Sequence[StepSlice[S]]) -> bool:
        """Whether a step of `next_step` may stop between two layers when others come: it is of
        idle time, or has speculations alone, which may be longer than anybody should wait."""
        if not all(_can_stop(each.sequence) for each in step):
            return False
        is_set = self._guess_alone_rows > self._guess_rows
        return is_set or all(each.sequence.progress.background for each in step)

    def _let_next_in(self, rows_of: dict[S, int]) -> S | None:
        """Let the next waiting sequence in, if there is room for it or others can be preempted for
        it: those in the background, then speculations, then those of another tenant."""
        busy = sum(not one.progress.held for one in self._foreground())
        new = self.waiting.best() if busy < self._cfg.max_running else None
        if new is None or not self._admit(new, rows_of):
            new = self._preempt_for_new_tenant(rows_of)
        if new is not None:
            self.waiting.remove(new)
            self.running.append(new)
            if not new.progress.held:
                self.ranks.advance_to(new.progress.arrival)
        return new

    def _admit(self, new: S, rows_of: dict[S, int]) -> bool:
        """Give a new sequence its pages; preempt sequences in the background, and speculations
        unless it is one. False: there is still no room."""
        while not self._pages.admit(new):
            weaker = [
                one
                for one in self.running
                if one.progress.background or (one.progress.held and not new.progress.held)
            ]
            if not weaker:
                return False
            self._preempt(max(weaker, key=_leaving_order), rows_of)
        return True

    def _preempt_for_new_tenant(self, rows_of: dict[S, int]) -> S | None:
        """Admit a sequence of a tenant of which none runs, by preempting the tenant of which most
        do.

        A tenant keeps at least one running sequence. None: there is no such newcomer, or no room
        can be made for it.
        """
        own: dict[str, list[S]] = {}
        for one in self._foreground():
            if not one.progress.held:
                own.setdefault(one.progress.tenant, []).append(one)
        newcomer = self.waiting.first_of(lambda one: one.progress.tenant not in own)
        if newcomer is None:
            return None
        while largest := max(own.values(), key=len, default=[]):
            if len(largest) < 2:
                return None
            victim = max(self._preemptible(largest), key=_leaving_order, default=None)
            if victim is None:
                return None
            largest.remove(victim)
            self._preempt(victim, rows_of)
            if self._admit(newcomer, rows_of):
                return newcomer
        return None

    def _make_room(self, sequence: S, num_rows: int, rows_of: dict[S, int]) -> bool:
        """Get pages for the next rows of a running sequence; preempt others for it, or the sequence
        itself. False: it was preempted."""
        missing = self._missing_pages(sequence, num_rows)
        while missing > 0 and not self._pages.grow(sequence, missing):
            victim = max(
                self._preemptible(self.running), key=_leaving_order
            )  # perhaps this sequence
            self._preempt(victim, rows_of)
            if victim is sequence:
                return False
        return True

    def _missing_pages(self, sequence: S, num_rows: int) -> int:
        """Return how many pages a sequence lacks for its next rows; 0 or less: it has them."""
        progress = sequence.progress
        own = progress.computed - progress.elsewhere + num_rows
        return -(-own // self._page_tokens) - progress.num_pages

    def _share_for_draft(self, sequence: S, left: int) -> int:
        """Rows for the draft of a sequence that decodes, in a step that has `left` rows. Where no
        page is free, as many as fit into those that it has."""
        progress = sequence.progress
        rows = min(progress.drafted, left) if progress.decodes else 0
        if rows <= 0:
            return 0
        missing = self._missing_pages(sequence, 1 + rows)
        if missing <= 0 or self._pages.grow(sequence, missing):
            return rows
        num_own = progress.computed - progress.elsewhere
        return max(0, progress.num_pages * self._page_tokens - num_own - 1)

    def _preemptible(self, running: Sequence[S]) -> list[S]:
        """Return those of `running` that may be preempted: their own steps are not under way."""
        return [one for one in running if one not in self._apart]

    def _preempt(self, victim: S, rows_of: dict[S, int]) -> None:
        """Take the pages of a running sequence away and let it wait again; a speculation is
        parked."""
        rows_of.pop(victim, None)  # it may have had rows in the step that is being made
        self.running.remove(victim)
        self._pages.retire(victim)
        victim.progress.restart()
        self.preemptions += 1
        if victim.progress.held:
            self.parked.append(victim)
        else:
            self.add(victim)


def _can_stop(sequence: Scheduled) -> bool:
    """Whether a sequence may stop between two layers: nobody waits for it, and its rows may run
    twice (those of a fused prompt move others). One that stopped too often may not, or it would
    never finish."""
    progress = sequence.progress
    can = (progress.held or progress.background) and progress.sparse is None
    return can and progress.given_up < MOST_GIVEN_UP


def _turn_order(sequence: Scheduled) -> tuple[bool, bool, float]:
    """Sort key of turns: decodes first, then by arrival, speculations last."""
    progress = sequence.progress
    return progress.needed > 1, progress.held, progress.arrival


def _leaving_order(sequence: Scheduled) -> tuple[bool, bool, float]:
    """Sort key of preemption, the largest first: those in the background, then speculations, then
    the one that came last."""
    progress = sequence.progress
    return progress.background, progress.held, progress.arrival
