"""The knowledge tree itself: lease, load, extend, forget.

    preamble ── D1 ── D3        a node is a chunk *behind its path*: D3 behind D1 and D3 behind D2
            └── D2 ── D3        are two nodes with different KV

The engine thread makes every change. `root`, `match` and `match_tokens` may be read from any thread
meanwhile: they follow dictionaries only, and what they say may be stale by the time the engine
acts, which then finds fewer nodes and computes the rest. A failed copy is a shorter match, never an
error.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from kvweave.errors import ConfigError
from kvweave.kv.policies import UsageRecord, open_policy
from kvweave.kv.tree.node import (
    DEVICE,
    HOST,
    ChunkRef,
    Match,
    Node,
    NodePricing,
    PageOwner,
    Pages,
    PathMemory,
    TreeTier,
    path_key,
)
from kvweave.kv.tree.pages import NodePages, TreeBudget, TreeEviction, subtree
from kvweave.kv.tree.policy_trial import AUTO, Access, PolicyTrial, first_policy
from kvweave.types import ChunkId

TYPICAL_PARTS = 32  # that were taken in before it is known how many tokens fit
NO_PREAMBLE = ChunkRef(ChunkId(""), 0)


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Budgets and rules of one tree."""

    device_bytes: int
    host_bytes: int  # one to two orders of magnitude more than on the device pays best; 0: none
    # lru, lfu, gdsf or pgdsf, or auto: that of the last two that would keep more of late
    policy: str = AUTO
    max_depth: int | None = None  # keep only the first so many chunks of a path; None: all
    remembered_paths: int = 1 << 16  # absent paths whose usage is remembered; 0: none

    def __post_init__(self) -> None:
        if self.device_bytes <= 0 or self.host_bytes < 0:
            raise ConfigError(
                f"a tree needs device_bytes > 0 and host_bytes >= 0, "
                f"got {self.device_bytes} and {self.host_bytes}"
            )
        if self.max_depth is not None and self.max_depth < 0:
            raise ConfigError(f"TreeConfig.max_depth must be None or >= 0, got {self.max_depth}")
        if self.remembered_paths < 0:
            raise ConfigError(
                f"TreeConfig.remembered_paths must be >= 0, got {self.remembered_paths}"
            )


class Extended(Enum):
    """What became of pages offered to the tree."""

    ADOPTED = "adopted"  # the tree owns them now
    PRESENT = "present"  # the path is there already; the caller keeps its pages
    TOO_DEEP = "too deep"  # behind max_depth, or behind a part that the tree does not hold
    NO_ROOM = "no room"  # leased nodes are in the way; the caller keeps its pages


class TreeLease:
    """A pin on a path, preamble included. Belongs to one request; releases itself once."""

    def __init__(self, nodes: list[Node], unpin: Callable[[list[Node]], None]) -> None:
        self.nodes = nodes  # pinned, from the preamble on
        self._unpin = unpin
        for node in nodes:
            node.pins += 1

    @property
    def num_tokens(self) -> int:
        """Exact tokens it holds, preamble included."""
        return self.nodes[-1].end if self.nodes else 0

    def join(self, node: Node) -> None:
        """Hold one node more, the next on the path."""
        node.pins += 1
        self.nodes.append(node)

    def cut(self, num_nodes: int) -> None:
        """Hold only the first so many nodes."""
        rest = self.nodes[num_nodes:]
        del self.nodes[num_nodes:]
        self._unpin(rest)

    def release(self) -> None:
        self.cut(0)

    def __enter__(self) -> "TreeLease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class KnowledgeTree:
    """Exact KV of ordered chunk paths behind one preamble, in device and host memory.

    For several preambles or tenants under one budget, leave the preamble empty here and make each
    real preamble the first chunk of its paths. One that is given here comes with its device pages,
    which never leave.

    `cost_s(cached, new)` is the measured time of a prefill; it prices what eviction would lose.
    """

    def __init__(
        self,
        config: TreeConfig,
        owner: PageOwner,
        cost_s: Callable[[int, int], float],
        preamble: ChunkRef = NO_PREAMBLE,
        preamble_pages: Pages | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        assert (preamble_pages is not None) == (preamble.num_tokens > 0), "a preamble has pages"
        self.config = config
        self._now_s = now_s
        memory = PathMemory(config.remembered_paths)
        self._pricing = NodePricing(cost_s, memory, config.max_depth)
        budgets = {
            tier: TreeBudget(tier, capacity_bytes, open_policy(first_policy(config.policy)))
            for tier, capacity_bytes in ((DEVICE, config.device_bytes), (HOST, config.host_bytes))
        }
        self._pages = NodePages(budgets, owner, self._pricing.usage, memory)
        self._trial: PolicyTrial | None = None  # once it is known how many tokens fit
        self._taken_in: list[tuple[int, int]] = []  # tokens and bytes of parts, until then
        key = path_key(b"", preamble.id)
        usage = memory.take(key, preamble.num_tokens)
        length = preamble.num_tokens
        self.root = Node(preamble.id, length, length, 0, key, None, usage)  # the preamble
        if preamble_pages is not None:
            if preamble_pages.size_bytes > config.device_bytes:
                raise ConfigError(
                    f"a preamble of {preamble_pages.size_bytes} bytes does not fit into "
                    f"TreeConfig.device_bytes = {config.device_bytes}"
                )
            self._pages.give(self.root, DEVICE, preamble_pages)

    # ---- any thread

    def match(self, chunk_ids: Sequence[ChunkId]) -> Match:
        """The longest stored prefix. O(depth); changes nothing, counts nothing."""
        node = self.root
        nodes: list[Node] = []
        for chunk_id in chunk_ids:
            child = node.children.get(chunk_id)
            if child is None:
                break
            nodes.append(child)
            node = child
        host_bytes, host_tokens = 0, 0
        for each in reversed(nodes):  # the device part lies above the host part
            if DEVICE in each.pages:
                break
            if (pages := each.pages.get(HOST)) is not None:
                host_bytes += pages.size_bytes
                host_tokens += each.num_tokens
        return Match(tuple(nodes), node.end, host_bytes, host_tokens)

    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int:
        """Exact tokens `match` would find, preamble included; the same walk and nothing else."""
        node = self.root
        for chunk in chunks:
            child = node.children.get(chunk.id)
            if child is None:
                break
            node = child
        return node.end

    # ---- the engine thread

    def price(self, cost_s: Callable[[int, int], float]) -> None:
        """Price by another `cost_s` from now on, what is there at its next access."""
        self._pricing.change(cost_s)
        for node in (self.root, *self, *self.doomed_nodes()):
            node.alone_s = 0.0

    def acquire(
        self, chunks: Sequence[ChunkRef], num_question_tokens: int, *, count: bool = True
    ) -> TreeLease:
        """Pin the longest stored prefix and count one access of every chunk on the path.

        `count=False` for a second look on behalf of the same request, as speculation takes.
        """
        match = self.match([chunk.id for chunk in chunks])
        lease = TreeLease([self.root, *match.nodes], self._pages.unpin)
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
            copied = self._pages.copy_in(node)
            if copied is None:
                lease.cut(place)
                break
            brought += copied
        return brought

    def extend(self, lease: TreeLease, chunk: ChunkRef, pages: Pages) -> Extended:
        """Offer the pages of the next chunk behind a leased path. Exact KV only, never fused.

        The node is then pinned by the same lease, so that the next chunk can follow. Call `load`
        first: the path must be on the device. A path that nobody counted has been used once now.
        """
        parent = lease.nodes[-1] if lease.nodes else None
        if parent is None or self._pages.is_doomed(parent):
            return Extended.TOO_DEEP
        if self.config.max_depth is not None and parent.depth >= self.config.max_depth:
            return Extended.TOO_DEEP
        if parent.num_tokens and DEVICE not in parent.pages:
            return Extended.TOO_DEEP
        node = parent.children.get(chunk.id)
        if node is not None and DEVICE in node.pages:
            lease.join(node)
            return Extended.PRESENT
        if not self._pages.make_device_room(pages.size_bytes):
            return Extended.NO_ROOM
        node = parent.children.get(chunk.id)  # making room may have dropped its host copy
        if node is None:
            key = path_key(parent.key, chunk.id)
            usage = self._pages.memory.take(key, chunk.num_tokens)
            if not usage.uses:
                usage.touch(self._now_s())
            end = parent.end + chunk.num_tokens
            node = Node(chunk.id, chunk.num_tokens, end, parent.depth + 1, key, parent, usage)
            self._pages.add(node)
        self._pages.give(node, DEVICE, pages)
        if self._trial is None and self.config.policy == AUTO:
            self._open_trial(chunk.num_tokens, pages.size_bytes)
        lease.join(node)
        return Extended.ADOPTED

    def shrink(self) -> bool:
        """Let the least valuable leaf leave the device: others need the memory. Its host copy, if
        there is room for one, stays. False: leases are in the way, or there is nothing."""
        return self._pages.make_device_room(self._pages.budgets[DEVICE].free_bytes + 1)

    def lowest_rank(self) -> float | None:
        """What the leaf that would leave the device next is worth, by the policy that the tree was
        told or began with: others rank by that, too. None: none may leave."""
        leaf = self._pages.lowest_device_leaf()
        if leaf is None or self.config.policy != AUTO:
            return None if leaf is None else leaf.ranks[DEVICE]
        return open_policy(first_policy(AUTO)).rank(self._pricing.usage(leaf))

    def holders(self) -> Iterator[Node]:
        """Every node that has device pages, those that only a lease still holds included."""
        nodes = (self.root, *self, *self.doomed_nodes())
        return (node for node in nodes if DEVICE in node.pages)

    def doomed_nodes(self) -> Iterator[Node]:
        """Nodes that are out of the tree and that a lease still holds."""
        return self._pages.doomed_nodes()

    def replicate(self, enough_bytes: int) -> int:
        """Copy upper nodes to host ahead of time, the worthiest of each level first; returns bytes.

        For idle moments: evicting a node that has its copy copies nothing. Nothing leaves host for
        it. Ends when so many bytes were copied, or at the first node that cannot be.
        """
        copied = 0
        level = [self.root]
        while level:
            below = [n for node in level for n in node.children.values() if DEVICE in n.pages]
            below.sort(key=lambda node: (-node.ranks[DEVICE], node.key))
            for node in below:
                if HOST not in node.pages:
                    if copied >= enough_bytes or not self._pages.copy_ahead(node):
                        return copied
                    copied += node.pages[DEVICE].size_bytes
            level = below
        return copied

    def lose_copy(self, handle: object) -> None:
        """A host copy that its owner gave did not arrive: the tree does without it. O(nodes)."""
        for node in (*self, *self.doomed_nodes()):
            pages = node.pages.get(HOST)
            if pages is not None and pages.handle is handle:
                self._pages.lose_host(node)
                return

    def discard(self, node: Node) -> int:
        """Take a node of bad KV, and all behind it, out of the tree; returns how many nodes.

        Pages that a running request reads stay until its lease goes.
        """
        before = self._pages.num_nodes
        if node.parent is not None and not self._pages.is_doomed(node):
            self._pages.drop(node)
        return before - self._pages.num_nodes

    def forget(self, chunk_id: ChunkId, under: Collection[ChunkId] | None = None) -> int:
        """A chunk was deleted: it and everything behind it can no longer be found, on paths that
        begin with one of `under`, or on any. Returns nodes.

        Pages that a running request reads stay until its lease goes.
        """
        before = self._pages.num_nodes
        roots = self.root.children
        within = [roots[top] for top in (roots if under is None else under) if top in roots]
        nodes = (node for root in within for node in subtree(root))
        tops = [node for node in nodes if node.chunk_id == chunk_id]
        for node in tops:  # parents first: one below another is gone by then
            if node.parent is not None and not self._pages.is_doomed(node):
                self._pages.drop(node)
        return before - self._pages.num_nodes

    def __iter__(self) -> Iterator[Node]:
        """Every node but the preamble, parents before children."""
        return iter(subtree(self.root)[1:])

    def __len__(self) -> int:
        return self._pages.num_nodes

    def used_bytes(self, tier: TreeTier) -> int:
        return self._pages.budgets[tier].used_bytes

    def evictions(self) -> list[TreeEviction]:
        """The last ones of each tier, oldest first. Any thread."""
        found = [gone for budget in self._pages.budgets.values() for gone in list(budget.evictions)]
        return sorted(found, key=lambda gone: gone.at_s)

    @property
    def policy(self) -> str:
        """The name of the policy that it goes by now."""
        return first_policy(self.config.policy) if self._trial is None else self._trial.best

    def clock(self, tier: TreeTier) -> float:
        """The logical clock of a tier's policy; 0 for policies that have none."""
        return self._pages.budgets[tier].policy.clock

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not balance. O(nodes): for idle moments."""
        self._pages.check_integrity(self.root)

    def _count(self, chunks: Sequence[ChunkRef], lease: TreeLease, question: int) -> None:
        now_s = self._now_s()
        accessed = []
        for node in lease.nodes:
            node.usage.touch(now_s)
            accessed.append(Access(node.key, self._pages.rerank(node)))
        found = len(lease.nodes) - 1
        rest = chunks[found:]
        top, cached = lease.nodes[-1], lease.num_tokens
        accessed += self._pricing.count(top, cached, rest, found, question, now_s)
        self._try_policies(accessed[1:])

    def _open_trial(self, num_tokens: int, num_bytes: int) -> None:
        """Count a part that was taken in; open the trial when enough were to say what fits: parts
        of a few tokens take whole pages as well."""
        self._taken_in.append((num_tokens, num_bytes))
        if len(self._taken_in) == TYPICAL_PARTS:
            tokens, size_bytes = map(sum, zip(*self._taken_in, strict=True))
            capacity_bytes = max(self.config.device_bytes, self.config.host_bytes)
            self._trial = PolicyTrial(capacity_bytes * tokens / size_bytes)

    def _try_policies(self, accessed: Sequence[Access]) -> None:
        """Go by the policy that would keep more, all nodes ranked anew when it is another one."""
        if self._trial is None or not self._trial.record(accessed):
            return
        for budget in self._pages.budgets.values():
            budget.policy = open_policy(self._trial.best)
        for node in (self.root, *self):
            self._pages.rerank(node)


class TreeBehind:
    """A tree of many preambles, as a planner of one of them reads it: from behind that preamble.
    Changes nothing. Any thread."""

    def __init__(self, tree: KnowledgeTree, preamble: ChunkRef) -> None:
        self._tree = tree
        self._preamble = preamble
        length = preamble.num_tokens
        usage = UsageRecord(size=length)
        self._absent = Node(preamble.id, length, length, 1, b"", None, usage)  # without pages

    @property
    def root(self) -> Node:
        """The preamble; one without pages and children while the tree does not hold it."""
        return self._tree.root.children.get(self._preamble.id, self._absent)

    def match(self, chunk_ids: Sequence[ChunkId]) -> Match:
        match = self._tree.match([self._preamble.id, *chunk_ids])
        return match._replace(nodes=match.nodes[1:])

    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int:
        return self._tree.match_tokens([self._preamble, *chunks])
