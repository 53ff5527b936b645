"""How long a server is deaf: /healthz asked again and again while something is done to it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

# A machine whose host gives half of the time to others has stood still for 3 s; what a server was
# deaf for took 8 to 90 s. bench/fault_matrix.py tells the milliseconds.
DEAF_S = 5.0


class Deafness:
    """The longest time that /healthz took."""

    longest_s = 0.0


@contextmanager
def listening(url: str) -> Iterator[Deafness]:
    """Ask /healthz on a thread until the end of the block."""
    heard, over = Deafness(), threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not over.is_set():
                began_s = time.monotonic()
                client.get(f"{url}/healthz").raise_for_status()
                heard.longest_s = max(heard.longest_s, time.monotonic() - began_s)
                over.wait(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield heard
    finally:
        over.set()
        thread.join(timeout=120)
