"""Gives sequences their pages and takes them back."""

from collections import Counter
from collections.abc import Sequence

from kvweave.engine.live import Live
from kvweave.engine.pages import PageAllocator
from kvweave.model.paged_kv import KVPool, PagedKV


class Placing:
    """Not thread-safe: the engine thread owns it."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.pages = PageAllocator(pool.num_pages)
        self.num_running = 0  # sequences that may want a page more

    def lengths(self, live: Live) -> tuple[int, int]:
        """Tokens of it that are cached, and that must be computed."""
        return 0, live.known

    def admit(self, live: Live) -> bool:
        """Pages for all it knows, and one for everybody else to grow; False: not now."""
        wanted = -(-live.known // self.pool.page_tokens)
        if self.pages.num_free < wanted + self.num_running:
            return False
        pages = self.pages.take(wanted)
        assert pages is not None, "there were enough"
        live.kv = PagedKV(self.pool, pages)
        live.pages = len(pages)
        self.num_running += 1
        return True

    def grow(self, live: Live, count: int) -> bool:
        """More pages; False: there are none."""
        table = live.kv.page_table
        pages = self.pages.take(count, table[-1] if table else None)
        if pages is None:
            return False
        live.kv.append(pages)
        live.pages += len(pages)
        return True

    def retire(self, live: Live) -> None:
        """Take everything back. Harmless for one that has nothing."""
        if live.kv.page_table:
            self.pages.release(live.kv.page_table)
            self.num_running -= 1
        live.kv = PagedKV(self.pool)
        live.pages = 0
        live.logits = None

    def check_integrity(self, lives: Sequence[Live]) -> None:
        """Raise AssertionError unless every page is held by exactly those who say so."""
        self.pages.check_integrity()
        held = Counter(page for live in lives for page in live.kv.page_table)
        for page in range(self.pool.num_pages):
            assert self.pages.refs(page) == held[page], f"page {page} is held by somebody unknown"
