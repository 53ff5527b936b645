"""Retries are a share of requests and a reserve, no more."""

from kvweave.gateway.fleet import RetryBudget


def test_the_reserve_goes_first_and_requests_bring_more() -> None:
    now = [0.0]
    budget = RetryBudget(0.25, 2, clock=lambda: now[0])
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.count_request()
    assert [budget.take(), budget.take()] == [True, False]


def test_it_comes_back_with_time_and_never_beyond_the_reserve() -> None:
    now = [0.0]
    budget = RetryBudget(0.0, 10, clock=lambda: now[0])
    for _ in range(10):
        assert budget.take()
    assert not budget.take()
    now[0] = 5.0
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
    now[0] = 1000.0
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]


def test_without_reserve_and_share_there_is_none() -> None:
    assert not RetryBudget(0.0, 0).take()
