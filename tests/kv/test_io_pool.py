"""A pool of IO threads: hangs and bugs show."""

import threading
import time

import pytest

from kvweave.kv.tier_slot import IoPool


def test_a_pool_whose_threads_hang_says_for_how_long() -> None:
    pool = IoPool("test", 2)
    gate = threading.Event()
    assert pool.stalled_s() == 0.0
    for _ in range(3):
        pool.submit(lambda: gate.wait() and None)
    time.sleep(0.05)
    assert pool.stalled_s() >= 0.05
    pool.close(timeout_s=0.05)  # returns although two threads hang
    gate.set()
    assert not pool.submit(lambda: None)


def test_a_bug_in_an_io_job_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    bugs: list[int] = []
    pool = IoPool("test", 1, on_bug=lambda: bugs.append(1))

    def raises() -> None:
        raise ZeroDivisionError("a bug")

    pool.submit(raises)
    pool.close(5)
    assert bugs == [1]
    assert "which is a bug" in caplog.text
