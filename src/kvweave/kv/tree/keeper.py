"""Which node has pages where, under two byte budgets, and who leaves when room is needed."""

from collections.abc import Callable, Iterator

from kvweave.kv.policies import ItemUsage, Policy
from kvweave.kv.tree.floor import Floor
from kvweave.kv.tree.memory import PathMemory
from kvweave.kv.tree.node import DEVICE, HOST, Node, PageOwner, Pages, TreeTier


class Keeper:
    """The pages of one tree. Keeps the device part above the host part. Not thread-safe.

    A node that leaves the device for the first time is copied to host; the copy stays until it
    leaves the host tier, so every later eviction from the device only frees. Where host has no
    room the node goes for good, with everything below it.
    """

    def __init__(
        self,
        floors: dict[TreeTier, Floor],
        owner: PageOwner,
        usage: Callable[[Node], ItemUsage],
        memory: PathMemory,
    ) -> None:
        self.floors = floors
        self.memory = memory
        self.num_nodes = 0  # without the preamble
        self._owner = owner
        self._usage = usage
        self._doomed: list[Node] = []  # tops of subtrees out of the tree that a lease still holds

    @staticmethod
    def make_floors(
        device_bytes: int, host_bytes: int, policies: tuple[Policy, Policy]
    ) -> dict[TreeTier, Floor]:
        return {
            DEVICE: Floor(DEVICE, device_bytes, policies[0]),
            HOST: Floor(HOST, host_bytes, policies[1]),
        }

    def give(self, node: Node, tier: TreeTier, pages: Pages) -> None:
        """A node gets a copy. Its room must have been made."""
        assert tier not in node.pages, "a node has one copy per tier"
        node.pages[tier] = pages
        self.floors[tier].used_bytes += pages.size_bytes
        self.floors[tier].rerank(node, self._usage(node))
        if tier is DEVICE and node.parent is not None:
            node.parent.device_children += 1
            self.floors[DEVICE].place(node.parent)

    def rerank(self, node: Node) -> None:
        """The node was accessed: each tier ranks it anew with its own clock."""
        for tier in node.pages:
            self.floors[tier].rerank(node, self._usage(node))

    def add(self, node: Node) -> None:
        """Hang a new node below its parent; give it pages next."""
        assert node.parent is not None, "the preamble is there from the start"
        node.parent.children[node.chunk_id] = node
        self.floors[HOST].place(node.parent)
        self.num_nodes += 1

    def make_device_room(self, size_bytes: int) -> bool:
        """Free so many bytes on the device, or change nothing and say False."""
        floor = self.floors[DEVICE]
        victims = floor.victims(size_bytes - floor.free_bytes, _unpinned)
        if victims is None:
            return False
        floor.evicted(victims)
        for node in victims:
            if HOST in node.pages or self.swap_out(node):
                self._leave_device(node)
            else:
                self.drop(node)
        return True

    def swap_out(self, node: Node) -> bool:
        """Copy a device node to host, pushing out what host ranks lowest. False: no room."""
        floor = self.floors[HOST]
        pages = node.pages[DEVICE]
        victims = floor.victims(pages.size_bytes - floor.free_bytes, _on_host_alone)
        if victims is None:
            return False
        copy = self._owner.copy_out(pages)
        if copy is None:  # nobody makes room for what does not come
            return False
        floor.evicted(victims)
        for victim in victims:
            self.drop(victim)
        self.give(node, HOST, copy)
        return True

    def lose_host(self, node: Node) -> None:
        """A host copy is no good. Without another one the node goes, with everything below it."""
        pages = node.pages.pop(HOST)
        self.floors[HOST].used_bytes -= pages.size_bytes
        self.floors[HOST].discard(node)
        self._owner.free(HOST, pages)
        if node.pages or self.is_doomed(node):
            return
        for top in [node] if node.depth else list(node.children.values()):
            self.drop(top)

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
        """Out of the tree with a node and everything below it; leased pages go with the lease."""
        parent = top.parent
        assert parent is not None, "the preamble never leaves"
        del parent.children[top.chunk_id]
        top.parent = None
        if DEVICE in top.pages:
            parent.device_children -= 1
        for floor in self.floors.values():
            floor.place(parent)
        pinned = False
        for node in subtree(top):
            self.num_nodes -= 1
            self.memory.keep(node.key, node.usage)
            pinned = pinned or node.pins > 0
            for floor in self.floors.values():
                floor.discard(node)
        if pinned:
            self._doomed.append(top)
        else:
            self._free_below(top)

    def unpin(self, nodes: list[Node]) -> None:
        """A lease gives nodes back."""
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

    def doomed(self) -> Iterator[Node]:
        for top in self._doomed:
            yield from subtree(top)

    def forget_device(self, nodes: list[Node]) -> None:
        """The device's bytes are gone already: strike them off the books, free nothing."""
        for node in nodes:
            node.pages.pop(DEVICE, None)
            node.device_children = 0
            self.floors[DEVICE].discard(node)
        self.floors[DEVICE].used_bytes = 0

    def check_integrity(self, root: Node) -> None:
        """Raise AssertionError if the books do not balance."""
        live = subtree(root)
        assert len(live) - 1 == self.num_nodes, f"{len(live) - 1} nodes, books say {self.num_nodes}"
        for tier, floor in self.floors.items():
            held = [node for node in (*live, *self.doomed()) if tier in node.pages]
            used = sum(node.pages[tier].size_bytes for node in held)
            assert used == floor.used_bytes, f"{tier}: {used} bytes, books say {floor.used_bytes}"
            assert used <= floor.capacity_bytes, f"{tier}: {used} of {floor.capacity_bytes} bytes"
            below = {id(child.parent) for child in live if tier is HOST or DEVICE in child.pages}
            leaves = {n for n in live if n.depth and tier in n.pages and id(n) not in below}
            assert floor.leaves() == leaves, f"{tier}: ranked leaves differ from the tree's"
        for node in live:
            on_device = sum(1 for child in node.children.values() if DEVICE in child.pages)
            assert node.device_children == on_device, f"{node}: {on_device} children on device"
            parent = node.parent
            assert node.pins <= (parent.pins if parent else node.pins), f"{node}: pins rise"
            if parent is None:
                continue
            assert node.pages, f"{node} is in no tier"
            if parent.num_tokens == 0:  # no preamble: nothing to stand behind
                continue
            assert parent.pages, f"{node} hangs below nothing"
            assert DEVICE not in node.pages or DEVICE in parent.pages, f"{node} above its parent"

    def _leave_device(self, node: Node) -> None:
        pages = node.pages.pop(DEVICE)
        self.floors[DEVICE].used_bytes -= pages.size_bytes
        self.floors[DEVICE].discard(node)
        self._owner.free(DEVICE, pages)
        assert node.parent is not None, "the preamble never leaves"
        node.parent.device_children -= 1
        self.floors[DEVICE].place(node.parent)

    def _free_below(self, top: Node) -> None:
        for node in subtree(top):
            for tier, pages in node.pages.items():
                self.floors[tier].used_bytes -= pages.size_bytes
                self._owner.free(tier, pages)
            node.pages = {}


def subtree(top: Node) -> list[Node]:
    """A node and everything below it, parents first."""
    found = [top]
    for node in found:
        found.extend(node.children.values())
    return found


def _unpinned(node: Node) -> bool:
    return node.pins == 0 and node.depth > 0


def _on_host_alone(node: Node) -> bool:
    return node.pins == 0 and node.depth > 0 and DEVICE not in node.pages
