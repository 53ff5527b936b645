"""A breaker leaves a failing tier alone, tries again, and says so once."""

import pytest

from kvweave.kv.tier_slot import Breaker


def test_a_breaker_opens_after_failures_probes_once_and_doubles_its_rest() -> None:
    now = [0.0]
    breaker = Breaker("disk reads", max_failures=2, rest_s=5.0, clock=lambda: now[0])
    breaker.record_failure("one")
    assert breaker.allows()
    breaker.record_failure("two")
    assert breaker.is_open
    assert not breaker.allows()
    now[0] = 5.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.record_failure("three")
    now[0] = 14.0
    assert not breaker.allows()
    now[0] = 15.0
    assert breaker.allows()
    breaker.record_success()
    assert breaker.allows()
    assert not breaker.is_open


def test_a_breaker_says_once_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    breaker = Breaker("disk writes", max_failures=1, rest_s=60.0)
    for _ in range(5):
        breaker.record_failure("free some space")
    assert [r.getMessage() for r in caplog.records].count(
        "disk writes fail and rest for a while; requests recompute. free some space"
    ) == 1
