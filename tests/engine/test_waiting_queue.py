"""Of the sequences that wait, the one that the cache serves best goes first; none starves."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.engine.scheduler import WINDOW, Progress, WaitingQueue, order_priority
from kvweave.errors import ConfigError


@dataclass(eq=False)
class Asked:
    name: str
    cached: int = 0
    compute: int = 1
    held: bool = False

    @property
    def progress(self) -> Progress:
        return Progress(0, self.cached + self.compute, self.held)


def make_queue(*asked: tuple[str, int, int], window: int = WINDOW) -> WaitingQueue[Asked]:
    queue: WaitingQueue[Asked] = WaitingQueue(lambda a: (a.cached, a.compute), window)
    for each in asked:
        queue.push(Asked(*each))
    return queue


def pop(queue: WaitingQueue[Asked]) -> str:
    """Let the next one run."""
    asked = queue.best()
    queue.remove(asked)
    return asked.name


def test_more_cached_goes_first_and_less_to_compute_goes_first() -> None:
    assert pop(make_queue(("a", 1, 2), ("b", 2, 2))) == "b"
    assert pop(make_queue(("a", 2, 2), ("b", 2, 1))) == "b"


def test_equals_leave_in_order_of_arrival() -> None:
    queue = make_queue(("a", 1, 1), ("b", 1, 1))
    assert [pop(queue), pop(queue)] == ["a", "b"]
    with pytest.raises(IndexError):
        queue.best()


def test_priorities_are_read_again_at_every_pop() -> None:
    cached = {"a": 0, "b": 5, "c": 1}
    queue: WaitingQueue[Asked] = WaitingQueue(lambda r: (cached[r.name], 10))
    for name in "abc":
        queue.push(Asked(name))
    assert pop(queue) == "b"
    cached["a"] = 9
    assert pop(queue) == "a"


def test_a_request_behind_the_window_is_not_looked_at() -> None:
    queue = make_queue(*[("cold", 0, 1)] * 4, ("hot", 9, 1), window=4)
    assert pop(queue) == "cold"
    assert pop(queue) == "hot"


def test_none_is_overtaken_more_often_than_the_window_says() -> None:
    """The worst case: better requests keep arriving."""
    queue = make_queue(("patient", 0, 100))
    for turn in range(WINDOW + 1):
        queue.push(Asked(f"pushy{turn}", 100 + turn, 1))
        if pop(queue) == "patient":
            assert turn == WINDOW
            return
    raise AssertionError("starved")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=80))
def test_the_bound_holds_for_everyone(arrivals: list[tuple[int, int, bool]]) -> None:
    queue = make_queue(window=3)
    left: list[int] = []
    for number, (cached, compute, runs) in enumerate(arrivals):
        queue.push(Asked(str(number), cached, compute))
        if runs:
            left.append(int(pop(queue)))
    while len(queue):
        left.append(int(pop(queue)))
    assert sorted(left) == list(range(len(arrivals)))
    for place, number in enumerate(left):
        assert sum(1 for earlier in left[:place] if earlier > number) <= 3


def test_nothing_to_compute_is_no_division_by_zero() -> None:
    assert order_priority(10, 0) == 10.0
    with pytest.raises(ConfigError, match="window"):
        make_queue(window=0)


def test_grouping_requests_raises_hits_of_a_cache_of_one() -> None:
    """RAGCache's example: alternating requests hit nothing in order, grouped they hit often."""

    def hits(window: int) -> int:
        cached = ""
        queue: WaitingQueue[Asked] = WaitingQueue(lambda r: (int(r.name == cached), 1), window)
        for i in range(30):
            queue.push(Asked("D1" if i % 2 else "D2"))
        found = 0
        while len(queue):
            document = pop(queue)
            found += document == cached
            cached = document
        return found

    assert hits(window=1) == 0
    assert hits(window=6) >= 15


def test_what_is_cached_goes_first_but_a_cold_one_does_not_wait_for_ever() -> None:
    queue = make_queue(("cold", 0, 10), *[("warm", 9, 10)] * 99)
    order = [pop(queue) for _ in range(100)]
    assert order.index("cold") == WINDOW


def test_speculation_overtakes_no_other() -> None:
    queue = make_queue()
    queue.push(Asked("guess", cached=9, compute=10, held=True))
    queue.push(Asked("real", cached=0, compute=10))
    assert pop(queue) == "real"
