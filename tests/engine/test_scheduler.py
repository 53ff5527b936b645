"""Who computes what next, in plain numbers."""

from dataclasses import replace

from kvweave.engine.config import EngineConfig
from kvweave.engine.scheduler import Scheduler, Seq
from kvweave.engine.waiting import WINDOW, WaitingQueue

CFG = EngineConfig(page_tokens=4, max_running=3, step_rows=8, alone_rows=16)


class Desk:
    """A pool of pages as a number, and a scheduler over it."""

    def __init__(self, pages: int = 100, cfg: EngineConfig = CFG) -> None:
        self.free = pages
        self.arrivals = 0
        self.cached: dict[Seq, int] = {}
        self.scheduler: Scheduler[Seq] = Scheduler(
            cfg, self.lengths, self.admit, self.grow, self.retire
        )

    def lengths(self, seq: Seq) -> tuple[int, int]:
        cached = self.cached.get(seq, 0)
        return cached, seq.known - cached

    def admit(self, seq: Seq) -> bool:
        return self.grow(seq, -(-seq.known // CFG.page_tokens))

    def grow(self, seq: Seq, pages: int) -> bool:
        if pages > self.free:
            return False
        self.free -= pages
        seq.pages += pages
        return True

    def retire(self, seq: Seq) -> None:
        self.free += seq.pages
        seq.pages = 0

    def add(self, known: int, *, held: bool = False, cached: int = 0, own: bool = False) -> Seq:
        self.arrivals += 1
        seq = Seq(self.arrivals, known, held, own_step=own)
        self.cached[seq] = cached
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[Seq, int]]:
        """Compute what is asked for; whoever is through knows one token more."""
        works = self.scheduler.next_step()
        for seq, rows in works:
            if seq.own_step:
                seq.computed, seq.own_step = seq.known, False
            seq.computed += rows
            if not seq.needed and not seq.held:
                seq.known += 1
        return [(work.seq, work.num_rows) for work in works]


def test_a_long_prompt_is_computed_in_slices() -> None:
    desk = Desk()
    seq = desk.add(40)
    assert desk.step() == [(seq, 16)]
    assert desk.step() == [(seq, 16)]
    assert desk.step() == [(seq, 8)]
    assert desk.step() == [(seq, 1)]


def test_who_decodes_comes_first_and_bounds_the_step() -> None:
    desk = Desk()
    first = desk.add(4)
    desk.step()
    second = desk.add(40)
    assert desk.step() == [(first, 1), (second, 7)]
    assert desk.step() == [(first, 1), (second, 7)]


def test_no_more_run_than_may() -> None:
    desk = Desk()
    seqs = [desk.add(1) for _ in range(5)]
    assert [seq for seq, _ in desk.step()] == seqs[:3]
    desk.scheduler.remove(seqs[0])
    assert seqs[3] in [seq for seq, _ in desk.step()]


def test_when_pages_run_out_the_last_to_come_starts_again() -> None:
    desk = Desk(pages=4)
    first, second = desk.add(8), desk.add(8)
    desk.step()
    assert (first.pages, second.pages) == (2, 2)
    assert desk.step() == [(first, 1)]  # its ninth token needs a third page
    assert (second.computed, second.pages, second.preempted) == (0, 0, 1)
    assert second.known == 9, "tokens that were given out stay"
    desk.scheduler.remove(first)
    desk.retire(first)
    assert desk.step() == [(second, 9)]


def test_speculation_gives_way_before_anybody_else() -> None:
    desk = Desk(pages=5)
    first = desk.add(8)
    guess = desk.add(8, held=True)
    last = desk.add(4)
    desk.step()
    assert desk.step() == [(first, 1), (last, 1)]
    assert guess in desk.scheduler.parked
    assert guess.pages == 0
    desk.scheduler.release(guess)
    assert guess in desk.scheduler.waiting


def test_a_held_prompt_is_computed_and_goes_no_further() -> None:
    desk = Desk()
    guess = desk.add(5, held=True)
    assert desk.step() == [(guess, 5)]
    assert desk.step() == []
    desk.scheduler.release(guess)
    guess.known += 1
    assert desk.step() == [(guess, 1)]


def test_steps_of_their_own_take_turns_with_the_common_one() -> None:
    desk = Desk()
    plain = desk.add(4)
    desk.step()
    fused = [desk.add(20, own=True) for _ in range(2)]
    order = [[seq for seq, _ in desk.step()] for _ in range(5)]
    assert order[0] == [plain]
    assert order[1] == [fused[0]]
    assert plain in order[2]
    assert order[3] == [fused[1]]


def test_what_is_cached_goes_first_but_nobody_waits_for_ever() -> None:
    queue: WaitingQueue[Seq] = WaitingQueue(lambda seq: (seq.computed, 10))
    cold = Seq(0, 10)
    queue.push(cold)
    for arrival in range(1, 100):
        queue.push(Seq(arrival, 10, computed=9))
    order = []
    while queue:
        order.append(queue.best())
        queue.remove(order[-1])
    assert order.index(cold) == WINDOW


def test_speculation_overtakes_nobody() -> None:
    queue: WaitingQueue[Seq] = WaitingQueue(lambda seq: (seq.computed, 10))
    real, guess = Seq(1, 10), Seq(0, 10, held=True, computed=9)
    queue.push(guess)
    queue.push(real)
    assert queue.best() is real


GUESSING = replace(CFG, guess_rows=4)


def test_a_speculation_that_leaves_for_somebody_has_no_rows_in_the_step() -> None:
    desk = Desk(pages=10, cfg=GUESSING)
    guess = desk.add(36, held=True)
    assert desk.step() == [(guess, 4)]
    new = desk.add(20)
    assert desk.step() == [(new, 12)]
    assert guess.pages == guess.computed == 0
    assert desk.scheduler.parked == [guess]
    assert desk.free == 5


def test_when_a_speculation_left_in_vain_the_one_with_its_own_step_goes_on() -> None:
    desk = Desk(pages=10, cfg=GUESSING)
    guess = desk.add(12, held=True)
    assert desk.step() == [(guess, 4)]
    own = desk.add(20, own=True)
    assert desk.step() == [(guess, 4)]  # and the other is in
    desk.scheduler._own_next = False  # the common step's turn
    desk.add(40)  # does not fit beside it, with or without the guess
    assert desk.step() == [(own, 0)]
    assert desk.scheduler.parked == [guess]
