"""Where in one big buffer the next object goes: offsets and sizes, no memory of its own."""

import bisect


class Arena:
    """Best-fit allocator over [0, capacity). Not thread-safe.

    Best fit because chunk objects of one model come in few sizes: a hole left by one object is most
    often exactly what the next one needs. Free neighbours are joined at once.
    """

    def __init__(self, capacity_bytes: int, align: int) -> None:
        self.capacity_bytes = capacity_bytes // align * align
        self._align = align
        self._holes: list[tuple[int, int]] = []  # (start, size), by start
        if self.capacity_bytes:
            self._holes.append((0, self.capacity_bytes))
        self._taken: dict[int, int] = {}  # start → size

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def round(self, size_bytes: int) -> int:
        """What an object of this size really occupies."""
        return -(-size_bytes // self._align) * self._align

    def take(self, size_bytes: int) -> int | None:
        """Start of a free run, None if no hole is large enough."""
        size = self.round(size_bytes)
        fitting = [(hole_size, start) for start, hole_size in self._holes if hole_size >= size]
        if not fitting or size == 0:
            return None
        hole_size, start = min(fitting)
        index = bisect.bisect_left(self._holes, (start, 0))
        if hole_size == size:
            del self._holes[index]
        else:
            self._holes[index] = (start + size, hole_size - size)
        self._taken[start] = size
        return start

    def give_back(self, start: int) -> None:
        """Free a run that `take` returned."""
        size = self._taken.pop(start)  # KeyError: freed twice, our own bug
        index = bisect.bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and start + size == self._holes[index][0]:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            index -= 1
            start = self._holes[index][0]
            size += self._holes.pop(index)[1]
        self._holes.insert(index, (start, size))

    def check_integrity(self) -> None:
        """Holes and taken runs tile the arena exactly, and no two holes touch."""
        runs = sorted([*self._holes, *self._taken.items()])
        at = 0
        for start, size in runs:
            assert start == at, f"arena has a gap or an overlap at {at}"
            at = start + size
        assert at == self.capacity_bytes, f"arena ends at {at}, not {self.capacity_bytes}"
        for (start, size), (after, _) in zip(self._holes, self._holes[1:], strict=False):
            assert start + size < after, f"holes at {start} and {after} touch"
