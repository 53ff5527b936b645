"""Time of several runs side by side, and memory of this process."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def alternate(
    runs: Mapping[str, Callable[[], object]], repeats: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turns so that a slow spell of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(-warmups, repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def rss_mb() -> float:
    """Resident memory of this process now."""
    return _status_mb("VmRSS")


def peak_rss_mb() -> float:
    """Highest resident memory of this process so far."""
    return _status_mb("VmHWM")


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")
