"""Paths that come back are computed once; others are fused as before."""

import pytest

from kvweave.plan.recent_requests import PathReturns, TurnShare, is_worth_computing
from kvweave.types import ChunkId


def path(text: str) -> list[ChunkId]:
    return [ChunkId(name) for name in text]


def test_a_path_is_counted_by_its_order_and_not_by_its_chunks() -> None:
    returns = PathReturns()
    assert returns.count(path("abc")) == returns.count([]) == 0
    for text in ("abc", "abc", "acb", "abd"):
        returns.push(path(text))
    assert returns.count(path("abc")) == 2
    assert returns.count(path("ab")) == 3
    assert returns.count(path("ac")) == returns.count(path("acb")) == 1
    assert returns.count(path("b")) == returns.count(path("bca")) == 0


def test_what_came_back_is_the_longest_common_beginning() -> None:
    returns = PathReturns()
    returns.push(path("abc"))
    assert [returns.num_known_parts(path(text)) for text in ("abc", "abd", "bac", "abcd", "")] == [
        3, 2, 0, 3, 0,
    ]  # fmt: skip


def test_old_requests_are_forgotten() -> None:
    returns = PathReturns(window=2)
    for text in ("ab", "cd", "ce"):
        returns.push(path(text))
    assert returns.count(path("ab")) == 0
    assert returns.count(path("c")) == 2
    assert returns.num_known_parts(path("a")) == 0


@pytest.mark.parametrize(
    ("returns", "is_worth"), [(0, False), (1, False), (4, False), (5, True), (50, True)]
)
def test_it_pays_from_as_many_returns_as_earn_it_back(returns: int, is_worth: bool) -> None:
    # exact costs 0.8 s more now, and 0.16 s less each time
    assert is_worth_computing(1.0, 0.2, 0.04, returns) is is_worth


def test_an_exact_option_that_is_cheaper_anyway_needs_no_returns_to_win() -> None:
    assert is_worth_computing(1.0, 1.2, 1.1, 1)


def test_never_more_than_twice_what_foresight_would_pay() -> None:
    """A ski rental: whatever number of times a path comes, at most twice the cheapest."""
    exact_s, fused_s, known_s = 1.0, 0.25, 0.05
    for times in range(1, 60):
        paid, is_known = 0.0, False
        for before in range(times):
            if is_known:
                paid += known_s
            elif is_worth_computing(exact_s, fused_s, known_s, before):
                paid, is_known = paid + exact_s, True
            else:
                paid += fused_s
        best = min(times * fused_s, exact_s + (times - 1) * known_s)
        assert paid <= 2 * best + 1e-9, times


def test_first_turns_are_expected_to_go_on_where_conversations_are_common() -> None:
    turns = TurnShare()
    assert not turns.is_likely
    for _ in range(3):
        turns.push(True)
    assert turns.is_likely
    for _ in range(10):
        turns.push(False)
    assert not turns.is_likely
