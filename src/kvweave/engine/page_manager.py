"""Gives sequences their pages, from the knowledge tree where it has them, and takes them back."""

import time
from collections import Counter
from collections.abc import Sequence

from kvweave.engine.config import EngineConfig
from kvweave.engine.offload import Post
from kvweave.engine.pages import PageAllocator
from kvweave.engine.prefixes import Cost, ExactPrefixes
from kvweave.engine.scheduler import SparseRows
from kvweave.engine.sequence import EngineSequence
from kvweave.fuse.prepared import Prepared
from kvweave.kv.tree import TreeLease
from kvweave.model.paged_kv import KVPool, PagedKV


class PageManager:
    """Not thread-safe: the engine thread owns it."""

    def __init__(self, cfg: EngineConfig, pool: KVPool, cost_s: Cost, post: Post) -> None:
        self.pool = pool
        self.pages = PageAllocator(pool.num_pages)
        self.prefixes = ExactPrefixes(cfg, pool, self.pages, cost_s, post)
        self.num_running = 0  # sequences that may want a page more

    @property
    def most_tokens(self) -> int:
        """Tokens that one sequence can have at most, all others and what is pinned gone."""
        return self.pool.num_pages * self.pool.page_tokens

    def lengths(self, live: EngineSequence) -> tuple[int, int]:
        """Tokens of it that are cached, and that must be computed."""
        part = live.request.fused
        if part is not None:
            stored = sum(
                len(chunk.token_ids)
                for place, chunk in enumerate(part.chunks)
                if place not in part.computed
            )
            reused = int(stored * (1 - part.ratio))
            return reused, live.known - reused
        cached = 0
        if live.request.use_tree:
            cached = self.prefixes.tree.match_tokens(live.path)
        return cached, live.known - cached

    def admit(self, live: EngineSequence) -> bool:
        """Pages for all it knows, and one for everybody else to grow; False: not now."""
        place = self._admit_run if live.own_step else self._admit_shared
        if place(live):
            return True
        if self.num_running:
            return False
        # A leased path keeps a page more than its reader uses; in a pool that the reader fills up
        # that page is the one it lacks.
        live.unshared = True
        if place(live):
            return True
        # What is pinned was pinned since it was checked, or lies in the middle of the run it needs.
        self.prefixes.unpin()
        return place(live)

    def _admit_shared(self, live: EngineSequence) -> bool:
        """What the tree has is read where it lies; the rest gets pages of its own."""
        lease, shared, cached = self._match(live)
        page = self.pool.page_tokens
        whole = cached // page  # pages that it reads and never writes
        wanted = -(-live.known // page) - whole
        if not self._make_free(wanted + self.num_running):
            if lease is not None:
                lease.release()
            return False
        own = self.pages.take(wanted, shared[whole - 1] if whole else None)
        assert own is not None, "there were enough"
        if cached % page:
            self.pool.copy_rows(shared[whole], own[0], cached % page)
        self.pages.hold(shared[:whole])
        live.kv = PagedKV(self.pool, [*shared[:whole], *own])
        live.kv.reserve(cached)
        live.lease, live.pages, live.computed = lease, whole + wanted, cached
        live.offered = 0 if lease is None else len(lease.nodes) - 1
        self._admitted(live, cached)
        return True

    def _admit_run(self, live: EngineSequence) -> bool:
        """A fused request gets pages side by side, and they are its own: a dense buffer."""
        count = -(-live.known // self.pool.page_tokens)
        free = count + self.num_running
        lease = self._match(live)[0] if live.request.use_tree else None
        pages = None
        if self.prefixes.reclaim(
            lambda: self.pages.num_free >= free and self.pages.longest_run() >= count
        ):
            pages = self.pages.take_run(count)
        if pages is None:
            if lease is not None:
                lease.release()
            return False
        live.kv = PagedKV(self.pool, pages)
        live.lease, live.pages = lease, count
        self._admitted(live, 0)
        return True

    def _admitted(self, live: EngineSequence, cached: int) -> None:
        if not live.preempted:
            live.cached = cached
            live.ticket.timeline.admitted_s = time.perf_counter()
        self.num_running += 1

    def prepared(self, live: EngineSequence, prepared: Prepared) -> None:
        """A fused request is stitched into its pages; the rows that are left join the others."""
        live.sparse = SparseRows(prepared.rows, prepared.bonds)
        live.prepared = prepared
        live.computed = live.sparse.reached
        live.own_step = False
        self._let_go(live)

    def woven(self, live: EngineSequence) -> None:
        """The prompt of a fused request is in its pages."""
        live.computed = live.prompt_len
        live.own_step = False
        self._let_go(live)

    def grow(self, live: EngineSequence, count: int) -> bool:
        """More pages; False: there are none."""
        if not self._make_free(count):
            return False
        table = live.kv.page_table
        pages = self.pages.take(count, table[-1] if table else None)
        assert pages is not None, "there were enough"
        live.kv.append(pages)
        live.pages += len(pages)
        return True

    def offer(self, live: EngineSequence) -> None:
        """Offer the tree the chunks whose last row was computed since. Exact ones only."""
        assert live.request.fused is None or live.lease is None, "fused KV stays out of the tree"
        while live.lease is not None and live.offered < len(live.path):
            chunk = live.path[live.offered]
            start = live.lease.num_tokens
            if live.computed < start + chunk.num_tokens:
                return
            live.offered += 1
            gone = self.prefixes.is_gone(chunk, live.as_of)  # and so is what stands behind it
            if gone or not self.prefixes.offer(live.lease, chunk, start, live.kv):
                live.offered = len(live.path)

    def retire(self, live: EngineSequence) -> None:
        """Take everything back. Harmless for one that has nothing."""
        if live.kv.page_table:
            self.pages.release(live.kv.page_table)
            self.num_running -= 1
        self._let_go(live)
        live.kv = PagedKV(self.pool)
        live.pages = 0
        live.logits = live.prepared = None
        live.own_step = live.request.fused is not None
        live.ticket.timeline.preempted = live.preempted

    def _let_go(self, live: EngineSequence) -> None:
        if live.lease is not None:
            live.lease.release()
            live.lease = None

    def check_integrity(self, lives: Sequence[EngineSequence]) -> None:
        """Raise AssertionError unless every page is held by exactly those who say so."""
        self.pages.check_integrity()
        self.prefixes.tree.check_integrity()
        held = Counter(page for live in lives for page in live.kv.page_table)
        held.update(self.prefixes.held_pages())
        for page in range(self.pool.num_pages):
            refs = self.pages.refs(page)
            assert refs == held[page], f"page {page}: {refs} holds, {held[page]} holders"

    def _match(self, live: EngineSequence) -> tuple[TreeLease | None, list[int], int]:
        """A lease to read from or to offer behind, the pages it gives, and how many tokens."""
        prefixes = self.prefixes
        if not prefixes.is_on or not live.path or live.unshared:
            return None, [], 0
        if not live.request.use_tree:  # all is computed; what is exact may still be offered
            return prefixes.acquire((), 0, count=False), [], 0
        rest = live.prompt_len - sum(chunk.num_tokens for chunk in live.path)
        lease = prefixes.acquire(live.path, rest, count=not live.counted)
        live.counted = True
        cached = min(lease.num_tokens, live.known - 1)  # the last row is always computed
        return lease, prefixes.table(lease), cached

    def _make_free(self, count: int) -> bool:
        return self.prefixes.reclaim(lambda: self.pages.num_free >= count)
