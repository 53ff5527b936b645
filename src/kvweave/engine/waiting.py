"""Requests that wait for their turn: what the cache serves best goes first (RAGCache).

Running a request whose prefix is cached now costs little and keeps that prefix in use; put off, it
may find it evicted. Matters only when requests really queue. Bounded, so that nobody starves: at
most `window` requests overtake any other. Speculation never overtakes anybody. Plain bookkeeping.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvweave.errors import ConfigError

WINDOW = 32


class Waits(Protocol):
    """What waits."""

    @property
    def held(self) -> bool: ...


T = TypeVar("T", bound=Waits)


@dataclass(slots=True)
class _Waiting(Generic[T]):
    request: T
    overtaken: int = 0


class WaitingQueue(Generic[T]):
    """In order of arrival. Not thread-safe: the scheduler owns it.

    `lengths(request)` says how many of its tokens are cached and how many must be computed now. It
    is asked again for every choice, because the cache changes while requests wait.
    """

    def __init__(self, lengths: Callable[[T], tuple[int, int]], window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"WaitingQueue.window must be at least 1, got {window}")
        self._lengths = lengths
        self._window = window
        self._queue: list[_Waiting[T]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request: T) -> bool:
        return any(waiting.request is request for waiting in self._queue)

    def requests(self) -> list[T]:
        return [waiting.request for waiting in self._queue]

    def push(self, request: T, *, first: bool = False) -> None:
        """At the end, or before all others: who had begun already."""
        if first:
            self._queue.insert(0, _Waiting(request, overtaken=self._window))
        else:
            self._queue.append(_Waiting(request))

    def best(self) -> T:
        """Who should run next. IndexError when nobody waits. Changes nothing."""
        front = self._queue[0]
        if front.overtaken >= self._window and not front.request.held:
            return front.request
        return max(self._queue[: self._window], key=lambda w: self._rank(w.request)).request

    def remove(self, request: T, *, counts: bool = True) -> None:
        """It runs now, ahead of who came before it; without `counts` it just leaves."""
        place = [waiting.request for waiting in self._queue].index(request)
        if counts:
            for waiting in self._queue[:place]:
                waiting.overtaken += 1
        del self._queue[place]

    def _rank(self, request: T) -> tuple[bool, float]:
        return not request.held, order_priority(*self._lengths(request))


def order_priority(cached_tokens: int, compute_tokens: int) -> float:
    """Cached ÷ to compute; larger first."""
    return cached_tokens / max(1, compute_tokens)
