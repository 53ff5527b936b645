"""Counters and gauges in plain Python, for every part to count with and the server to export.

A sample is a name, a few labels and a number. Counters only grow; gauges are set. There is no
global registry: each store makes one `Metrics` or is handed one.
"""

import threading
from typing import NamedTuple

Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """One number as it stood when the snapshot was taken."""

    name: str
    labels: Labels  # sorted by label name
    value: float
    is_counter: bool


class Metrics:
    """Safe to use from any thread; never blocks for longer than a dictionary update."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter. A counter never falls, so `amount` must not be negative."""
        assert amount >= 0, f"counter {name} cannot fall by {-amount}"
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._gauges[key] = value

    def value(self, name: str, **labels: str) -> float:
        """Sum over all samples of this name that carry at least these labels; 0 if none does."""
        wanted = set(labels.items())
        with self._lock:
            samples = [*self._counters.items(), *self._gauges.items()]
        return sum(v for (n, have), v in samples if n == name and wanted <= set(have))

    def snapshot(self) -> list[Sample]:
        """Every sample, sorted by name and labels."""
        with self._lock:
            counters = [Sample(n, labels, v, True) for (n, labels), v in self._counters.items()]
            gauges = [Sample(n, labels, v, False) for (n, labels), v in self._gauges.items()]
        return sorted(counters + gauges)
