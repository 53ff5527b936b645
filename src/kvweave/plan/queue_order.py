"""In which order waiting requests should run: what the cache serves best goes first (RAGCache).

Running a request whose prefix is cached now costs little and keeps that prefix in use; put off, it
may find it evicted. Bounded, so that nobody starves: at most `window` requests overtake any other.
Matters only when requests really queue.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvweave.errors import ConfigError

T = TypeVar("T")
WINDOW = 32


@dataclass(slots=True)
class _Waiting(Generic[T]):
    request: T
    overtaken: int = 0


class RequestQueue(Generic[T]):
    """Waiting requests. Not thread-safe: the scheduler owns it.

    `lengths(request)` says how many of its tokens are cached and how many must be computed now. It
    is asked again at every `pop`, because the cache changes while requests wait.
    """

    def __init__(self, lengths: Callable[[T], tuple[int, int]], window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"RequestQueue.window must be at least 1, got {window}")
        self._lengths = lengths
        self._window = window
        self._queue: list[_Waiting[T]] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: T) -> None:
        self._queue.append(_Waiting(request))

    def pop(self) -> T:
        """The request to run next. IndexError when none waits."""
        place = 0
        if self._queue[0].overtaken < self._window:
            ahead = self._queue[: self._window]
            priorities = [order_priority(*self._lengths(w.request)) for w in ahead]
            place = priorities.index(max(priorities))  # the first of equals came first
        for waiting in self._queue[:place]:
            waiting.overtaken += 1
        return self._queue.pop(place).request


def order_priority(cached_tokens: int, compute_tokens: int) -> float:
    """Cached ÷ to compute; larger first. For fused plans: all tokens less rows, and rows."""
    return cached_tokens / max(1, compute_tokens)
