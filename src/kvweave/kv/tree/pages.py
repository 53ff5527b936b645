"""Which node has pages where, under two byte budgets, and what leaves when room is needed."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvweave.kv.policies import ItemUsage, Policy, RankHeap
from kvweave.kv.tree.node import DEVICE, HOST, Node, PageOwner, Pages, PathMemory, TreeTier
from kvweave.types import ChunkId

MOST_EVICTIONS = 256  # the last ones that are remembered


class TreeEviction(NamedTuple):
    """A node that left a tier because room was needed."""

    at_s: float  # seconds since 1970
    tier: TreeTier
    chunk_id: ChunkId
    path: ChunkId  # the first of its path, which names its tenant
    size_bytes: int
    rank: float  # what it was worth there


class TreeBudget:
    """One tier of the tree: its byte budget, its policy with its own clock, and the leaves in it,
    of which one would leave next. Plain bookkeeping; changes no node but its rank.

    Only leaves are ranked, so the first candidate is found in O(log n) however deep the tree is.
    A leaf of the device tier has no child on the device; one of the host tier has no child at all.
    """

    def __init__(self, tier: TreeTier, capacity_bytes: int, policy: Policy) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.policy = policy
        self.evictions: deque[TreeEviction] = deque(maxlen=MOST_EVICTIONS)
        self._leaves: RankHeap[Node] = RankHeap()

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def rerank(self, node: Node, usage: ItemUsage) -> None:
        """Rank a node that entered this tier or was accessed, by the present clock."""
        node.ranks[self.tier] = self.policy.rank(usage)
        self.place(node)

    def place(self, node: Node) -> None:
        """Keep the node among the leaves if it is one, out of them if not."""
        if self._is_leaf(node):
            self._leaves.set(node, node.ranks[self.tier], node.usage.last_access_s)
        else:
            self._leaves.discard(node)

    def discard(self, node: Node) -> None:
        self._leaves.discard(node)

    def victims(self, missing_bytes: int, may_leave: Callable[[Node], bool]) -> list[Node] | None:
        """What must leave to free so many bytes: children before parents, lowest rank first.

        Nothing is changed, so that a request that cannot have all its room disturbs no other.
        None: even without everything that may leave there would not be enough.
        """
        chosen: list[Node] = []
        left_below: dict[Node, int] = {}  # children still in this tier, for parents of the chosen
        freed = 0
        leaves = self._leaves.lowest(may_leave)
        leaf = next(leaves, None)
        parents: list[tuple[float, float, bytes, Node]] = []  # became leaves through the chosen
        while freed < missing_bytes:
            if leaf is None and not parents:
                return None
            if leaf is not None and (not parents or _is_before(leaf[0], leaf[1], parents[0])):
                node, leaf = leaf[0], next(leaves, None)
            else:
                node = heapq.heappop(parents)[3]
            chosen.append(node)
            freed += node.pages[self.tier].size_bytes
            parent = node.parent
            assert parent is not None, "the preamble never leaves"
            left_below[parent] = left_below.get(parent, self._children(parent)) - 1
            if left_below[parent] == 0 and may_leave(parent) and self.tier in parent.pages:
                entry = (parent.ranks[self.tier], parent.usage.last_access_s, parent.key, parent)
                heapq.heappush(parents, entry)
        return chosen

    def record_evictions(self, nodes: list[Node]) -> None:
        """Raise the clock to the highest rank of nodes that were evicted; it never falls."""
        now_s = time.time()
        for node in nodes:
            rank = node.ranks[self.tier]
            self.policy.record_eviction(rank)
            size_bytes, path = node.pages[self.tier].size_bytes, _first_of(node).chunk_id
            gone = TreeEviction(now_s, self.tier, node.chunk_id, path, size_bytes, rank)
            self.evictions.append(gone)

    def lowest(self, may_leave: Callable[[Node], bool]) -> Node | None:
        """The leaf that would leave first."""
        return next((node for node, _ in self._leaves.lowest(may_leave)), None)

    def leaves(self) -> set[Node]:
        return set(self._leaves)

    def _children(self, node: Node) -> int:
        return node.device_children if self.tier is TreeTier.DEVICE else len(node.children)

    def _is_leaf(self, node: Node) -> bool:
        return self.tier in node.pages and node.depth > 0 and self._children(node) == 0


def _first_of(node: Node) -> Node:
    """The first of a node's path, behind the root."""
    while node.depth > 1 and node.parent is not None:
        node = node.parent
    return node


class NodePages:
    """The pages of one tree. Keeps the device part above the host part. Not thread-safe.

    A node that leaves the device for the first time is copied to host; the copy stays until it
    leaves the host tier, so every later eviction from the device only frees. Where host has no
    room the node goes for good, with everything below it.
    """

    def __init__(
        self,
        budgets: dict[TreeTier, TreeBudget],
        owner: PageOwner,
        usage: Callable[[Node], ItemUsage],
        memory: PathMemory,
    ) -> None:
        self.budgets = budgets
        self.memory = memory
        self.num_nodes = 0  # without the preamble
        self._owner = owner
        self._usage = usage
        self._doomed: list[Node] = []  # tops of subtrees out of the tree that a lease still holds

    def give(self, node: Node, tier: TreeTier, pages: Pages) -> None:
        """Give a node a copy of its pages. Its room must have been made."""
        assert tier not in node.pages, "a node has one copy per tier"
        node.pages[tier] = pages
        self.budgets[tier].used_bytes += pages.size_bytes
        self.budgets[tier].rerank(node, self._usage(node))
        if tier is DEVICE and node.parent is not None:
            node.parent.device_children += 1
            self.budgets[DEVICE].place(node.parent)

    def rerank(self, node: Node) -> ItemUsage:
        """Rank an accessed node anew in each tier, by the tier's own clock; returns by what."""
        usage = self._usage(node)
        for tier in node.pages:
            self.budgets[tier].rerank(node, usage)
        return usage

    def add(self, node: Node) -> None:
        """Hang a new node below its parent; give it pages next."""
        assert node.parent is not None, "the preamble is there from the start"
        node.parent.children[node.chunk_id] = node
        self.budgets[HOST].place(node.parent)
        self.num_nodes += 1

    def make_device_room(self, size_bytes: int) -> bool:
        """Free so many bytes on the device, or change nothing and say False."""
        budget = self.budgets[DEVICE]
        victims = budget.victims(size_bytes - budget.free_bytes, _is_unpinned)
        if victims is None:
            return False
        budget.record_evictions(victims)
        for node in victims:
            if HOST in node.pages or self.swap_out(node):
                self._leave_device(node)
            else:
                self.drop(node)
        return True

    def lowest_device_leaf(self) -> Node | None:
        """The leaf that would leave the device first; None: there is none."""
        return self.budgets[DEVICE].lowest(_is_unpinned)

    def swap_out(self, node: Node) -> bool:
        """Copy a device node to host, pushing out what host ranks lowest. False: no room, or room
        of what is worth more: then nothing is copied and nothing leaves. What hangs below does not
        speak for a node: a cheap one in front of a dear one would push out what is dearer yet."""
        budget = self.budgets[HOST]
        pages = node.pages[DEVICE]
        victims = budget.victims(pages.size_bytes - budget.free_bytes, _is_on_host_alone)
        if victims is None or not self._outranks(node, victims):
            return False
        copy = self._owner.copy_out(pages)
        if copy is None:  # no room is made for what does not come
            return False
        budget.record_evictions(victims)
        for victim in victims:
            self.drop(victim)
        self.give(node, HOST, copy)
        return True

    def copy_ahead(self, node: Node) -> bool:
        """Copy a device node to host while it stays, and only into room that is free."""
        has_room = self.budgets[HOST].free_bytes >= node.pages[DEVICE].size_bytes
        return has_room and self.swap_out(node)

    def lose_host(self, node: Node) -> None:
        """Drop a bad host copy. A node without another copy goes, with everything below it."""
        pages = node.pages.pop(HOST)
        self.budgets[HOST].used_bytes -= pages.size_bytes
        self.budgets[HOST].discard(node)
        self._owner.free(HOST, pages)
        if not node.pages and not self.is_doomed(node):
            self.drop(node)

    def copy_in(self, node: Node) -> int | None:
        """Copy a host node to the device; bytes copied, or None when that cannot be."""
        pages = node.pages.get(HOST)
        if pages is None or self.is_doomed(node) or not self.make_device_room(pages.size_bytes):
            return None
        copy = self._owner.copy_in(pages)
        if copy is None:
            return None
        self.give(node, DEVICE, copy)
        return copy.size_bytes

    def drop(self, top: Node) -> None:
        """Take a node and all below it out of the tree; leased pages go with the lease."""
        parent = top.parent
        assert parent is not None, "the preamble never leaves"
        del parent.children[top.chunk_id]
        top.parent = None
        if DEVICE in top.pages:
            parent.device_children -= 1
        for budget in self.budgets.values():
            budget.place(parent)
        pinned = False
        for node in subtree(top):
            self.num_nodes -= 1
            self.memory.keep(node.key, node.usage)
            pinned = pinned or node.pins > 0
            for budget in self.budgets.values():
                budget.discard(node)
        if pinned:
            self._doomed.append(top)
        else:
            self._free_below(top)

    def unpin(self, nodes: list[Node]) -> None:
        """Take a lease's pin off its nodes."""
        for node in nodes:
            node.pins -= 1
            assert node.pins >= 0, "a lease was released twice"
        held = [top for top in self._doomed if any(node.pins for node in subtree(top))]
        for top in self._doomed:
            if top not in held:
                self._free_below(top)
        self._doomed = held

    def is_doomed(self, node: Node) -> bool:
        """Whether a leased node is no longer in the tree."""
        while node.parent is not None:
            node = node.parent
        return node.depth > 0

    def doomed_nodes(self) -> Iterator[Node]:
        for top in self._doomed:
            yield from subtree(top)

    def check_integrity(self, root: Node) -> None:
        """Raise AssertionError if the books do not balance."""
        live = subtree(root)
        assert len(live) - 1 == self.num_nodes, f"{len(live) - 1} nodes, books say {self.num_nodes}"
        held = [*live, *self.doomed_nodes()]
        for budget in self.budgets.values():
            _check_budget(budget, live, held)
        for node in live:
            _check_node(node)

    def _outranks(self, node: Node, victims: list[Node]) -> bool:
        """Whether host would rather have this one; at a tie it is the more recent one."""
        rank = self.budgets[HOST].policy.rank(self._usage(node))
        return all(victim.ranks[HOST] <= rank for victim in victims)

    def _leave_device(self, node: Node) -> None:
        pages = node.pages.pop(DEVICE)
        self.budgets[DEVICE].used_bytes -= pages.size_bytes
        self.budgets[DEVICE].discard(node)
        self._owner.free(DEVICE, pages)
        assert node.parent is not None, "the preamble never leaves"
        node.parent.device_children -= 1
        self.budgets[DEVICE].place(node.parent)

    def _free_below(self, top: Node) -> None:
        for node in subtree(top):
            for tier, pages in node.pages.items():
                self.budgets[tier].used_bytes -= pages.size_bytes
                self._owner.free(tier, pages)
            node.pages = {}


def _check_budget(budget: TreeBudget, live: list[Node], held: list[Node]) -> None:
    tier = budget.tier
    used = sum(node.pages[tier].size_bytes for node in held if tier in node.pages)
    assert used == budget.used_bytes, f"{tier}: {used} bytes, books say {budget.used_bytes}"
    assert used <= budget.capacity_bytes, f"{tier}: {used} of {budget.capacity_bytes} bytes"
    below = {id(child.parent) for child in live if tier is HOST or DEVICE in child.pages}
    leaves = {n for n in live if n.depth and tier in n.pages and id(n) not in below}
    assert budget.leaves() == leaves, f"{tier}: ranked leaves differ from the tree's"


def _check_node(node: Node) -> None:
    on_device = sum(1 for child in node.children.values() if DEVICE in child.pages)
    assert node.device_children == on_device, f"{node}: {on_device} children on device"
    parent = node.parent
    if parent is None:
        return
    assert node.pins <= parent.pins, f"{node}: pins rise"
    assert node.pages, f"{node} is in no tier"
    if parent.num_tokens:  # with no preamble there is nothing to stand behind
        assert parent.pages, f"{node} hangs below nothing"
        assert DEVICE not in node.pages or DEVICE in parent.pages, f"{node} above its parent"


def subtree(top: Node) -> list[Node]:
    """A node and everything below it, parents first."""
    found = [top]
    for node in found:
        found.extend(node.children.values())
    return found


def _is_unpinned(node: Node) -> bool:
    return node.pins == 0 and node.depth > 0


def _is_on_host_alone(node: Node) -> bool:
    return node.pins == 0 and node.depth > 0 and DEVICE not in node.pages


def _is_before(node: Node, rank: float, entry: tuple[float, float, bytes, Node]) -> bool:
    return (rank, node.usage.last_access_s, node.key) <= entry[:3]
