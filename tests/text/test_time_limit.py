"""Code whose time is up ends, and leaves nothing locked."""

import threading
import time

import pytest

from kvweave.text import time_limit
from kvweave.text.time_limit import TimeLimit, TooLong


def spin(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def test_a_block_that_takes_too_long_is_ended() -> None:
    limit = TimeLimit()
    with pytest.raises(TooLong), limit.within(0.1):
        spin(30)


def test_one_that_ends_in_time_is_left_alone() -> None:
    limit = TimeLimit()
    with limit.within(5.0):
        spin(0.05)
    time.sleep(0.3)


def test_blocks_that_end_just_as_their_time_is_up_leave_no_lock_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was raised could arrive between taking the lock and giving it back: from then on every
    chat waited for ever."""
    monkeypatch.setattr(time_limit, "LOOK_S", 0.001)
    limit, outcomes = TimeLimit(), list[str]()

    def act() -> None:
        for turn in range(150):
            try:
                with limit.within(0.004):
                    spin(0.003 + turn % 5 * 0.0007)
                outcomes.append("in time")
            except TooLong:
                outcomes.append("too long")

    threads = [threading.Thread(target=act, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(outcomes) == 450
    assert set(outcomes) == {"in time", "too long"}
