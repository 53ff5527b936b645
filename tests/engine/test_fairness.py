"""Tenants share the engine: however many requests one has, another is not kept waiting."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.engine.config import EngineConfig
from kvweave.engine.progress import Progress
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.waiting_queue import FairRanks, share_of

CFG = EngineConfig(page_tokens=4, max_running=4, step_rows=8, alone_rows=16, background_rows=3)


@dataclass(eq=False)
class Seq:
    progress: Progress
    answer: int = 4  # tokens that it will have
    cached: int = 0
    rows: int = 0  # computed for it so far


class World:
    """Pages as a number, a scheduler over them, and answers of a given length."""

    def __init__(self, pages: int = 10_000, cfg: EngineConfig = CFG) -> None:
        self.free = pages
        self.scheduler: Scheduler[Seq] = Scheduler(cfg, self, self)
        self.alive: list[Seq] = []

    def lengths(self, sequence: Seq) -> tuple[int, int]:
        return sequence.cached, sequence.progress.known - sequence.cached

    def is_coming(self, sequence: Seq) -> bool:
        return False

    def admit(self, sequence: Seq) -> bool:
        return self.grow(sequence, -(-sequence.progress.known // 4))

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
        return False

    def add(self, tenant: str, known: int, answer: int = 4, cached: int = 0) -> Seq:
        rank = self.scheduler.ranks.rank(tenant, known)
        sequence = Seq(Progress(rank, known, tenant=tenant), answer, cached)
        self.alive.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> int:
        """Rows that were computed."""
        slices = self.scheduler.next_step()
        for sequence, rows in slices:
            sequence.rows += rows
            sequence.progress.advance(rows)
            if not sequence.progress.needed:
                sequence.answer -= 1
                sequence.progress.known += 1
                if not sequence.answer:
                    self.scheduler.remove(sequence)
                    self.retire(sequence)
                    self.alive.remove(sequence)
        return sum(rows for _, rows in slices)

    def steps_until(self, sequence: Seq) -> int:
        """Steps to its first token."""
        steps, left = 0, sequence.answer
        while sequence.answer == left:
            assert self.step(), "something is always computed"
            steps += 1
        return steps


def test_twelve_of_one_tenant_do_not_keep_another_waiting() -> None:
    world = World()
    for _ in range(12):
        world.add("greedy", 400, answer=200, cached=399)  # the cache would serve them first
    for _ in range(3):
        world.step()
    other = world.add("other", 40)
    assert world.steps_until(other) <= 12
    assert any(one.progress.tenant == "greedy" and not one.rows for one in world.alive)


def test_a_long_prompt_shares_its_steps_with_another_tenant() -> None:
    world = World()
    world.add("greedy", 16_000)
    world.step()
    other = world.add("other", 64)
    assert world.steps_until(other) <= 10, "half of the rows are its own"


def test_one_that_has_all_places_gives_way() -> None:
    world = World()
    for _ in range(4):
        world.add("greedy", 4, answer=10_000)
    for _ in range(5):
        world.step()
    assert len(world.scheduler.running) == 4
    other = world.add("other", 4)
    assert world.steps_until(other) <= 2
    running = [one.progress.tenant for one in world.scheduler.running]
    assert sorted(running) == ["greedy", "greedy", "greedy", "other"]
    assert world.scheduler.preemptions == 1


def test_one_that_has_all_pages_gives_way() -> None:
    world = World(pages=100, cfg=replace(CFG, max_running=100))
    for _ in range(4):
        world.add("greedy", 96, answer=1000)
    while world.free:
        world.step()
    other = world.add("other", 40)
    assert world.steps_until(other) <= 8


def test_a_tenant_alone_is_served_in_order_and_is_not_preempted_for_itself() -> None:
    world = World()
    sequences = [world.add("one", 8, answer=50) for _ in range(8)]
    ranks = [one.progress.arrival for one in sequences]
    assert ranks == sorted(set(ranks))
    for _ in range(20):
        world.step()
    assert world.scheduler.running == sequences[:4]
    assert not world.scheduler.preemptions


LOADS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 20)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(loads=LOADS, pages=st.integers(40, 200))
def test_every_tenant_that_waits_soon_has_a_sequence_running(
    loads: list[tuple[str, int, int]], pages: int
) -> None:
    """Whoever has something gets something, and everything ends."""
    world = World(pages=pages)
    for tenant, known, answer in loads:
        world.add(tenant, known, answer)
    unserved = dict.fromkeys("abc", 0)
    for _ in range(20_000):
        if not world.alive:
            break
        assert world.step(), "never idle while there is work"
        running = {one.progress.tenant for one in world.scheduler.running}
        for tenant in unserved:
            waits = any(one.progress.tenant == tenant for one in world.alive)
            unserved[tenant] = unserved[tenant] + 1 if waits and tenant not in running else 0
            # at most a prompt of each other tenant is computed first, a part of the rows each step
            assert unserved[tenant] <= 40
    assert not world.alive
    assert world.free == pages


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=200))
def test_tenants_that_always_have_requests_get_equal_shares(costs: list[tuple[str, int]]) -> None:
    """Served one by one in order of rank, no tenant is ahead by more than its longest request and
    the other's."""
    ranks = FairRanks()
    queue = sorted((ranks.rank(tenant, cost), tenant, cost) for tenant, cost in costs)
    longest = {t: max((c for tenant, c in costs if tenant == t), default=0) for t in "ab"}
    served = {"a": 0, "b": 0}
    left = {t: sum(tenant == t for tenant, _ in costs) for t in "ab"}
    for rank, tenant, cost in queue:
        ranks.advance_to(rank)
        served[tenant] += cost
        left[tenant] -= 1
        if all(left.values()):
            assert abs(served["a"] - served["b"]) <= longest["a"] + longest["b"]


def test_one_that_was_away_gains_nothing_by_it() -> None:
    ranks = FairRanks()
    for _ in range(10):
        ranks.advance_to(ranks.rank("busy", 10))
    late = [ranks.rank("late", 10) for _ in range(3)]
    assert late == [90.0, 100.0, 110.0], "from where the other is now, not from the beginning"


def test_names_that_a_client_invents_are_one_share() -> None:
    assert [share_of(n) for n in ("acme", "acme/x", "acme/y/z")] == ["acme"] * 3
    assert [share_of(n) for n in ("", "/x", "/y")] == ["", "/x", "/y"]
