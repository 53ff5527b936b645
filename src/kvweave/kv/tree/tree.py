"""The knowledge tree itself: lease, load, extend, survive.

    preamble ── D1 ── D3        a node is a chunk *behind its path*: D3 behind D1 and D3 behind D2
            └── D2 ── D3        are two nodes with different KV

The engine thread makes every change; what others may read meanwhile is in `reads.py`. A failed copy
is a shorter match, never an error.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from kvweave.kv.policies import open_policy
from kvweave.kv.tree.config import TreeConfig
from kvweave.kv.tree.keeper import Keeper, subtree
from kvweave.kv.tree.lease import TreeLease
from kvweave.kv.tree.memory import PathMemory
from kvweave.kv.tree.node import (
    DEVICE,
    HOST,
    ChunkRef,
    Node,
    PageOwner,
    Pages,
    TreeTier,
    path_key,
)
from kvweave.kv.tree.pricing import NodePricing
from kvweave.kv.tree.reads import TreeReads
from kvweave.types import ChunkId

NO_PREAMBLE = ChunkRef(ChunkId(""), 0)


class Extended(Enum):
    """What became of pages offered to the tree."""

    ADOPTED = "adopted"  # the tree owns them now
    PRESENT = "present"  # the path is there already; the caller keeps its pages
    TOO_DEEP = "too deep"  # behind max_depth, or behind a part that the tree does not hold
    NO_ROOM = "no room"  # leased nodes are in the way; the caller keeps its pages


class KnowledgeTree(TreeReads):
    """Exact KV of ordered chunk paths behind one preamble, in device and host memory.

    For several preambles or tenants under one budget, leave the preamble empty here and make each
    real preamble the first chunk of its paths.

    `cost_s(cached, new)` is the measured time of a prefill; it prices what eviction would lose.
    """

    def __init__(
        self,
        config: TreeConfig,
        owner: PageOwner,
        cost_s: Callable[[int, int], float],
        preamble: ChunkRef = NO_PREAMBLE,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._now_s = now_s
        memory = PathMemory(config.remembered_paths)
        self._pricing = NodePricing(cost_s, memory, config.max_depth)
        policies = (open_policy(config.policy), open_policy(config.policy))
        floors = Keeper.make_floors(config.device_bytes, config.host_bytes, policies)
        self._keeper = Keeper(floors, owner, self._pricing.usage, memory)
        key = path_key(b"", preamble.id)
        usage = memory.take(key, preamble.num_tokens)
        length = preamble.num_tokens
        super().__init__(Node(preamble.id, length, length, 0, key, None, usage))

    def price(self, cost_s: Callable[[int, int], float]) -> None:
        """Price by another `cost_s` from now on."""
        self._pricing.change(cost_s)

    def acquire(
        self, chunks: Sequence[ChunkRef], num_question_tokens: int, *, count: bool = True
    ) -> TreeLease:
        """Pin the longest stored prefix and count one access of every chunk on the path.

        `count=False` for a second look on behalf of the same request, as speculation takes.
        """
        match = self.match([chunk.id for chunk in chunks])
        gone = self.root.num_tokens and not self.root.pages
        lease = TreeLease([] if gone else [self.root, *match.nodes], self._keeper.unpin)
        if count:
            self._count(chunks, lease, num_question_tokens)
        return lease

    def load(self, lease: TreeLease) -> int:
        """Bring the leased path to the device, from the preamble on; returns bytes brought.

        Where room or a copy is lacking the lease ends there: its `num_tokens` says how far it got.
        """
        brought = 0
        for place, node in enumerate(lease.nodes):
            if DEVICE in node.pages or node.num_tokens == 0:
                continue
            copied = self._keeper.copy_in(node)
            if copied is None:
                lease.cut(place)
                break
            brought += copied
        return brought

    def extend(self, lease: TreeLease, chunk: ChunkRef, pages: Pages) -> Extended:
        """Offer the pages of the next chunk behind a leased path. Exact KV only, never fused.

        The node is then pinned by the same lease, so that the next chunk can follow. Call `load`
        first: the path must be on the device.
        """
        parent = lease.nodes[-1] if lease.nodes else None
        if parent is None or self._keeper.is_doomed(parent):
            return Extended.TOO_DEEP
        if self.config.max_depth is not None and parent.depth >= self.config.max_depth:
            return Extended.TOO_DEEP
        if parent.num_tokens and DEVICE not in parent.pages:
            return Extended.TOO_DEEP
        node = parent.children.get(chunk.id)
        if node is not None and DEVICE in node.pages:
            lease.join(node)
            return Extended.PRESENT
        if not self._keeper.make_device_room(pages.size_bytes):
            return Extended.NO_ROOM
        node = parent.children.get(chunk.id)  # making room may have dropped its host copy
        if node is None:
            key = path_key(parent.key, chunk.id)
            usage = self._keeper.memory.take(key, chunk.num_tokens)
            end = parent.end + chunk.num_tokens
            node = Node(chunk.id, chunk.num_tokens, end, parent.depth + 1, key, parent, usage)
            self._keeper.add(node)
        self._keeper.give(node, DEVICE, pages)
        lease.join(node)
        return Extended.ADOPTED

    def install_preamble(self, pages: Pages) -> bool:
        """Give the preamble its device pages: once at the start, and again after a lost device."""
        if DEVICE in self.root.pages or not self._keeper.make_device_room(pages.size_bytes):
            return False
        self._keeper.give(self.root, DEVICE, pages)
        return True

    def shrink(self) -> bool:
        """Let the least valuable leaf leave the device: others need the memory. Its host copy, if
        there is room for one, stays. False: leases are in the way, or there is nothing."""
        return self._keeper.make_device_room(self._keeper.floors[DEVICE].free_bytes + 1)

    def holders(self) -> Iterator[Node]:
        """Every node that has device pages, those that only a lease still holds included."""
        nodes = (self.root, *self, *self._keeper.doomed())
        return (node for node in nodes if DEVICE in node.pages)

    def replicate(self, max_bytes: int) -> int:
        """Copy upper nodes to host ahead of time, the preamble first; returns bytes copied.

        For idle moments. Evicting a replicated node copies nothing, and a lost device does not
        lose it. A node goes only behind its parent, or its copy would be of no use after a loss.
        """
        copied = 0
        level = [self.root]
        while level:
            level.sort(key=lambda node: (-node.ranks.get(DEVICE, 0.0), node.key))
            below: list[Node] = []
            for node in level:
                if DEVICE in node.pages and HOST not in node.pages:
                    size_bytes = node.pages[DEVICE].size_bytes
                    if copied + size_bytes > max_bytes or not self._keeper.swap_out(node):
                        continue
                    copied += size_bytes
                below.extend(child for child in node.children.values() if DEVICE in child.pages)
            level = below
        return copied

    def lose_device(self) -> int:
        """The device's memory is gone. Keep what host memory can serve; returns nodes kept.

        Leases taken before hold pages that are no more: their requests must start again.
        """
        keeper = self._keeper
        keeper.forget_device([self.root, *self, *keeper.doomed()])
        served = [self.root] if HOST in self.root.pages or not self.root.num_tokens else []
        unserved = [] if served else list(self.root.children.values())
        for node in served:
            for child in node.children.values():
                (served if HOST in child.pages else unserved).append(child)
        for node in unserved:
            keeper.drop(node)
        return keeper.num_nodes

    def lose_copy(self, handle: object) -> None:
        """A host copy that its owner gave did not arrive: the tree does without it. O(nodes)."""
        for node in (self.root, *self, *self._keeper.doomed()):
            pages = node.pages.get(HOST)
            if pages is not None and pages.handle is handle:
                self._keeper.lose_host(node)
                return

    def forget(self, chunk_id: ChunkId) -> int:
        """A chunk was deleted: it and everything behind it can no longer be found. Returns nodes.

        Pages that a running request reads stay until its lease goes.
        """
        before = self._keeper.num_nodes
        tops = [node for node in self if node.chunk_id == chunk_id]
        for node in tops:  # parents first: one below another is gone by then
            if node.parent is not None and not self._keeper.is_doomed(node):
                self._keeper.drop(node)
        return before - self._keeper.num_nodes

    def __iter__(self) -> Iterator[Node]:
        """Every node but the preamble, parents before children."""
        return iter(subtree(self.root)[1:])

    def __len__(self) -> int:
        return self._keeper.num_nodes

    def used_bytes(self, tier: TreeTier) -> int:
        return self._keeper.floors[tier].used_bytes

    def clock(self, tier: TreeTier) -> float:
        """The logical clock of a tier's policy; 0 for policies that have none."""
        return self._keeper.floors[tier].policy.clock

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not balance. O(nodes): for idle moments."""
        self._keeper.check_integrity(self.root)

    def _count(self, chunks: Sequence[ChunkRef], lease: TreeLease, question: int) -> None:
        now_s = self._now_s()
        for node in lease.nodes:
            node.usage.touch(now_s)
            self._keeper.rerank(node)
        last = lease.nodes[-1] if lease.nodes else self.root
        found = max(0, len(lease.nodes) - 1)
        self._pricing.count(last, lease.num_tokens, chunks[found:], found, question, now_s)
