"""When this process began: what a person waits for counts from there, not from the question."""

import time

_STARTED_S = time.perf_counter()  # the first import of the command line, ahead of the heavy ones


def wall_s() -> float:
    """Seconds since the command was started."""
    return time.perf_counter() - _STARTED_S
