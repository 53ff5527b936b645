"""Who computes what next, in plain numbers."""

from dataclasses import dataclass, replace

from kvweave.engine.config import EngineConfig
from kvweave.engine.progress import Progress, SparseRows
from kvweave.engine.scheduler import Scheduler

CFG = EngineConfig(page_tokens=4, max_running=3, step_rows=8, alone_rows=16, background_rows=3)
GUESSING = replace(CFG, guess_rows=4)


@dataclass(eq=False)
class Seq:
    """A sequence that is nothing but its progress."""

    progress: Progress
    cached: int = 0


class World:
    """A pool of pages as a number, and a scheduler over it."""

    def __init__(self, pages: int = 100, cfg: EngineConfig = CFG) -> None:
        self.free = pages
        self.outside: set[Seq] = set()  # those that have to load something before they wait
        self.leaders: dict[Seq, Seq] = {}  # who computes what another would
        self.scheduler: Scheduler[Seq] = Scheduler(cfg, self, self)

    def lengths(self, sequence: Seq) -> tuple[int, int]:
        return sequence.cached, sequence.progress.known - sequence.cached

    def is_coming(self, sequence: Seq) -> bool:
        leader = self.leaders.get(sequence)
        return leader in self.scheduler.running and leader.progress.needed > 1

    def admit(self, sequence: Seq) -> bool:
        return self.grow(sequence, -(-sequence.progress.known // CFG.page_tokens))

    def grow(self, sequence: Seq, num_pages: int) -> bool:
        if num_pages > self.free:
            return False
        self.free -= num_pages
        sequence.progress.num_pages += num_pages
        return True

    def retire(self, sequence: Seq) -> None:
        self.free += sequence.progress.num_pages
        sequence.progress.num_pages = 0

    def load_first(self, sequence: Seq, *, others_ready: bool) -> bool:
        return sequence in self.outside

    def add(
        self,
        known: int,
        *,
        held: bool = False,
        own: bool = False,
        background: bool = False,
        tenant: str = "",
    ) -> Seq:
        rank = self.scheduler.ranks.rank(tenant, known)
        progress = Progress(rank, known, held, own_step=own, background=background, tenant=tenant)
        sequence = Seq(progress)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[Seq, int]]:
        """Compute what is asked for; a sequence that is through knows one token more."""
        slices = self.scheduler.next_step()
        for sequence, rows in slices:
            progress = sequence.progress
            if progress.own_step:
                progress.computed, progress.own_step = progress.known, False
            progress.advance(rows)
            if not progress.needed and not progress.held:
                progress.known += 1
        return [(each.sequence, each.num_rows) for each in slices]


def test_a_long_prompt_is_computed_in_slices() -> None:
    world = World()
    sequence = world.add(40)
    assert world.step() == [(sequence, 16)]
    assert world.step() == [(sequence, 16)]
    assert world.step() == [(sequence, 8)]
    assert world.step() == [(sequence, 1)]


def test_who_decodes_comes_first_and_bounds_the_step() -> None:
    world = World()
    first = world.add(4)
    world.step()
    second = world.add(40)
    assert world.step() == [(first, 1), (second, 7)]
    assert world.step() == [(first, 1), (second, 7)]


def test_no_more_run_than_may() -> None:
    world = World()
    sequences = [world.add(1) for _ in range(5)]
    assert [sequence for sequence, _ in world.step()] == sequences[:3]
    world.scheduler.remove(sequences[0])
    assert sequences[3] in [sequence for sequence, _ in world.step()]


def test_who_has_to_get_something_first_waits_outside_and_comes_back_in_front() -> None:
    world = World(pages=4)
    first, second = world.add(8), world.add(8)
    world.outside.add(second)
    for _ in range(5):
        world.step()
    assert second.progress.preempted == 1
    third = world.add(1)
    assert world.scheduler.waiting.sequences() == [third]
    world.outside.remove(second)
    world.scheduler.add(second)
    assert world.scheduler.waiting.sequences() == [second, third]
    assert first in world.scheduler.running


def test_a_released_guess_that_has_to_get_something_first_does_not_wait_for_others() -> None:
    world = World(pages=4)
    world.add(8)
    guess = world.add(8, held=True)
    world.outside.add(guess)
    for _ in range(5):
        world.step()
    assert world.scheduler.parked == [guess]
    world.scheduler.release(guess)
    assert not world.scheduler.parked
    assert guess not in world.scheduler.waiting


def test_when_pages_run_out_the_last_to_come_starts_again() -> None:
    world = World(pages=4)
    first, second = world.add(8), world.add(8)
    world.step()
    assert (first.progress.num_pages, second.progress.num_pages) == (2, 2)
    assert world.step() == [(first, 1)]  # its ninth token needs a third page
    left = second.progress
    assert (left.computed, left.num_pages, left.preempted) == (0, 0, 1)
    assert left.known == 9, "tokens that were given out stay"
    world.scheduler.remove(first)
    world.retire(first)
    assert world.step() == [(second, 9)]


def test_speculation_gives_way_before_anybody_else() -> None:
    world = World(pages=5)
    first = world.add(8)
    guess = world.add(8, held=True)
    last = world.add(4)
    world.step()
    assert world.step() == [(first, 1), (last, 1)]
    assert guess in world.scheduler.parked
    assert guess.progress.num_pages == 0
    world.scheduler.release(guess)
    assert guess in world.scheduler.waiting


def test_a_held_prompt_is_computed_and_goes_no_further() -> None:
    world = World()
    guess = world.add(5, held=True)
    assert world.step() == [(guess, 5)]
    assert world.step() == []
    world.scheduler.release(guess)
    guess.progress.known += 1
    assert world.step() == [(guess, 1)]


def test_steps_of_their_own_take_turns_with_the_common_one() -> None:
    world = World()
    plain = world.add(4)
    world.step()
    fused = [world.add(20, own=True) for _ in range(2)]
    order = [[sequence for sequence, _ in world.step()] for _ in range(5)]
    assert order[0] == [plain]
    assert order[1] == [fused[0]]
    assert plain in order[2]
    assert order[3] == [fused[1]]


def test_a_speculation_that_leaves_for_another_has_no_rows_in_the_step() -> None:
    world = World(pages=10, cfg=GUESSING)
    guess = world.add(36, held=True)
    assert world.step() == [(guess, 4)]
    new = world.add(20)
    assert world.step() == [(new, 12)]
    assert guess.progress.num_pages == guess.progress.computed == 0
    assert world.scheduler.parked == [guess]
    assert world.free == 5


def test_when_a_speculation_leaves_in_vain_the_others_go_on() -> None:
    world = World(pages=10, cfg=GUESSING)
    guess = world.add(12, held=True)
    assert world.step() == [(guess, 4)]
    own = world.add(20, own=True)
    assert world.step() == [(guess, 4)]  # and the other is in
    world.add(40)  # does not fit beside it, with or without the guess
    assert world.step() == [(own, 0)]
    assert world.step() == [(own, 1)]
    assert world.scheduler.parked == [guess]


def prepared(world: World, num_rows: int, bonds: list[tuple[int, int]]) -> Seq:
    """A fused prompt of which every third token is computed, as its preparation leaves it."""
    sequence = world.add(3 * num_rows)
    assert world.admit(sequence)
    world.scheduler.waiting.remove(sequence)
    world.scheduler.running.append(sequence)
    sequence.progress.join(SparseRows(range(2, 3 * num_rows, 3), bonds))
    return sequence


def test_the_rows_of_a_prepared_prompt_are_slices_like_any_other() -> None:
    world = World()
    first = world.add(4)
    world.step()
    fused, full = prepared(world, 10, []), world.add(20)
    assert (fused.progress.needed, fused.progress.computed) == (10, 2)
    assert world.step() == [(first, 1), (fused, 7)]
    assert (fused.progress.needed, fused.progress.computed) == (3, 2 + 3 * 7)
    assert world.step() == [(first, 1), (fused, 3), (full, 4)]
    progress = fused.progress
    assert (progress.sparse, progress.needed) == (None, 1), "through, and one token further"
    assert world.step() == [(first, 1), (fused, 1), (full, 6)]


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
    world = World()
    decoding = world.add(4)
    world.step()
    one = prepared(world, 12, [(0, 12)])
    full = world.add(30)
    world.scheduler.waiting.remove(full)
    world.scheduler.running.append(full)
    two = prepared(world, 12, [(0, 12)])
    assert world.step() == [(decoding, 1), (one, 12)]
    assert world.step() == [(decoding, 1), (one, 1), (full, 6)]
    for sequence in (one, full):
        world.scheduler.remove(sequence)
    assert world.step() == [(decoding, 1), (two, 12)]


def test_a_prepared_prompt_that_loses_its_pages_begins_again() -> None:
    world = World(pages=48)
    first = world.add(8)
    world.step()
    fused = prepared(world, 60, [])
    for _ in range(4):
        world.step()
    assert fused.progress.sparse is not None
    assert fused.progress.sparse.done == 4 * 7
    assert world.step() == [(first, 1)]  # its thirteenth token needs a fourth page
    left = fused.progress
    assert (left.preempted, left.num_pages, left.computed, left.sparse) == (1, 0, 0, None)
    assert left.needed == left.known == 180


def test_who_is_alone() -> None:
    world = World()
    sequence, guess = world.add(4, own=True), world.add(3, held=True)
    assert not world.scheduler.is_alone(sequence)
    while guess.progress.needed:
        world.step()
    world.scheduler.remove(sequence)
    new = world.add(4, own=True)
    assert not world.scheduler.is_alone(guess)
    world.scheduler.next_step()
    assert world.scheduler.is_alone(new), "what a guess had to compute is computed"


def test_a_guess_is_computed_a_few_rows_at_a_time() -> None:
    world = World(cfg=GUESSING)
    guess = world.add(10, held=True)
    steps = [world.step() for _ in range(4)]
    assert steps == [[(guess, 4)], [(guess, 4)], [(guess, 2)], []]


def test_a_guess_that_is_released_hurries() -> None:
    world = World(cfg=GUESSING)
    guess = world.add(40, held=True)
    world.step()
    world.scheduler.release(guess)
    assert world.step() == [(guess, 16)]


def test_a_guess_comes_behind_one_that_arrived_later() -> None:
    world = World(cfg=GUESSING)
    guess = world.add(10, held=True)
    world.step()
    later = world.add(32)
    assert world.step() == [(guess, 4), (later, 12)]  # it was running before the other came in
    assert world.step() == [(later, 16)]
    assert world.step() == [(later, 4), (guess, 2)]


def test_the_background_is_computed_while_no_other_has_a_row() -> None:
    world = World()
    idle = world.add(8, background=True)
    assert world.step() == [(idle, 3)]
    first = world.add(20)
    assert [world.step() for _ in range(3)] == [[(first, 16)], [(first, 4)], [(first, 1)]]
    guess = world.add(5, held=True)
    assert world.step() == [(first, 1), (guess, 5)]
    world.scheduler.remove(first)
    assert [world.step() for _ in range(3)] == [[(idle, 3)], [(idle, 2)], [(idle, 1)]]


def test_the_background_is_neither_busy_nor_in_the_way() -> None:
    world = World()
    idle = world.add(9, background=True)
    assert not world.scheduler.is_busy
    world.step()
    assert not world.scheduler.is_busy
    new = [world.add(1) for _ in range(3)]
    assert world.scheduler.is_busy
    assert [one for one, _ in world.step()] == new, "three may run, and it is none of them"
    assert idle in world.scheduler.running


def test_one_at_a_time_is_computed_in_the_background() -> None:
    world = World()
    first, second = world.add(4, background=True), world.add(4, background=True)
    assert [world.step() for _ in range(3)] == [[(first, 3)], [(first, 1)], [(first, 1)]]
    world.scheduler.remove(first)
    assert world.step() == [(second, 3)]
    world.scheduler.remove(second)
    assert world.step() == []


def test_the_background_gives_its_pages_back_before_anybody_else() -> None:
    world = World(pages=6)
    idle = world.add(8, background=True)
    world.step()
    guess = world.add(8, held=True)
    world.step()
    new = world.add(8)
    assert world.step() == [(new, 8)]
    assert world.scheduler.running == [idle, guess, new]
    assert world.step() == [(new, 1)]
    assert world.scheduler.background == [idle]
    assert (idle.progress.num_pages, idle.progress.computed) == (0, 0)
    assert guess in world.scheduler.running
    world.scheduler.remove(new)
    world.retire(new)
    assert world.step() == [(idle, 3)]


def test_the_background_leaves_for_a_guess_that_needs_its_pages() -> None:
    world = World(pages=4)
    idle = world.add(12, background=True)
    world.step()
    guess = world.add(8, held=True)
    assert world.step() == [(guess, 8)]
    assert world.scheduler.background == [idle]
    assert world.step() == [], "there is no room for it, and a guess does not leave for it"
    world.scheduler.remove(guess)
    world.retire(guess)
    assert world.step() == [(idle, 3)]


def test_in_the_background_who_fills_the_pool_by_itself_begins_again() -> None:
    world = World(pages=3)
    guess = world.add(4, held=True)
    world.step()
    idle = world.add(8, background=True)
    steps = [world.step() for _ in range(4)]
    assert steps == [[(idle, 3)], [(idle, 3)], [(idle, 2)], []]  # its ninth token has no page
    world.scheduler.remove(guess)
    world.retire(guess)
    assert world.step() == [(idle, 3)]
    assert idle.progress.preempted == 1


def test_a_fused_prompt_in_the_background_has_its_own_step_while_none_else_has_one() -> None:
    world = World()
    idle = world.add(8, own=True, background=True)
    new = world.add(16)
    assert world.step() == [(new, 16)]
    assert world.step() == [(new, 1)]
    world.scheduler.remove(new)
    assert world.step() == [(idle, 0)]
    assert world.step() == [(idle, 1)]


def test_who_waits_for_the_tokens_of_another_holds_up_no_one() -> None:
    world = World()
    first, second, third = world.add(20), world.add(6), world.add(6)
    world.leaders[second] = first
    assert world.step() == [(first, 16)]
    assert world.step() == [(first, 4), (third, 6)]
    assert world.step() == [(first, 1), (third, 1), (second, 6)]


def test_who_waits_for_one_that_is_gone_goes_on() -> None:
    world = World()
    first, second = world.add(20), world.add(6)
    world.leaders[second] = first
    assert world.step() == [(first, 16)]
    world.scheduler.remove(first)
    assert world.step() == [(second, 6)]


def test_who_takes_its_own_step_is_left_alone_by_the_step_beside_it() -> None:
    world = World(pages=5)
    first, own = world.add(4), world.add(12, own=True)
    world.step()
    world.scheduler.next_step()  # `own`, which came last, is let in and begins
    assert own in world.scheduler.running
    assert world.free == 1
    for _ in range(4):  # up to the end of its second page
        assert world.scheduler.step_beside([own]) == [(first, 1)]
        first.progress.advance(1)
        first.progress.known += 1
    assert world.free == 0
    assert world.scheduler.step_beside([own]) == []
    assert own in world.scheduler.running
    assert first not in world.scheduler.running, "it gives its own pages back instead"
    assert world.scheduler.preemptions == 1


def test_guesses_have_no_rows_beside_an_own_step() -> None:
    world = World()
    first = world.add(4)
    world.step()
    guess = world.add(12, held=True)
    own = world.add(12, own=True)
    world.step()
    assert own in world.scheduler.running
    assert world.scheduler.step_beside([own]) == [(first, 1)]
    assert guess in world.scheduler.running


def test_one_more_is_let_in_beside_an_own_step() -> None:
    world = World()
    own = world.add(4, own=True)
    world.scheduler.next_step()
    assert not world.scheduler.let_in_beside([own]), "nobody waits"
    after, plain = world.add(4, own=True), world.add(4)
    assert world.scheduler.let_in_beside([own])
    assert after in world.scheduler.running
    assert not world.scheduler.let_in_beside([own, after]), "its rows are of a common step"
    assert plain not in world.scheduler.running
    world.scheduler.remove(plain)
    world.add(4, own=True, held=True)
    assert not world.scheduler.let_in_beside([own, after]), "nobody waits for it"
    assert world.scheduler.has_own_step
    own.progress.own_step = after.progress.own_step = False
    assert not world.scheduler.has_own_step


def test_a_draft_takes_what_is_left_and_no_page_from_others() -> None:
    world = World(pages=5)
    first, second = world.add(4), world.add(4)
    world.step()
    for one in (first, second):  # each has a page that is full, and a token more to compute
        one.progress.drafted = 6
    # both get a page for their token; the first has the last one for its draft, of eight rows
    assert world.step() == [(first, 7), (second, 1)]
    assert world.scheduler.preemptions == 0


def test_a_draft_that_gets_no_page_is_cut_to_those_that_are_there() -> None:
    world = World(pages=2)
    sequence = world.add(4)
    world.step()
    sequence.progress.drafted = 6
    assert world.step() == [(sequence, 4)]


def test_only_who_decodes_has_rows_for_a_draft() -> None:
    world = World()
    sequence = world.add(20)
    sequence.progress.drafted = 6
    assert world.step() == [(sequence, 16)]
