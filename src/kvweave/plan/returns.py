"""Whether a path is worth computing exactly, once, instead of fusing it again and again.

A fused request leaves nothing for the next one: the same question ten times is fused ten times. An
exact one takes longer and leaves its path in the knowledge tree, where the next finds it for next
to nothing:

    exact now   E + n · P         P: price of the request with its whole path in the tree
    fused       F + n · F         n: times the path will come back

How often that will be is not known; that a path which came back c times will come back c times more
is the guess that never costs more than twice what foresight would (a ski rental). So a path is
computed as soon as c · (F - P) >= E - F.
"""

from collections import Counter, deque
from collections.abc import Sequence

from kvweave.plan.ordering import WINDOW
from kvweave.types import ChunkId

TURN_GAIN = 0.1  # weight of the newest request
LIKELY_TURNS = 0.2  # share of later turns from which on a first one is expected to go on


class PathReturns:
    """How many of the last requests began with a path. Not thread-safe; a few MB at most."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._requests: deque[tuple[int, ...]] = deque()
        self._counts: Counter[int] = Counter()

    def push(self, path: Sequence[ChunkId]) -> None:
        """A request with this path, from the first part behind the preamble on, was answered."""
        names = _names(path)
        self._requests.append(names)
        self._counts.update(names)
        if len(self._requests) > self._window:
            for name in self._requests.popleft():
                self._counts[name] -= 1
                if not self._counts[name]:
                    del self._counts[name]

    def count(self, path: Sequence[ChunkId]) -> int:
        """Requests that had the whole of this path, before this one."""
        return self._counts.get(_names(path)[-1], 0) if path else 0

    def returned(self, path: Sequence[ChunkId]) -> int:
        """How many of its leading parts an earlier request began with."""
        names = _names(path)
        return next((i for i, name in enumerate(names) if name not in self._counts), len(names))


class TurnShare:
    """How many of the last requests were later turns of conversations that keep their chunks. Not
    thread-safe."""

    def __init__(self) -> None:
        self._share = 0.0

    def push(self, is_later: bool) -> None:
        self._share += TURN_GAIN * (is_later - self._share)

    @property
    def is_likely(self) -> bool:
        """Whether a request may well be followed by another turn."""
        return self._share >= LIKELY_TURNS


def is_worth_computing(exact_s: float, fused_s: float, known_s: float, returns: int) -> bool:
    """Whether a path that came back so often should be computed exactly. `known_s` is the price
    once its path is in the tree."""
    return returns > 0 and returns * (fused_s - known_s) >= exact_s - fused_s


def _names(path: Sequence[ChunkId]) -> tuple[int, ...]:
    """A name for each beginning of a path; of this process alone."""
    names, name = [], 0
    for part in path:
        name = hash((name, part))
        names.append(name)
    return tuple(names)
