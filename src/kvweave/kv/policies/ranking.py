"""Things in the order in which they would leave."""

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RankHeap(Generic[K]):
    """A heap of ranks in which each thing has one valid rank. Not thread-safe.

    Changing a rank pushes a new heap entry and leaves the old one to be skipped, so an access costs
    O(log n); the heap is rebuilt when stale entries outnumber valid ones.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[float, float]] = {}  # thing → (rank, last access): ties by age
        self._heap: list[tuple[float, float, int, K]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, thing: K, rank: float, last_access_s: float) -> None:
        self._ranks[thing] = (rank, last_access_s)
        self._push(thing)
        if len(self._heap) > 64 + 2 * len(self._ranks):
            self._heap = []
            for each in self._ranks:
                self._push(each)

    def remove(self, thing: K) -> None:
        del self._ranks[thing]

    def discard(self, thing: K) -> None:
        """Remove a thing that may not be there."""
        self._ranks.pop(thing, None)

    def __iter__(self) -> Iterator[K]:
        return iter(self._ranks)

    def rank(self, thing: K) -> float:
        return self._ranks[thing][0]

    def lowest(self, may_leave: Callable[[K], bool]) -> Iterator[tuple[K, float]]:
        """Things that may leave, lowest rank first, with their ranks. Changes no rank.

        Walks a copy of the heap lazily: taking the first few of many costs O(k log n) plus the
        copy.
        """
        while self._heap and self._is_stale(self._heap[0]):  # or each call would skip them again
            heapq.heappop(self._heap)
        heap = list(self._heap)
        seen: set[K] = set()
        while heap:
            entry = heapq.heappop(heap)
            rank, _, _, thing = entry
            if thing in seen or self._is_stale(entry):
                continue
            seen.add(thing)
            if may_leave(thing):
                yield thing, rank

    def _is_stale(self, entry: tuple[float, float, int, K]) -> bool:
        """Whether its thing was ranked anew or removed since."""
        return self._ranks.get(entry[3]) != entry[:2]

    def _push(self, thing: K) -> None:
        rank, last_access_s = self._ranks[thing]
        self._pushes += 1
        heapq.heappush(self._heap, (rank, last_access_s, self._pushes, thing))
