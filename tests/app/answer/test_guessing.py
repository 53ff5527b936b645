"""The controller of speculative prefill: when a guess begins, when it ends, which one answers."""

import random
from collections.abc import Iterator, Sequence

import pytest

from kvweave.app.answer.guessing import GuessFigures, Speculator, retrieve
from kvweave.app.answer.stages import Found
from kvweave.errors import CorpusError, RequestError
from kvweave.types import Chunk, ChunkId, Hit


def hits(*names: str) -> Found:
    return Found.from_hits([Hit(Chunk(ChunkId(name), "", name, (1,)), 1.0) for name in names])


class Run:
    """A generation that only remembers what was done to it."""

    figures = GuessFigures()

    def __init__(self, found: Found, held: bool) -> None:
        self.top_k = found.ids
        self.held = held
        self.cancelled = False
        self.is_done = False

    def cancel(self) -> None:
        self.cancelled = True

    def release(self) -> None:
        self.held = False


class World:
    """Starts runs and says how many prompts others have in the queue."""

    def __init__(self, queue: Sequence[int] = (), refuses: Sequence[str] = ()) -> None:
        self.runs: list[Run] = []
        self._queue = iter(queue)
        self._refuses = tuple(refuses)

    def start(self, found: Found, held: bool) -> Run:
        if self._refuses and found.ids == self._refuses:
            raise RequestError("the prompt is too long")
        self.runs.append(Run(found, held))
        return self.runs[-1]

    def speculator(
        self, most: int = 2, worth: Sequence[int] | None = None
    ) -> Speculator[Found, Run]:
        def is_worth(stage: int) -> bool:
            return worth is None or stage in worth

        return Speculator(self.start, lambda: next(self._queue, 0), most, is_worth)

    def alive(self) -> list[Run]:
        return [run for run in self.runs if not run.cancelled]


def test_a_list_that_stands_from_the_first_stage_is_started_once_and_released_at_the_end() -> None:
    world = World()
    got = retrieve(iter([hits("a", "b")] * 4), world.speculator())
    assert [run.held for run in world.runs] == [False]
    assert got.generation is world.runs[0]
    assert (got.said.stages, got.said.started, got.said.wrong) == (4, 1, [])
    assert got.said.right is not None
    assert got.said.right.stage == 1
    assert got.said.ahead_s > 0.0


def test_nothing_is_released_before_the_search_is_over() -> None:
    world = World()

    def stages() -> Iterator[Found]:
        for _ in range(3):
            yield hits("a")
            assert [run.held for run in world.runs] == [True]

    retrieve(stages(), world.speculator())
    assert not world.runs[0].held


def test_a_changed_list_ends_the_guess_and_starts_another() -> None:
    world = World()
    got = retrieve(iter([hits("a", "b"), hits("a", "c"), hits("a", "c")]), world.speculator())
    assert [run.cancelled for run in world.runs] == [True, False]
    assert got.generation is world.runs[1]
    assert not world.runs[1].held
    assert [wrong.generation for wrong in got.said.wrong] == [world.runs[0]]
    assert got.said.right is not None
    assert got.said.right.stage == 2


def test_another_order_of_the_same_chunks_is_another_list() -> None:
    world = World()
    got = retrieve(iter([hits("a", "b"), hits("b", "a")]), world.speculator())
    assert [run.top_k for run in world.alive()] == [("b", "a")]
    assert got.generation is world.runs[-1]


def test_a_guess_that_found_the_queue_full_begins_when_it_is_free_with_the_same_list() -> None:
    world = World(queue=[2, 1])
    got = retrieve(iter([hits("a"), hits("a"), hits("a")]), world.speculator(most=2))
    assert len(world.runs) == 1
    assert got.said.queue_full == 1
    assert got.said.right is not None
    assert got.said.right.stage == 2


def test_while_the_queue_is_full_nothing_is_guessed_and_the_answer_still_comes() -> None:
    world = World(queue=[9] * 9)
    got = retrieve(iter([hits("a"), hits("b"), hits("b")]), world.speculator())
    assert [(run.top_k, run.held) for run in world.runs] == [(("b",), False)]
    assert (got.said.queue_full, got.said.right, got.said.ahead_s) == (3, None, 0.0)


def test_a_full_queue_does_not_spare_a_wrong_guess() -> None:
    world = World(queue=[0, 9, 9])
    retrieve(iter([hits("a"), hits("b"), hits("b")]), world.speculator())
    assert [run.cancelled for run in world.runs] == [True, False]


def test_a_guess_that_cannot_be_computed_is_no_error() -> None:
    world = World(refuses=["long"])
    got = retrieve(iter([hits("long"), hits("a")]), world.speculator())
    assert got.generation.top_k == ("a",)
    assert got.said.refused == 1


def test_a_last_list_that_cannot_be_computed_is_the_callers_error() -> None:
    world = World(refuses=["long"])
    with pytest.raises(RequestError, match="too long"):
        retrieve(iter([hits("a"), hits("long")]), world.speculator())
    assert not world.alive()


def test_a_guess_that_failed_is_started_again_when_it_turns_out_right() -> None:
    world = World()

    def stages() -> Iterator[Found]:
        yield hits("a")
        world.runs[0].is_done = True
        yield hits("a")

    got = retrieve(stages(), world.speculator())
    assert got.generation is world.runs[1]


@pytest.mark.parametrize("error", [CorpusError("the server is gone"), KeyboardInterrupt()])
def test_a_search_that_breaks_off_ends_its_guess(error: BaseException) -> None:
    world = World()

    def stages() -> Iterator[Found]:
        yield hits("a")
        raise error

    with pytest.raises(type(error)):
        retrieve(stages(), world.speculator())
    assert len(world.runs) == 1
    assert not world.alive()


def test_a_stage_that_is_not_worth_a_guess_gets_none() -> None:
    world = World()
    got = retrieve(iter([hits("a")] * 4), world.speculator(worth=[3]))
    assert got.said.right is not None
    assert got.said.right.stage == 3
    world = World()
    retrieve(iter([hits("a")] * 4), world.speculator(worth=[]))
    assert [run.held for run in world.runs] == [False]


def test_an_empty_knowledge_base_is_answered_without_a_guess() -> None:
    world = World()
    got = retrieve(iter([hits(), hits()]), world.speculator())
    assert got.generation.top_k == ()
    assert (len(world.runs), got.said.started) == (1, 0)


def test_over_random_searches_one_guess_lives_and_the_last_list_answers() -> None:
    rng = random.Random(7)
    for _ in range(300):
        world = World(queue=[rng.choice([0, 0, 3]) for _ in range(8)])
        lists = [hits(*rng.sample("abc", 2)) for _ in range(rng.randint(1, 6))]
        speculator = world.speculator()

        def stages(lists: list[Found] = lists, world: World = world) -> Iterator[Found]:
            for each in lists:
                yield each
                alive = world.alive()
                assert len(alive) <= 1
                assert all(run.top_k == each.ids and run.held for run in alive)

        got = retrieve(stages(), speculator)
        assert world.alive() == [got.generation]
        assert got.generation.top_k == lists[-1].ids
        assert not got.generation.held
