"""Chunk KV that lies in the pool, once for all requests: which chunks, in which pages, for whom.

    lease ─► pages, empty ─► filled by the first pass over them ─► read by all ─► evicted

A chunk's pages belong to nobody's sequence. Keys lie there turned to their places in the chunk, and
nothing is written once they are filled. Requests lease what they read; what nobody leases stays as
long as nobody needs the room. Who goes first is told by the policy of the knowledge tree: by
default how often it is used lately, times what it cost to bring, in seconds per token. Ranks are
alike here and there, so both can be asked who has the least valuable (`ExactPrefixes.reclaim`).

A tenant's chunks are its own, as its exact KV is. What was deleted is found no more: those who
found it before read it to their end, and then it is gone. Books only: the bytes are the pool's.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.engine.pages import PageAllocator
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.policies import RankHeap, UsageRecord, open_policy
from kvweave.types import ChunkId

REMEMBERED = 1 << 16  # chunks whose use is known after they left
Name = tuple[str, ChunkKey]  # tenant, chunk


class WantedChunk(NamedTuple):
    """A chunk that a request would read from shared pages."""

    key: ChunkKey
    id: ChunkId
    num_tokens: int


@dataclass(slots=True, eq=False)
class ResidentChunk:
    """A chunk with pages. Changed by `ChunkPages` alone."""

    name: Name
    num_tokens: int
    pages: tuple[int, ...]
    usage: UsageRecord = field(repr=False)
    ids: set[ChunkId] = field(default_factory=set)  # what requests call it
    is_filled: bool = False
    is_rounded: bool = False  # it came from a codec that loses bits, or its pages do
    leases: int = 0
    is_found: bool = True  # False: deleted, or never to be found by others
    slots: NDArray[np.int64] | None = field(default=None, repr=False)  # of its tokens, when asked

    @property
    def key(self) -> ChunkKey:
        return self.name[1]


class ChunkLease:
    """The chunks of one request, each once. Released once; harmless the second time."""

    def __init__(self, chunks: dict[ChunkKey, ResidentChunk], owner: "ChunkPages") -> None:
        self.chunks = chunks
        self._owner = owner

    @property
    def filled(self) -> frozenset[ChunkKey]:
        """Chunks whose KV is in their pages."""
        return frozenset(key for key, chunk in self.chunks.items() if chunk.is_filled)

    @property
    def is_filled(self) -> bool:
        """Whether the KV of all chunks is in their pages."""
        return len(self.filled) == len(self.chunks)

    def fill(
        self, cost_s: float, is_gone: Callable[[ChunkId], bool], rounded: Collection[ChunkKey]
    ) -> None:
        """Note that a pass filled the pages of these chunks: see `ChunkPages.mark_filled`."""
        self._owner.mark_filled(self, cost_s, is_gone, rounded)

    @property
    def rounded(self) -> frozenset[ChunkKey]:
        """Chunks whose KV is, or will be, rounded by a codec."""
        if self._owner.rounds:
            return frozenset(self.chunks)
        return frozenset(key for key in self.filled if self.chunks[key].is_rounded)

    def drop(self, keys: Collection[ChunkKey]) -> None:
        """Give these chunks back before the others."""
        for key in keys:
            self._owner.release(self.chunks.pop(key))

    def release(self) -> None:
        self.drop(list(self.chunks))


class ChunkPages:
    """The books. The engine thread owns them; any thread calls `holds` and `stats`."""

    def __init__(
        self,
        allocator: PageAllocator,
        page_tokens: int,
        now_s: Callable[[], float] = time.monotonic,
        *,
        rounds: bool = False,
        policy: str = "pgdsf",
    ) -> None:
        """`page_tokens` of a chunk fit a page. `rounds`: not with all of their bits. `policy` is
        the tree's: what is worth least of both leaves first."""
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._now_s = now_s
        self.rounds = rounds
        self._policy = open_policy(policy)
        self._found: dict[Name, ResidentChunk] = {}
        self._hidden: list[ResidentChunk] = []  # found no more, and leased
        self._idle: RankHeap[ResidentChunk] = RankHeap()  # leased by none: these may leave
        self._usage: OrderedDict[Name, UsageRecord] = OrderedDict()  # of those that left
        self._counts = Counter(dict.fromkeys(("hits", "fills", "evictions", "forgotten"), 0))
        self.num_pages = 0
        self.num_tokens = 0

    # ---- any thread

    def holds(self, tenant: str, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Which of these chunks a request of a tenant would find filled, as it was a moment ago."""
        found = ((key, self._found.get((tenant, key))) for key in keys)
        return {key for key, chunk in found if chunk is not None and chunk.is_filled}

    def stats(self) -> dict[str, int]:
        return {
            "chunks_resident": len(self._found),
            "chunk_pages": self.num_pages,
            "chunk_tokens": self.num_tokens,
            **{f"chunk_{name}": number for name, number in self._counts.items()},
        }

    # ---- the engine thread

    def missing_pages(self, tenant: str, wanted: Sequence[WantedChunk]) -> int:
        """Pages that leasing these would take from the free ones."""
        lacking = {each.key: each for each in wanted if (tenant, each.key) not in self._found}
        return sum(self._pages_of(each.num_tokens) for each in lacking.values())

    def hold(self, tenant: str, wanted: Sequence[WantedChunk]) -> ChunkLease:
        """Lease what has pages already. `complete` brings the others."""
        lease = ChunkLease({}, self)
        for each in wanted:
            chunk = self._found.get((tenant, each.key))
            if chunk is not None and each.key not in lease.chunks:
                self._take(chunk, lease, each.id)
        return lease

    def complete(self, lease: ChunkLease, tenant: str, wanted: Sequence[WantedChunk]) -> None:
        """Take empty pages for what `hold` did not find. The caller has made enough of them
        free."""
        for each in wanted:
            if each.key in lease.chunks:
                continue
            name = (tenant, each.key)
            pages = self._allocator.take(self._pages_of(each.num_tokens))
            assert pages is not None, "there were enough"
            usage = self._usage.pop(name, None) or UsageRecord(each.num_tokens)
            chunk = ResidentChunk(name, each.num_tokens, tuple(pages), usage)
            self._found[name] = chunk
            self.num_pages += len(pages)
            self.num_tokens += each.num_tokens
            self._take(chunk, lease, each.id)

    def mark_filled(
        self,
        lease: ChunkLease,
        cost_s: float,
        is_gone: Callable[[ChunkId], bool],
        rounded: Collection[ChunkKey] = (),
    ) -> None:
        """Note that a pass filled the empty chunks of a lease.

        Bringing them took `cost_s`, and a codec had `rounded` some. Chunks that were deleted since
        their request found them stay the request's alone.
        """
        empty = [chunk for chunk in lease.chunks.values() if not chunk.is_filled]
        num_tokens = sum(chunk.num_tokens for chunk in empty)
        for chunk in empty:
            chunk.is_filled = True
            chunk.is_rounded = self.rounds or chunk.key in rounded
            chunk.usage.record_computation(cost_s * chunk.num_tokens / num_tokens, chunk.num_tokens)
            if chunk.is_found and any(map(is_gone, chunk.ids)):
                self._hide(chunk)
        self._counts["fills"] += len(empty)

    def release(self, chunk: ResidentChunk) -> None:
        """Count one lease less. A chunk that was never filled, or is found no more, is freed with
        its last lease."""
        chunk.leases -= 1
        if chunk.leases:
            return
        if chunk.is_found and chunk.is_filled:
            rank = self._policy.rank(chunk.usage.snapshot())
            self._idle.set(chunk, rank, chunk.usage.last_access_s)
            return
        if chunk.is_found:
            del self._found[chunk.name]
        else:
            self._hidden.remove(chunk)
        self._free(chunk)

    def lowest_rank(self) -> float | None:
        """Return the value of the chunk that would leave next; None: none may leave."""
        return next((rank for _, rank in self._idle.lowest(lambda _: True)), None)

    def shrink(self) -> bool:
        """Free the least valuable chunk that nobody leases. False: there is none."""
        found = next(self._idle.lowest(lambda _: True), None)
        if found is None:
            return False
        chunk, rank = found
        self._policy.record_eviction(rank)
        self._idle.remove(chunk)
        del self._found[chunk.name]
        self._usage[chunk.name] = chunk.usage
        while len(self._usage) > REMEMBERED:
            self._usage.popitem(last=False)
        self._free(chunk)
        self._counts["evictions"] += 1
        return True

    def discard(self, chunk: ResidentChunk) -> None:
        """Let nobody find a leased chunk from now on, because its KV is bad."""
        if chunk.is_found:
            self._hide(chunk)

    def forget(self, chunk_ids: Collection[ChunkId], tenant: str) -> int:
        """Let nobody find these chunks of a tenant, which were deleted. Returns how many there
        were."""
        wanted = set(chunk_ids)
        return self._forget(lambda chunk: not wanted.isdisjoint(chunk.ids), tenant)

    def forget_all(self, tenant: str) -> int:
        """Let nobody find any chunk of a tenant: all may have been deleted."""
        return self._forget(lambda _: True, tenant)

    def __iter__(self) -> Iterator[ResidentChunk]:
        """All chunks that have pages."""
        return iter([*self._found.values(), *self._hidden])

    def check_integrity(self, leases: Sequence[ChunkLease]) -> None:
        """Raise AssertionError unless every chunk is leased by exactly its lessees."""
        held = Counter(chunk for lease in leases for chunk in lease.chunks.values())
        idle = set(self._idle)
        for chunk in self:
            assert chunk.leases == held[chunk], f"{chunk}: {held[chunk]} requests lease it"
            in_time = chunk.is_found and chunk.is_filled and not chunk.leases
            assert (chunk in idle) == in_time, f"{chunk} is among the wrong ones"
            assert len(chunk.pages) == self._pages_of(chunk.num_tokens), f"{chunk} has its pages"
        assert held.keys() <= set(self), "a lease on a chunk that is gone"
        assert self.num_pages == sum(len(chunk.pages) for chunk in self), "pages are counted"
        assert self.num_tokens == sum(chunk.num_tokens for chunk in self), "and tokens"

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _take(self, chunk: ResidentChunk, lease: ChunkLease, chunk_id: ChunkId) -> None:
        chunk.leases += 1
        chunk.ids.add(chunk_id)
        chunk.usage.touch(self._now_s())
        self._idle.discard(chunk)
        lease.chunks[chunk.key] = chunk
        self._counts["hits"] += chunk.is_filled

    def _forget(self, is_one: Callable[[ResidentChunk], bool], tenant: str) -> int:
        gone = [c for c in self._found.values() if c.name[0] == tenant and is_one(c)]
        for chunk in gone:
            self._hide(chunk)
        self._counts["forgotten"] += len(gone)
        return len(gone)

    def _hide(self, chunk: ResidentChunk) -> None:
        del self._found[chunk.name]
        chunk.is_found = False
        if chunk.leases:
            self._hidden.append(chunk)
        else:
            self._idle.discard(chunk)
            self._free(chunk)

    def _free(self, chunk: ResidentChunk) -> None:
        self._allocator.release(chunk.pages)
        self.num_pages -= len(chunk.pages)
        self.num_tokens -= chunk.num_tokens
