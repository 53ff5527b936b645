"""Exact prefixes that requests share: the knowledge tree over pages of the pool.

A node's pages are those that its tokens lie in, in the order of the prompt. The same path always
stands at the same positions, so pages line up: page j of any sequence on the path holds positions
[j * page, (j + 1) * page). Chunks end in the middle of pages, hence two rules:

- the first page of a node also holds the rows in front of it that lie in the same page, so that a
  node's pages are good from their first row to its last token, whichever request computed them;
- a request that continues behind a node that ends inside a page copies the rows of that page up to
  the end of the node and writes to the copy. Rows that others may read are written once, before
  they are offered, and never again.

A path begins with the preamble, named with the tenant, so that nothing is shared between tenants.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from kvweave.engine.bad_pages import has_bad_rows
from kvweave.engine.chunk_pages import ChunkPages
from kvweave.engine.config import EngineConfig
from kvweave.engine.offload import ArrivedCopy, TreePages, open_offload
from kvweave.engine.pages import PageAllocator
from kvweave.engine.request import EngineChunk, EngineRequest
from kvweave.engine.tombstones import Tombstones
from kvweave.fuse.protocol import Prefix
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.tree import (
    ChunkRef,
    Extended,
    KnowledgeTree,
    Pages,
    TreeConfig,
    TreeLease,
)
from kvweave.kv.tree.node import DEVICE
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.types import ChunkId

HOST_SHARE = 4  # times the pool, for exact KV that left the device; a CPU's pool is host memory
AHEAD_BYTES = 64 << 20  # of exact KV copied to host in one idle moment; the next one follows
AFTER_FAILURE_S = 60.0  # before copies are made ahead again: what failed once may fail each time
Cost = Callable[[int, int], float]  # seconds of a prefill: cached tokens, new tokens


def guessed_cost_s(cached: int, new: int) -> float:
    """What a prefill costs before it was measured: linear in rows, and in what they look at."""
    return new * (1e-3 + 1e-7 * (cached + new / 2))


def path_of(
    namespace: str, preamble: Sequence[int], chunks: Sequence[EngineChunk]
) -> tuple[ChunkRef, ...]:
    """A prompt's path in the tree. The tenant is part of its first name, and so of all paths."""
    refs = [ChunkRef(chunk.id, len(chunk.token_ids)) for chunk in chunks]
    if preamble:
        return (preamble_ref(preamble, namespace), *refs)
    if refs:
        refs[0] = refs[0]._replace(id=ChunkId(f"{namespace}|{refs[0].id}"))
    return tuple(refs)


def preamble_ref(preamble: Sequence[int], namespace: str = "") -> ChunkRef:
    """Names a preamble by its tokens and its tenant. An empty one is a path's beginning too."""
    digest = hashlib.blake2b(repr(tuple(preamble)).encode(), digest_size=16)
    return ChunkRef(ChunkId(f"{namespace}|preamble-{digest.hexdigest()}"), len(preamble))


def _split_name(name: ChunkId) -> tuple[str, ChunkId]:
    """Return namespace and chunk of a path's first part. Only the namespace may have a bar."""
    namespace, _, chunk_id = name.rpartition("|")
    return namespace, ChunkId(chunk_id)


class ExactPrefixes:
    """The tree and its pages. The engine thread owns it; any thread reads `tombstones`, matches in
    `tree` and calls `copy_stats`."""

    def __init__(
        self,
        cfg: EngineConfig,
        pool: KVPool,
        allocator: PageAllocator,
        cost_s: Cost,
        post: Callable[[ArrivedCopy], None],
        chunks: ChunkPages | None = None,
    ) -> None:
        """What is given to `post` is for `settle`. `chunks` lie in the same pool: what is the
        least valuable of both leaves first, and what is deleted leaves both."""
        self._pool = pool
        self._chunks = chunks
        self._allocator = allocator
        self._page_tokens = pool.page_tokens
        device_bytes = int(cfg.tree_share * pool.num_pages) * pool.page_bytes
        host_tokens = cfg.host_tokens
        if host_tokens is None:
            on_cpu = pool.keys.device.type == "cpu"
            host_tokens = 0 if on_cpu else HOST_SHARE * pool.num_pages * pool.page_tokens
        host_bytes = host_tokens * pool.page_bytes // pool.page_tokens
        self.is_on = device_bytes > 0
        config = TreeConfig(max(1, device_bytes), host_bytes, cfg.tree_policy)
        self._offload = open_offload(pool, post) if host_bytes and self.is_on else None
        self._tree_pages = TreePages(pool, allocator, self._offload)
        self.tree = KnowledgeTree(config, self._tree_pages, cost_s)
        self.tombstones = Tombstones()
        self._ahead_from_s = 0.0  # no copies ahead of time before
        self._pins: dict[Sequence[ChunkRef], TreeLease] = {}  # until a request needs the whole pool

    def acquire(
        self, path: Sequence[ChunkRef], num_question_tokens: int, *, count: bool
    ) -> TreeLease:
        """Pin what is there of a path, and bring it to the device as far as it goes."""
        lease = self.tree.acquire(path, num_question_tokens, count=count)
        self.tree.load(lease)
        return lease

    def table(self, lease: TreeLease) -> list[int]:
        """The pages of a leased path, in position order."""
        table: list[int] = []
        for node in lease.nodes:
            if node.num_tokens:
                first = (node.end - node.num_tokens) // self._page_tokens
                table[first:] = node.pages[DEVICE].handle  # the deeper node's first page has both
        return table

    def copy(self, lease: TreeLease, token_ids: Sequence[int]) -> Prefix:
        """A leased path, whose tokens these are, as one piece of KV."""
        pool, num_tokens = self._pool, lease.num_tokens
        at = torch.tensor(self.table(lease), device=pool.keys.device)
        layers = (
            LayerKV(
                pool.keys[layer, at].flatten(0, 1)[:num_tokens],  # [T, Hk, D]
                pool.values[layer, at].flatten(0, 1)[:num_tokens],
            )
            for layer in range(pool.keys.shape[0])
        )
        return Prefix(tuple(token_ids[:num_tokens]), tuple(layers))

    def read(self, path: Sequence[ChunkRef], token_ids: Sequence[int]) -> Prefix | None:
        """Return a copy of the KV of a path, whose tokens these are; None: not all is there."""
        lease = self.acquire(path, 0, count=False)
        try:
            is_whole = lease.num_tokens == len(token_ids)  # what leaves the device may get lost
            return self.copy(lease, token_ids) if is_whole else None
        finally:
            lease.release()

    def offer(self, lease: TreeLease, chunk: ChunkRef, start: int, kv: PagedKV) -> bool:
        """Offer the tokens [start, start + chunk.num_tokens) of a sequence. False: the tree has no
        room, and none for what stands behind them."""
        end = start + chunk.num_tokens
        pages = kv.page_table[start // self._page_tokens : -(-end // self._page_tokens)]
        self._allocator.hold(pages)
        offered = Pages(len(pages) * self._pool.page_bytes, tuple(pages))
        extended = self.tree.extend(lease, chunk, offered)
        if extended is not Extended.ADOPTED:
            self._allocator.release(pages)
        return extended in (Extended.ADOPTED, Extended.PRESENT)

    def adopt(
        self,
        path: Sequence[ChunkRef],
        kv: Tensor,
        is_bad: Callable[[Sequence[int], int], bool],
    ) -> bool:
        """Put the KV of the last part of a path into the tree, from pages elsewhere: [2, L, pages,
        page, Hk, D]. False: what stands in front of it is not there, there is no room for it
        without letting others go, or `is_bad` says of its first rows that they are no numbers."""
        last, count = path[-1], kv.shape[2]
        with self.acquire(path[:-1], 0, count=False) as lease:
            start = sum(part.num_tokens for part in path[:-1])
            room = self.tree.config.device_bytes - self.tree.used_bytes(DEVICE)
            is_fit = lease.num_tokens == start and count * self._pool.page_bytes <= room
            taken = self._allocator.take(count) if is_fit else None
            if taken is None:
                return False
            try:
                at = torch.tensor(taken, device=self._pool.keys.device)
                source = kv.to(self._pool.keys.device)
                self._pool.keys[:, at], self._pool.values[:, at] = source
                first = start // self._page_tokens
                if is_bad(taken, start + last.num_tokens - first * self._page_tokens):
                    return False
                table = [*self.table(lease)[:first], *taken]
                return self.offer(lease, last, start, PagedKV(self._pool, table))
            finally:
                self._allocator.release(taken)

    def pin(self, namespace: str, preamble: Prefix) -> bool:
        """Put a preamble that was computed elsewhere into the tree, to stay there. False: there is
        no room for it, or none now."""
        path = path_of(namespace, preamble.token_ids, ())
        if path in self._pins:
            return True
        count = -(-len(preamble.token_ids) // self._page_tokens)
        lease = self.acquire(path, 0, count=False)
        if path and lease.num_tokens < len(preamble.token_ids):
            if not self.reclaim(lambda: self._allocator.num_free >= count):
                lease.release()
                return False
            kv = PagedKV(self._pool, self._allocator.take(count) or ())
            try:
                self._write(preamble, kv)
                fits = self.offer(lease, path[0], 0, kv)
            except RuntimeError:  # torch's word for every CUDA error: the caller's to hear
                lease.release()
                raise
            finally:
                self._allocator.release(kv.page_table)
            if not fits:
                lease.release()
                return False
        self._pins[path] = lease
        return True

    def _write(self, preamble: Prefix, kv: PagedKV) -> None:
        slots = torch.tensor(kv.slots(range(len(preamble.token_ids))))
        for layer, made in enumerate(preamble.layers):
            keys, values = self._pool.slots(layer)
            keys[slots], values[slots] = made.k, made.v

    def continue_page(self, source: int, target: int, num_rows: int) -> int:
        """Copy the rows of a page that a leased path ends in, for a request that goes on behind
        them. Returns how many it has; none if the device refuses: then they are computed again."""
        try:
            self._pool.copy_rows(source, target, num_rows)
        except RuntimeError as error:
            self._tree_pages.report_failure(error)
            return 0
        return num_rows

    def drop_bad_pages(self, path: Sequence[ChunkRef]) -> int:
        """Let go of what the tree has of a path from the first part on whose pages hold what is no
        number. Returns nodes that went."""
        for node in self.tree.match([chunk.id for chunk in path]).nodes:
            if DEVICE not in node.pages or not node.num_tokens:
                continue
            first = (node.end - node.num_tokens) // self._page_tokens
            num_rows = node.end - first * self._page_tokens
            if has_bad_rows(self._pool, node.pages[DEVICE].handle, num_rows):
                for pinned in [path for path, lease in self._pins.items() if node in lease.nodes]:
                    self._pins.pop(pinned).release()  # whoever plans next pins it again
                return self.tree.discard(node)
        return 0

    def unpin(self) -> None:
        """Let preambles leave like other leaves. What was pinned is a copy, and is computed
        again."""
        for lease in self._pins.values():
            lease.release()
        self._pins.clear()

    def forget(self, chunk_ids: Collection[ChunkId], namespace: str = "") -> int:
        """Drop deleted chunks of a namespace, and all that stands behind them, from the tree for
        good: a request that found them before does not bring them back. Returns nodes that went."""
        wanted = set(chunk_ids)
        self.tombstones.add(wanted, namespace)
        if self._chunks is not None:
            self._chunks.forget(wanted, namespace)
        own = self._tops_of(namespace)
        first = [top for top in own if _split_name(top)[1] in wanted]
        return sum(self.tree.forget(name, own) for name in (*first, *wanted))

    def forget_all(self, namespace: str = "") -> int:
        """Drop all chunks of a namespace, of which any may have been deleted. Pinned preambles
        stay."""
        self.tombstones.add_all(namespace)
        if self._chunks is not None:
            self._chunks.forget_all(namespace)
        pinned = {path[0].id for path in self._pins if path}
        own = self._tops_of(namespace)
        names: list[ChunkId] = []
        for top in own:
            names += self.tree.root.children[top].children if top in pinned else [top]
        return sum(self.tree.forget(name, own) for name in dict.fromkeys(names))

    def _tops_of(self, namespace: str) -> list[ChunkId]:
        """Where the paths of a namespace begin."""
        return [top for top in self.tree.root.children if _split_name(top)[0] == namespace]

    def as_of(self, request: EngineRequest) -> int:
        """When the chunks of a request that begins now were found."""
        return self.tombstones.generation if request.as_of is None else request.as_of

    def is_gone(self, chunk: ChunkRef, as_of: int, namespace: str) -> bool:
        """Whether a part of a path found then has been deleted since. Its first may name the tenant
        as well."""
        return self.tombstones.is_gone(_split_name(chunk.id)[1], as_of, namespace)

    def reclaim(self, enough: Callable[[], bool]) -> bool:
        """Let leaves and chunks that are not in use go, the least valuable first, until there is
        enough."""
        while not enough():
            if not self._shrink():
                return False
        return True

    def _shrink(self) -> bool:
        lowest = None if self._chunks is None else self._chunks.lowest_rank()
        if self._chunks is None or lowest is None:
            return self.tree.shrink()
        leaf = self.tree.lowest_rank()
        if leaf is not None and leaf < lowest and self.tree.shrink():
            return True
        return self._chunks.shrink()

    def copy_stats(self) -> dict[str, int]:
        """What became of exact KV that left the pool. Any thread."""
        return self._tree_pages.stats()

    @property
    def is_offloading(self) -> bool:
        """Whether `settle` is still to hear of a copy."""
        return self._offload is not None and self._offload.num_bytes > 0

    def replicate_some(self) -> int:
        """Copy upper nodes to host memory while they stay in the pool, so that leaving it later
        copies nothing. For idle moments.

        Returns bytes; `settle` hears of them, and then is the next such moment. Without a link
        beside the steps, as on a CPU, there is nothing to gain.
        """
        if self._offload is None or self._offload.num_bytes:
            return 0
        if time.monotonic() < self._ahead_from_s:
            return 0
        return self.tree.replicate(min(AHEAD_BYTES, self._offload.most_bytes // 2))

    def settle(self, arrived: ArrivedCopy) -> None:
        """Take in that a copy which left the pool is in host memory, or will never be."""
        if isinstance(arrived.result, Exception):
            self._ahead_from_s = time.monotonic() + AFTER_FAILURE_S
        if not self._tree_pages.settle(arrived):
            self.tree.lose_copy(arrived.copy)

    def close(self) -> None:
        """Let no thread touch the pool's memory any more. Called when the engine thread is gone."""
        if self._offload is not None:
            self._offload.close()

    def held_pages(self) -> list[int]:
        """Pages that the tree holds, once for every node that does."""
        return [page for node in self.tree.holders() for page in node.pages[DEVICE].handle]
