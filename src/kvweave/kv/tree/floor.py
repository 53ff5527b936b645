"""One tier of the tree: its byte budget, its policy with its own clock, and the leaves in it."""

import heapq
from collections.abc import Callable

from kvweave.kv.policies import ItemUsage, Policy, RankHeap
from kvweave.kv.tree.node import Node, TreeTier


class Floor:
    """Who would leave this tier next. Plain bookkeeping; changes no node but its rank.

    Only leaves are ranked, so the first candidate is found in O(log n) however deep the tree is.
    A leaf of the device tier has no child on the device; one of the host tier has no child at all.
    """

    def __init__(self, tier: TreeTier, capacity_bytes: int, policy: Policy) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.policy = policy
        self._leaves: RankHeap[Node] = RankHeap()

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def rerank(self, node: Node, usage: ItemUsage) -> None:
        """The node entered this tier or was accessed: its rank is taken from today's clock."""
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
        """Who must leave to free so many bytes: children before parents, lowest rank first.

        Nothing is changed, so that a request that cannot have all its room disturbs nobody.
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
            if leaf is not None and (not parents or _before(leaf[0], leaf[1], parents[0])):
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

    def evicted(self, nodes: list[Node]) -> None:
        """These left by rank: the clock rises to the highest of them and never falls."""
        for node in nodes:
            self.policy.left(node.ranks[self.tier])

    def leaves(self) -> set[Node]:
        return set(self._leaves)

    def _children(self, node: Node) -> int:
        return node.device_children if self.tier is TreeTier.DEVICE else len(node.children)

    def _is_leaf(self, node: Node) -> bool:
        return self.tier in node.pages and node.depth > 0 and self._children(node) == 0


def _before(node: Node, rank: float, entry: tuple[float, float, bytes, Node]) -> bool:
    return (rank, node.usage.last_access_s, node.key) <= entry[:3]
