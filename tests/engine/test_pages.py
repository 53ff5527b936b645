"""Pages: nothing leaks, nothing is freed twice, and runs stay long."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvweave.engine.pages import PageAllocator
from kvweave.errors import ConfigError

NUM_PAGES = 12


class Pages(RuleBasedStateMachine):
    """The allocator beside a list of who holds what."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.holders: list[list[int]] = []

    def free(self) -> set[int]:
        return set(range(NUM_PAGES)) - {page for holder in self.holders for page in holder}

    def longest(self) -> int:
        best = run = 0
        for page in range(NUM_PAGES):
            run = run + 1 if page in self.free() else 0
            best = max(best, run)
        return best

    @rule(target=held, count=st.integers(0, NUM_PAGES + 1), after=st.integers(0, NUM_PAGES - 1))
    def take(self, count: int, after: int) -> list[int]:
        free = self.free()
        taken = self.pages.take(count, after)
        if count > len(free):
            assert taken is None
            return []
        assert taken is not None
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= free
        if count and after not in free and after + 1 in free:
            assert taken[0] == after + 1
        self.holders.append(taken)
        return taken

    @rule(target=held, count=st.integers(1, NUM_PAGES))
    def take_run(self, count: int) -> list[int]:
        free, longest = self.free(), self.longest()
        taken = self.pages.take_run(count)
        if count > longest:
            assert taken is None
            return []
        assert taken == list(range(taken[0], taken[0] + count))
        assert set(taken) <= free
        self.holders.append(taken)
        return taken

    @rule(target=held, pages=held)
    def share(self, pages: list[int]) -> list[int]:
        if pages not in self.holders:
            return []
        self.pages.hold(pages)
        self.holders.append(list(pages))
        return list(pages)

    @rule(pages=consumes(held))
    def release(self, pages: list[int]) -> None:
        if pages in self.holders:
            self.holders.remove(pages)
            self.pages.release(pages)

    @invariant()
    def books_balance(self) -> None:
        self.pages.check_integrity()
        assert self.pages.num_free == len(self.free())
        assert self.pages.longest_run() == self.longest()
        for page in range(NUM_PAGES):
            assert self.pages.refs(page) == sum(page in holder for holder in self.holders)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_sequence_grows_where_it_ended() -> None:
    pages = PageAllocator(8)
    first = pages.take(2)
    assert first == [0, 1]
    assert pages.take(2, after=1) == [2, 3]


def test_pages_that_were_given_back_become_one_gap() -> None:
    pages = PageAllocator(8)
    taken = pages.take(8)
    assert taken is not None
    for page in (3, 1, 2):
        pages.release([page])
    assert pages.longest_run() == 3
    assert pages.take_run(4) is None
    assert pages.take_run(3) == [1, 2, 3]


def test_a_page_released_twice_is_a_bug_that_shows() -> None:
    pages = PageAllocator(4)
    taken = pages.take(1)
    assert taken is not None
    pages.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(taken)
    with pytest.raises(AssertionError, match="is free"):
        pages.hold(taken)


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        PageAllocator(0)
