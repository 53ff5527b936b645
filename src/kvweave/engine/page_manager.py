"""Gives sequences their pages, from the knowledge tree where it has them, and takes them back."""

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvweave.engine.bad_pages import is_bad_chunk
from kvweave.engine.chunk_pages import ChunkLease, ChunkPages, WantedChunk
from kvweave.engine.config import EngineConfig
from kvweave.engine.pages import PageAllocator
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.engine.request import FusedPart
from kvweave.engine.sequence import EngineSequence
from kvweave.errors import ConfigError
from kvweave.fuse.prefill import can_share, named_kv
from kvweave.kernels.recording import is_out_of_memory
from kvweave.kv.tree import ChunkRef, TreeLease
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV, key_lifts, scale_bytes

log = logging.getLogger(__name__)
MOST_POOL_TOKENS = 1 << 17  # more than this does not help on one device of today's size


def make_pool(cfg: EngineConfig, decoder: Decoder) -> KVPool:
    """Room for KV: as configured, or what memory allows. `cfg` as `for_device` gives it."""
    assert cfg.page_tokens is not None, "a config for a device says how large pages are"
    tokens, codes_chunks = cfg.pool_tokens, cfg.shared_codec == "int8"
    if tokens is None:
        spec = decoder.spec
        per_head = spec.head_dim * decoder.dtype.itemsize
        token_bytes = 2 * spec.num_layers * spec.num_kv_heads * per_head
        token_bytes += scale_bytes(spec, decoder.dtype) if codes_chunks else 0
        fitting = int(_memory_bytes(decoder.device) * cfg.pool_share) // token_bytes
        tokens = max(cfg.page_tokens, min(fitting, MOST_POOL_TOKENS))
    num_pages = tokens // cfg.page_tokens
    try:
        return KVPool(
            decoder.spec,
            num_pages,
            cfg.page_tokens,
            decoder.dtype,
            decoder.device,
            codes_chunks=codes_chunks,
            lifts=key_lifts(decoder.spec, decoder.weights) if codes_chunks else None,
        )
    except (RuntimeError, OSError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        free_gib = _memory_bytes(decoder.device) / (1 << 30)
        raise ConfigError(
            f"there is no memory for a KV pool of {tokens} tokens ({free_gib:.1f} GiB are free on "
            f"{decoder.device}); give the engine fewer pool_tokens, or free some"
        ) from error


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class RoomLost(Exception):
    """Chunks turned out missing, and what is computed instead has no pages: it takes more of them
    than codes do, or others wait for the same chunks. The request must begin again with copies."""


@dataclass(eq=False)
class PageManager:
    """Moves pages between sequences, the tree and the free ones. The engine thread owns it; any
    thread reads `most_tokens`. The scheduler's PageSource."""

    _pool: KVPool
    _allocator: PageAllocator
    _prefixes: ExactPrefixes
    _chunks: ChunkPages | None = None  # that requests share; None: each has a copy
    # those that run, and may want a page more
    _holding: set[EngineSequence] = field(default_factory=set)

    def empty_kv(self) -> PagedKV:
        """KV of a sequence that has no pages yet."""
        return PagedKV(self._pool)

    @property
    def most_tokens(self) -> int:
        """Tokens that one sequence can have at most, all others and what is pinned gone."""
        return self._pool.num_pages * self._pool.page_tokens

    def lengths(self, sequence: EngineSequence) -> tuple[int, int]:
        """Tokens of it that are cached, and that must be computed."""
        part = sequence.request.fused
        if part is not None:
            stored = sum(
                len(chunk.token_ids)
                for place, chunk in enumerate(part.chunks)
                if place not in part.computed
            )
            reused = int(stored * (1 - part.ratio))
            return reused, sequence.progress.known - reused
        cached = 0
        if sequence.request.use_tree:
            cached = self._prefixes.tree.match_tokens(sequence.path)
        return cached, sequence.progress.known - cached

    def is_coming(self, sequence: EngineSequence) -> bool:
        """Whether a running request computes the next part of this one's path that the tree does
        not have, and will offer it: worth waiting for."""
        request, path = sequence.request, sequence.path
        if request.fused is not None or not request.use_tree or sequence.unshared:
            return False
        num_there = len(self._prefixes.tree.match([chunk.id for chunk in path]).nodes)
        wanted = path[: num_there + 1]
        if num_there == len(path) or not any(self._brings(one, wanted) for one in self._holding):
            return False
        if not sequence.awaited:
            sequence.awaited = sum(chunk.num_tokens for chunk in wanted)
        return True

    def _brings(self, leader: EngineSequence, path: Sequence[ChunkRef]) -> bool:
        """Whether a running request will offer the last part of `path`. A guess or a request in the
        background would, but may stand still meanwhile."""
        progress = leader.progress
        if progress.held or progress.background or leader.lease is None:
            return False
        if leader.request.fused is not None or leader.offered >= len(path):
            return False
        if leader.num_kept_parts < len(path):
            return False
        if leader.path[: len(path)] != path:
            return False
        left = path[leader.offered :]
        return not any(self._is_gone(chunk, leader) for chunk in left)

    def _is_gone(self, chunk: ChunkRef, sequence: EngineSequence) -> bool:
        """Whether a part of a request's path was deleted since it was found."""
        return self._prefixes.is_gone(chunk, sequence.as_of, sequence.request.namespace)

    def admit(self, sequence: EngineSequence) -> bool:
        """Give a sequence pages for all it knows, if a page is left for each of the others to grow.
        False: not now."""
        if self._reads_chunks(sequence):
            if self._admit_pages(sequence, reads_chunks=True):
                return True
            if self._holding:
                return False
            # Chunks end inside pages that nobody else fills up: in a pool that one prompt fills,
            # it may have room for a copy alone.
            sequence.copies = True
        place = self._admit_run if sequence.progress.own_step else self._admit_pages
        if place(sequence):
            return True
        if self._holding or sequence.progress.background:
            return False  # background work takes what is left, and waits where nothing is
        # A leased path keeps a page more than its reader uses; in a pool that the reader fills up
        # that page is the one it lacks.
        sequence.unshared = True
        if place(sequence):
            return True
        # What is pinned was pinned since it was checked, or lies in the middle of the run it needs.
        self._prefixes.unpin()
        return place(sequence)

    def _admit_pages(self, sequence: EngineSequence, *, reads_chunks: bool = False) -> bool:
        """Admit a sequence that reads what the tree has where it lies, and gets pages of its own
        for what is computed. One that `reads_chunks` finds its chunks in shared pages: those that
        have none yet get some."""
        chunks, tenant = self._chunks, sequence.request.namespace
        lease, front, cached = self._match(sequence)
        page = self._pool.page_tokens
        whole = cached // page  # pages that it reads and never writes
        wanted, num_elsewhere, num_shifts = list[WantedChunk](), 0, 0
        shared: ChunkLease | None = None
        lacking = 0
        if reads_chunks and chunks is not None:
            part = sequence.fused_part
            wanted, num_elsewhere = self._wanted_chunks(sequence, part, lease)
            num_shifts = -(-len(wanted) // page) if part.shifts_chunks else 0
            shared = chunks.hold(tenant, wanted)  # before others make room
            lacking = chunks.missing_pages(tenant, wanted)
        count = -(-(sequence.progress.known - num_elsewhere) // page) - whole
        if not self._make_free(count + num_shifts + lacking + len(self._holding)):
            for held in (shared, lease):
                if held is not None:
                    held.release()
            return False
        if shared is not None and chunks is not None:
            chunks.complete(shared, tenant, wanted)
        own = self._allocator.take(count, front[whole - 1] if whole else None)
        shifts = self._allocator.take(num_shifts)
        assert own is not None, "there were enough"
        assert shifts is not None, "for all"
        cached = self._continue_behind(front, own, cached)
        self._allocator.hold(front[:whole])
        sequence.kv = PagedKV(self._pool, [*front[:whole], *own], shifts)
        if shared is not None:  # its own step computes what it lacks
            sequence.shared, sequence.present, cached = shared, cached, 0
        else:
            sequence.kv.reserve(cached)
            sequence.progress.computed = cached
        self._record_admission(sequence, lease, whole + count, cached)
        return True

    def _continue_behind(self, shared: Sequence[int], own: Sequence[int], cached: int) -> int:
        """Copy the rows of the last shared page that is not full to the first own page; whole pages
        are read where they lie. Returns how many of the `cached` tokens the sequence then has."""
        whole, rest = divmod(cached, self._pool.page_tokens)
        if rest:
            rest = self._prefixes.continue_page(shared[whole], own[0], rest)
        return whole * self._pool.page_tokens + rest

    def _admit_run(self, sequence: EngineSequence) -> bool:
        """Admit a fused request with own pages side by side, as a dense buffer."""
        count = -(-sequence.progress.known // self._pool.page_tokens)
        free = count + len(self._holding)
        lease = self._match(sequence)[0] if sequence.request.use_tree else None
        pages = None
        if self._prefixes.reclaim(
            lambda: self._allocator.num_free >= free and self._allocator.longest_run() >= count
        ):
            pages = self._allocator.take_run(count)
        if pages is None:
            if lease is not None:
                lease.release()
            return False
        sequence.kv = PagedKV(self._pool, pages)
        self._record_admission(sequence, lease, count, 0)
        return True

    def _reads_chunks(self, sequence: EngineSequence) -> bool:
        """Whether a request is to read its chunks from shared pages."""
        part = sequence.request.fused
        if part is None or self._chunks is None or sequence.copies:
            return False
        return sequence.progress.own_step and can_share(part.strategy, len(self._pool.keys))

    def _wanted_chunks(
        self, sequence: EngineSequence, part: FusedPart, lease: TreeLease | None
    ) -> tuple[list[WantedChunk], int]:
        """Chunks that a request takes from the store if all are there, and how many tokens of its
        prompt then lie in their pages alone. What turns out missing is computed, into the pages
        that the chunk was to have."""
        named = named_kv(part.chunks, part.store, part.strategy, part.computed)
        num_exact = sequence.num_exact_chunks(lease)
        wanted: list[WantedChunk] = []
        placed, hits = 0, list[int]()
        for place in range(num_exact, len(named)):
            key, ids = named[place]
            if key is None:
                continue
            wanted.append(WantedChunk(key, sequence.request.chunks[place].id, len(ids)))
            placed += len(ids)
            if place or key != part.chunks[0].exact_key:  # there it is exact: nothing to choose
                hits.append(len(ids))
        return wanted, placed - part.strategy.num_rows(hits, part.ratio)

    def _record_admission(
        self, sequence: EngineSequence, lease: TreeLease | None, num_pages: int, cached: int
    ) -> None:
        """Note what a sequence holds, when it was first admitted and how much the tree had of
        it."""
        sequence.lease, sequence.progress.num_pages = lease, num_pages
        sequence.offered = 0 if lease is None else len(lease.nodes) - 1
        if not sequence.progress.preempted:
            sequence.cached = cached
            sequence.ticket.timeline.admitted_s = time.perf_counter()
        self._holding.add(sequence)

    def grow(self, sequence: EngineSequence, num_pages: int) -> bool:
        """Give a running sequence more pages. False: there are none."""
        if not self._make_free(num_pages):
            return False
        table = sequence.kv.page_table
        pages = self._allocator.take(num_pages, table[-1] if table else None)
        assert pages is not None, "there were enough"
        sequence.kv.append(pages)
        sequence.progress.num_pages += len(pages)
        return True

    def offer(self, sequence: EngineSequence) -> int:
        """Offer the tree the chunks whose last row was computed since. Exact ones only: a fused
        prompt's, up to the first that is reused. Returns how many it took."""
        taken = 0
        if sequence.lease is None:
            return taken
        num_kept = sequence.num_kept_parts
        while sequence.offered < num_kept:
            chunk = sequence.path[sequence.offered]
            start = sequence.lease.num_tokens
            if sequence.progress.computed < start + chunk.num_tokens:
                return taken
            sequence.offered += 1
            gone = self._is_gone(chunk, sequence)  # and so is what stands behind it
            if gone or not self._prefixes.offer(sequence.lease, chunk, start, sequence.kv):
                sequence.offered = len(sequence.path)
            else:
                taken += 1
        if sequence.request.fused is not None:  # it holds its pages itself: the lease is done
            sequence.release_lease()
        return taken

    def take_from_lost(self, sequence: EngineSequence, num_rows: int) -> None:
        """Give a prompt own pages for `num_rows` rows after some of its chunks turned out missing.

        The pages of those chunks are used first, then others. Chunks that it still leases may be
        read. Raises RoomLost.
        """
        count = -(-num_rows // self._pool.page_tokens) - len(sequence.kv.page_table)
        if count > 0 and not self.grow(sequence, count):
            raise RoomLost(f"{count} pages for chunks that were lost")

    def drop_bad_pages(self, sequence: EngineSequence) -> int:
        """Let no other request find the chunks and tree nodes that a failed one reads, if they hold
        values that are no numbers. Returns how many there were."""
        try:
            num_dropped = self._drop_bad_chunks(sequence)
            num_dropped += self._prefixes.drop_bad_pages(sequence.path)
        except RuntimeError as error:  # CUDA's: the request has an error to end with already
            log.warning("what an answer was computed from could not be looked at: %s", error)
            return 0
        if num_dropped:
            log.warning(
                "KV on the device held what is no number: %d chunks or prefixes", num_dropped
            )
        return num_dropped

    def _drop_bad_chunks(self, sequence: EngineSequence) -> int:
        if self._chunks is None or sequence.shared is None:
            return 0
        filled = [chunk for chunk in sequence.shared.chunks.values() if chunk.is_filled]
        bad = [c for c in filled if is_bad_chunk(self._pool, c.pages, c.num_tokens)]
        for chunk in bad:
            self._chunks.discard(chunk)
        return len(bad)

    def retire(self, sequence: EngineSequence) -> None:
        """Take everything back that a sequence holds. Harmless for one that holds nothing."""
        if sequence.kv.pages:
            self._allocator.release(sequence.kv.pages)
            self._holding.remove(sequence)
        sequence.release_lease()
        sequence.release_chunks()
        sequence.kv = self.empty_kv()
        sequence.progress.num_pages = sequence.progress.elsewhere = 0
        sequence.logits = sequence.prepared = None
        sequence.progress.own_step = sequence.request.fused is not None
        sequence.ticket.timeline.preempted = sequence.progress.preempted

    def check_integrity(self, sequences: Sequence[EngineSequence]) -> None:
        """Raise AssertionError unless every page is held by exactly its holders."""
        self._allocator.check_integrity()
        self._prefixes.tree.check_integrity()
        held = Counter(page for sequence in sequences for page in sequence.kv.pages)
        held.update(self._prefixes.held_pages())
        leases = [each.shared for each in sequences if each.shared is not None]
        if self._chunks is not None:
            self._chunks.check_integrity(leases)
            held.update(page for chunk in self._chunks for page in chunk.pages)
        for page in range(self._pool.num_pages):
            refs = self._allocator.refs(page)
            assert refs == held[page], f"page {page}: {refs} holds, {held[page]} holders"

    def _match(self, sequence: EngineSequence) -> tuple[TreeLease | None, list[int], int]:
        """Return a lease to read from or to offer behind, the pages it gives, and how many
        tokens."""
        prefixes = self._prefixes
        wants = sequence.request.use_tree and not sequence.unshared
        if not prefixes.is_on or not sequence.path or not wants:
            return None, [], 0
        rest = sequence.prompt_len - sum(chunk.num_tokens for chunk in sequence.path)
        lease = prefixes.acquire(sequence.path, rest, count=not sequence.counted)
        sequence.counted = True
        cached = min(lease.num_tokens, sequence.progress.known - 1)  # the last row is computed
        return lease, prefixes.table(lease), cached

    def _make_free(self, count: int) -> bool:
        return self._prefixes.reclaim(lambda: self._allocator.num_free >= count)
