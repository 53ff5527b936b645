"""Of the sequences that wait, the one that the cache serves best goes first; none starves."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.engine.progress import Progress
from kvweave.engine.waiting_queue import WINDOW, WaitingQueue, order_priority
from kvweave.errors import ConfigError


@dataclass(eq=False)
class Asked:
    name: str
    cached: int = 0
    compute: int = 1
    held: bool = False
    arrival: int = 0

    def __post_init__(self) -> None:
        self.progress = Progress(self.arrival, self.cached + self.compute, self.held)


def make_queue(*asked: tuple[str, int, int], window: int = WINDOW) -> WaitingQueue[Asked]:
    queue: WaitingQueue[Asked] = WaitingQueue(lambda a: (a.cached, a.compute), window)
    for each in asked:
        queue.push(Asked(*each))
    return queue


def pop(queue: WaitingQueue[Asked]) -> str:
    """Let the next one run."""
    asked = queue.best()
    assert asked is not None
    queue.remove(asked)
    return asked.name


def test_more_cached_goes_first_and_less_to_compute_goes_first() -> None:
    assert pop(make_queue(("a", 1, 2), ("b", 2, 2))) == "b"
    assert pop(make_queue(("a", 2, 2), ("b", 2, 1))) == "b"


def test_equals_leave_in_order_of_arrival() -> None:
    queue = make_queue(("a", 1, 1), ("b", 1, 1))
    assert [pop(queue), pop(queue)] == ["a", "b"]
    assert queue.best() is None


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


class History:
    """A queue, and for each that waits those that came later and went first while it was real."""

    WINDOW = 3

    def __init__(self) -> None:
        self.cached: dict[Asked, int] = {}
        self.coming: set[Asked] = set()  # those that wait for what another computes
        self.queue: WaitingQueue[Asked] = WaitingQueue(
            lambda asked: (self.cached[asked], 10), self.WINDOW, self.coming.__contains__
        )
        self.overtaken: dict[Asked, int] = {}  # of those that are not held
        self.ran: list[Asked] = []

    def push(self, cached: int, held: bool) -> None:
        asked = Asked(f"{len(self.cached)}", held=held, arrival=len(self.cached))
        self.cached[asked] = cached
        self.queue.push(asked)
        if not held:
            self.overtaken[asked] = 0

    def release(self, pick: int) -> None:
        held = [asked for asked in self.queue.sequences() if asked.progress.held]
        if held:
            released = held[pick % len(held)]
            released.progress.held = False
            self.overtaken[released] = 0

    def cancel(self, pick: int) -> None:
        if len(self.queue):
            gone = self.queue.sequences()[pick % len(self.queue)]
            self.queue.remove(gone, counts=False)
            self.overtaken.pop(gone, None)

    def run(self) -> None:
        asked = self.queue.best()
        if asked is None:
            assert self.coming.issuperset(self.queue.sequences())
            return
        if asked.progress.held:
            assert self.coming.issuperset(self.overtaken), "a guess before a real one"
        else:
            del self.overtaken[asked]
            for other in self.overtaken:
                self.overtaken[other] += other.arrival < asked.arrival
            assert all(times <= self.WINDOW for times in self.overtaken.values()), "starving"
        self.queue.remove(asked)
        self.ran.append(asked)

    def follow(self, pick: int) -> None:
        if len(self.queue):
            self.coming ^= {self.queue.sequences()[pick % len(self.queue)]}

    def preempt(self, pick: int) -> None:
        """One that ran waits again; a held one would be parked."""
        if self.ran:
            back = self.ran.pop(pick % len(self.ran))
            back.progress.held = False
            back.progress.restart()
            self.queue.push(back)
            self.overtaken[back] = 0


EVENTS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 50), st.booleans()),
    st.tuples(st.sampled_from(["release", "cancel", "preempt", "follow"]), st.integers(0, 99)),
    st.just(("run",)),
    st.just(("run",)),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=120))
def test_the_bound_holds_in_every_history(events: list[tuple[object, ...]]) -> None:
    """Held, released, cancelled and preempted ones among those that wait, and some that wait for
    what others compute."""
    history = History()
    for name, *how in events:
        getattr(history, str(name))(*how)
    history.coming.clear()
    while len(history.queue):
        history.run()


def test_the_bound_holds_behind_a_guess_that_stays_in_front() -> None:
    queue = make_queue()
    queue.push(Asked("guess", held=True))
    queue.push(Asked("patient", 0, 100))
    left = []
    for turn in range(2 * WINDOW):
        queue.push(Asked(f"pushy{turn}", 100 + turn, 1))
        left.append(pop(queue))
    assert left.index("patient") == WINDOW


def test_guesses_hide_none_of_those_behind_them() -> None:
    queue = make_queue(window=4)
    for _ in range(9):
        queue.push(Asked("guess", cached=9, held=True))
    queue.push(Asked("real"))
    assert pop(queue) == "real"
    assert pop(queue) == "guess"


def test_a_guess_counts_from_its_release_and_stands_where_it_came() -> None:
    queue = make_queue(window=2)
    guess = Asked("guess", held=True, arrival=1)
    queue.push(guess)
    for turn in range(5):
        queue.push(Asked(f"early{turn}", arrival=2 + turn))
        pop(queue)
    guess.progress.held = False
    order = []
    for turn in range(3):
        queue.push(Asked(f"late{turn}", cached=9, arrival=9 + turn))
        order.append(pop(queue))
    assert order == ["late0", "late1", "guess"]


def test_one_that_lost_its_pages_goes_first_unless_another_starves() -> None:
    queue = make_queue(window=2)
    back = Asked("back", arrival=5)
    back.progress.restart()
    queue.push(Asked("patient", arrival=1))
    for _ in range(2):
        queue.push(back)
        assert pop(queue) == "back"
    queue.push(back)
    assert [pop(queue), pop(queue)] == ["patient", "back"]


def test_who_waits_for_what_another_computes_does_not_starve() -> None:
    queue: WaitingQueue[Asked] = WaitingQueue(lambda a: (1, 1), 3, lambda a: a.name == "follower")
    queue.push(Asked("follower"))
    assert queue.best() is None
    left = []
    for turn in range(4):
        queue.push(Asked(f"other{turn}"))
        left.append(pop(queue))
    assert left == ["other0", "other1", "other2", "follower"]


def test_those_who_wait_for_others_hide_none_behind_them() -> None:
    queue: WaitingQueue[Asked] = WaitingQueue(lambda a: (1, 1), 3, lambda a: a.name == "follower")
    for _ in range(9):
        queue.push(Asked("follower"))
    queue.push(Asked("other"))
    assert pop(queue) == "other"


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
