import pytest

from kvweave.plan.recent_requests import CloseCalls


def test_calibration_is_believed_until_answers_were_seen() -> None:
    assert CloseCalls().share(0.06) == pytest.approx(0.06)


def test_what_is_seen_outweighs_it() -> None:
    calls = CloseCalls()
    for turn in range(40):
        calls.push(is_close=turn % 2 == 0)
    assert 0.35 < calls.share(0.06) < 0.5


def test_answers_that_were_not_fused_let_it_fade() -> None:
    calls = CloseCalls()
    for _ in range(20):
        calls.push(is_close=True)
    seen = calls.share(0.06)
    for _ in range(300):
        calls.push(None)
    assert calls.share(0.06) < 0.1 < seen
