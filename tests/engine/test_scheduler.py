"""Who computes what next, in plain numbers."""

from dataclasses import replace

from kvweave.engine.config import EngineConfig
from kvweave.engine.scheduler import WINDOW, Scheduler, Seq, SparseRows, WaitingQueue

CFG = EngineConfig(page_tokens=4, max_running=3, step_rows=8, alone_rows=16)


class Desk:
    """A pool of pages as a number, and a scheduler over it."""

    def __init__(self, pages: int = 100, cfg: EngineConfig = CFG) -> None:
        self.free = pages
        self.arrivals = 0
        self.cached: dict[Seq, int] = {}
        self.aside: set[Seq] = set()  # who has to get something before it waits again
        self.scheduler: Scheduler[Seq] = Scheduler(
            cfg, self.lengths, self.admit, self.grow, self.retire, self.aside.__contains__
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
            seq.advance(rows)
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


def test_who_has_to_get_something_first_waits_outside_and_comes_back_in_front() -> None:
    desk = Desk(pages=4)
    first, second = desk.add(8), desk.add(8)
    desk.aside.add(second)
    for _ in range(5):
        desk.step()
    assert second.preempted == 1
    third = desk.add(1)
    assert desk.scheduler.waiting.requests() == [third]
    desk.scheduler.add(second, first=True)
    assert desk.scheduler.waiting.requests() == [second, third]
    assert first in desk.scheduler.running


def test_a_released_guess_that_has_to_get_something_first_does_not_wait_for_others() -> None:
    desk = Desk(pages=4)
    desk.add(8)
    guess = desk.add(8, held=True)
    desk.aside.add(guess)
    for _ in range(5):
        desk.step()
    assert desk.scheduler.parked == [guess]
    desk.scheduler.release(guess)
    assert not desk.scheduler.parked
    assert guess not in desk.scheduler.waiting


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


def prepared(desk: Desk, num_rows: int, bonds: list[tuple[int, int]]) -> Seq:
    """A fused prompt of which every third token is computed, as its preparation leaves it."""
    seq = desk.add(3 * num_rows)
    assert desk.admit(seq)
    desk.scheduler.waiting.remove(seq)
    desk.scheduler.running.append(seq)
    seq.sparse = SparseRows(range(2, 3 * num_rows, 3), bonds)
    seq.computed = seq.sparse.reached
    return seq


def test_the_rows_of_a_prepared_prompt_are_slices_like_any_other() -> None:
    desk = Desk()
    first = desk.add(4)
    desk.step()
    fused, full = prepared(desk, 10, []), desk.add(20)
    assert (fused.needed, fused.computed) == (10, 2)
    assert desk.step() == [(first, 1), (fused, 7)]
    assert (fused.needed, fused.computed) == (3, 2 + 3 * 7)
    assert desk.step() == [(first, 1), (fused, 3), (full, 4)]
    assert (fused.sparse, fused.needed) == (None, 1), "through, and one token further"
    assert desk.step() == [(first, 1), (fused, 1), (full, 6)]


def test_a_slice_ends_before_a_bond_that_does_not_fit_and_never_stops_for_it() -> None:
    rows = SparseRows(range(30), [(4, 9), (9, 12), (20, 30)])
    shares = []
    while rows.left:
        shares.append(rows.share(6))
        rows.done += shares[-1]
    assert shares == [4, 5, 6, 5, 10]
    assert SparseRows(range(30), [(4, 9), (9, 12)]).share(12) == 12
    assert SparseRows(range(30), [(4, 9)]).share(0) == 0
    assert SparseRows(range(30), [(4, 9)]).share(99) == 30


def test_only_one_bond_makes_a_step_longer() -> None:
    desk = Desk()
    decoding = desk.add(4)
    desk.step()
    one = prepared(desk, 12, [(0, 12)])
    full = desk.add(30)
    desk.scheduler.waiting.remove(full)
    desk.scheduler.running.append(full)
    two = prepared(desk, 12, [(0, 12)])
    assert desk.step() == [(decoding, 1), (one, 12)]
    assert desk.step() == [(decoding, 1), (one, 1), (full, 6)]
    for seq in (one, full):
        desk.scheduler.remove(seq)
    assert desk.step() == [(decoding, 1), (two, 12)]


def test_a_prepared_prompt_that_loses_its_pages_begins_again() -> None:
    desk = Desk(pages=48)
    first = desk.add(8)
    desk.step()
    fused = prepared(desk, 60, [])
    for _ in range(4):
        desk.step()
    assert fused.sparse is not None
    assert fused.sparse.done == 4 * 7
    assert desk.step() == [(first, 1)]  # its thirteenth token needs a fourth page
    assert (fused.preempted, fused.pages, fused.computed, fused.sparse) == (1, 0, 0, None)
    assert fused.needed == fused.known == 180


def test_who_is_alone() -> None:
    desk = Desk()
    seq, guess = desk.add(4, own=True), desk.add(3, held=True)
    assert not desk.scheduler.is_alone(seq)
    while guess.needed:
        desk.step()
    desk.scheduler.remove(seq)
    new = desk.add(4, own=True)
    assert not desk.scheduler.is_alone(guess)
    desk.scheduler.next_step()
    assert desk.scheduler.is_alone(new), "what a guess had to compute is computed"
