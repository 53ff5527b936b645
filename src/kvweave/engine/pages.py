"""Which pages of the KV pool are held, and how often: plain ints, no tensors.

A page is held by as many as count it: sequences that read it, and nodes of the knowledge tree. It
is free when none does. Pages that lie side by side are one piece of memory, and attention over a
single piece needs no gather, so runs are kept long: a sequence grows where it ended, a new one
starts in the largest gap.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from kvweave.errors import ConfigError


class PageAllocator:
    """Pages [0, num_pages) with reference counts. The engine thread owns it; any reads counts."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"a KV pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._gaps: list[tuple[int, int]] = [(0, num_pages)]  # free [start, end), apart, ascending
        self.num_free = num_pages

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` free pages, held once each: behind page `after` if that is free, then from the
        largest gaps. None, and nothing changed, when there are not enough."""
        if count > self.num_free:
            return None
        taken: list[int] = []
        if after is not None and count:
            gap = self._gap_at(after + 1)
            if gap is not None:
                taken += self._cut(gap, after + 1, min(count, self._gaps[gap][1] - after - 1))
        while len(taken) < count:
            gap = max(range(len(self._gaps)), key=lambda i: self._gaps[i][1] - self._gaps[i][0])
            start, end = self._gaps[gap]
            taken += self._cut(gap, start, min(count - len(taken), end - start))
        return taken

    def take_run(self, count: int) -> list[int] | None:
        """`count` free pages side by side, from the smallest gap that holds them; None if none."""
        fitting = [i for i, (start, end) in enumerate(self._gaps) if end - start >= count]
        if not fitting or not count:
            return None if count else []
        gap = min(fitting, key=lambda i: self._gaps[i][1] - self._gaps[i][0])
        return self._cut(gap, self._gaps[gap][0], count)

    def longest_run(self) -> int:
        """Free pages side by side that could be had at most."""
        return max((end - start for start, end in self._gaps), default=0)

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages that are held already once more."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free; it cannot be shared"
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Let go of pages; those that are not held any more are free."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} was released twice"
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free(page)

    def refs(self, page: int) -> int:
        """How many hold a page."""
        return self._refs[page]

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def check_integrity(self) -> None:
        """Raise AssertionError if gaps and counts disagree. O(pages): for idle moments."""
        free = [page for start, end in self._gaps for page in range(start, end)]
        assert free == [page for page, refs in enumerate(self._refs) if not refs], "gaps are wrong"
        assert len(free) == self.num_free, f"{len(free)} pages are free, books say {self.num_free}"
        touching = pairwise(self._gaps)
        assert all(a[1] < b[0] for a, b in touching), "gaps that touch are one"

    def _gap_at(self, page: int) -> int | None:
        """Which gap begins exactly at `page`."""
        place = bisect_left(self._gaps, (page, 0))
        found = place < len(self._gaps) and self._gaps[place][0] == page
        return place if found else None

    def _cut(self, gap: int, start: int, count: int) -> list[int]:
        """Take pages from the front of a gap."""
        end = self._gaps[gap][1]
        self._gaps[gap : gap + 1] = [(start + count, end)] if start + count < end else []
        pages = list(range(start, start + count))
        for page in pages:
            self._refs[page] = 1
        self.num_free -= count
        return pages

    def _free(self, page: int) -> None:
        place = bisect_left(self._gaps, (page, 0))
        start, end = page, page + 1
        first, last = place, place
        if place and self._gaps[place - 1][1] == page:
            first, start = place - 1, self._gaps[place - 1][0]
        if place < len(self._gaps) and self._gaps[place][0] == end:
            last, end = place + 1, self._gaps[place][1]
        self._gaps[first:last] = [(start, end)]
        self.num_free += 1
