"""What could not be done is tried again until it is, and no longer than it may be."""

import threading

from kvweave.app.library.library_kv import Retries
from kvweave.errors import CorpusError
from worlds.extras import wait_until


def test_it_is_tried_until_it_is_done_and_can_begin_anew() -> None:
    results = [False, True]
    retries = Retries(lambda: results.pop(0), first_s=0.01)
    retries.start()
    retries.start()  # one at a time
    wait_until(lambda: not results)
    wait_until(lambda: not any(t.name == "retries" for t in threading.enumerate()))
    results.append(True)
    retries.start()
    wait_until(lambda: not results)
    retries.close()


def test_an_attempt_that_fails_is_followed_by_another_and_closing_ends_it() -> None:
    tried = threading.Semaphore(0)

    def fail() -> bool:
        tried.release()
        raise CorpusError("the folder is locked")

    retries = Retries(fail, first_s=0.01)
    retries.start()
    assert all(tried.acquire(timeout=10) for _ in range(3))
    retries.close()
    retries.start()
    assert not any(t.name == "retries" for t in threading.enumerate())
