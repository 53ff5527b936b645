"""What the tree is made of: nodes, handles of pages, the owner of their bytes. And what is
known of paths that are not in it now.

Eviction judges by the latter what would be lost. A request computes what stands behind its match in
one go. The time that takes is shared by its tokens, and each path on the way that is not in the
tree remembers its part. A path that nobody asked for before it was offered has no part; it has a
price all the same, see `NodePricing.usage`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from kvweave.kv.policies import ItemUsage, UsageRecord
from kvweave.kv.tree.policy_trial import Access
from kvweave.types import ChunkId


class TreeTier(StrEnum):  # a str hashes in C: it is a key on the planning path
    """Where pages of the tree lie. A node may have a copy in both."""

    DEVICE = "device"
    HOST = "host"


DEVICE, HOST = TreeTier.DEVICE, TreeTier.HOST


class ChunkRef(NamedTuple):
    """A chunk as the planner and the tree see it: a name and a length."""

    id: ChunkId
    num_tokens: int


class Pages(NamedTuple):
    """KV of one chunk at one place. The tree counts the bytes and never looks at the handle."""

    size_bytes: int
    handle: Any


class PageOwner(Protocol):
    """Moves and frees the bytes. Called by the tree on the thread that changes the tree.

    A copy may still be under way when the call returns; the owner orders it before any later use,
    and if it fails after all says so by `KnowledgeTree.lose_copy`.
    None says that the copy could not be made: the tree then does without it.
    """

    def copy_out(self, pages: Pages) -> Pages | None:
        """Device to host. The device pages stay; the tree frees them when it wants to."""
        ...

    def copy_in(self, pages: Pages) -> Pages | None:
        """Host to device. The host pages stay."""
        ...

    def free(self, tier: TreeTier, pages: Pages) -> None: ...


@dataclass(slots=True, eq=False)
class Node:
    """One chunk behind one path. Changed by the tree alone; the planner reads it.

    Invariants: on device ⇒ its parent is on device; on host ⇒ its parent is on host or device;
    in no tier ⇒ not in the tree. A lease pins whole paths, so a pinned node has pinned ancestors.
    """

    chunk_id: ChunkId
    num_tokens: int
    end: int  # tokens of the prompt up to and with this chunk, preamble included
    depth: int  # 0 is the preamble
    key: bytes  # names the path, see path_key
    parent: "Node | None" = field(repr=False)
    usage: UsageRecord = field(repr=False)
    children: "dict[ChunkId, Node]" = field(default_factory=dict, repr=False)
    pages: dict[TreeTier, Pages] = field(default_factory=dict)
    ranks: dict[TreeTier, float] = field(default_factory=dict)  # set on access, by tier
    device_children: int = 0  # children that have device pages
    pins: int = 0  # leases that hold it
    alone_s: float = 0.0  # per token, computed alone behind its path; 0: to be priced


class Match(NamedTuple):
    """The longest stored prefix of an ordered list of chunks, as it was a moment ago."""

    nodes: tuple[Node, ...]  # without the preamble
    num_tokens: int  # exact tokens, preamble included; 0 when even the preamble is gone
    host_bytes: int  # of it, what must be brought to the device first
    host_tokens: int


def path_key(parent: bytes, chunk_id: ChunkId) -> bytes:
    """A name for a path that is the same in every process: usage is remembered under it."""
    return hashlib.blake2b(parent + chunk_id.encode(), digest_size=16).digest()


_TOKENS = 1024  # of a prefill that prices are measured against


class PathMemory:
    """Usage of absent paths, bounded: the one not asked for for longest is forgotten first.

    How often a path is asked for counts over a window of time, whether or not its KV was kept; a
    popular path that was pushed out once does not start from nothing. With room for none, every
    path does. Not thread-safe.
    """

    def __init__(self, max_paths: int) -> None:
        self._max_paths = max_paths
        self._records: OrderedDict[bytes, UsageRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def record(self, key: bytes, num_tokens: int) -> UsageRecord:
        """The running numbers of an absent path, made at its first access."""
        record = self._records.get(key)
        if record is None:
            record = UsageRecord(size=num_tokens)
            self.keep(key, record)
        else:
            self._records.move_to_end(key)
        return record

    def take(self, key: bytes, num_tokens: int) -> UsageRecord:
        """Hand over the numbers of a path that enters the tree and carries them from now on."""
        return self._records.pop(key, None) or UsageRecord(size=num_tokens)

    def keep(self, key: bytes, record: UsageRecord) -> None:
        """Keep the numbers of a path that left the tree."""
        self._records[key] = record
        if len(self._records) > self._max_paths:
            self._records.popitem(last=False)


class NodePricing:
    """On the engine thread. `cost_s(cached, new)` is the measured time of a prefill."""

    def __init__(
        self,
        cost_s: Callable[[int, int], float],
        memory: PathMemory,
        max_depth: int | None,
    ) -> None:
        self._cost_s = cost_s
        self._memory = memory
        self._max_depth = max_depth
        self._token_s = cost_s(0, _TOKENS) / _TOKENS  # plain GDSF prices by size alone: this each

    def change(self, cost_s: Callable[[int, int], float]) -> None:
        """Price by another `cost_s` from now on. Its 1,024 tokens from nothing count as those did
        before: what matters is what a prefill costs beside others, and old ranks stay comparable.
        """
        measured_s = cost_s(0, _TOKENS)
        if measured_s <= 0:
            return
        scale = self._token_s * _TOKENS / measured_s
        self._cost_s = lambda cached, new: scale * cost_s(cached, new)

    def count(
        self,
        match: Node,
        num_cached: int,
        rest: Sequence[ChunkRef],
        depth: int,
        num_question_tokens: int,
        now_s: float,
    ) -> list[Access]:
        """Count one access of `rest`, chunks that are not in the tree: `depth` others stand before
        them, up to `match`, `num_cached` tokens in all. Returns those accesses."""
        num_new = sum(chunk.num_tokens for chunk in rest) + num_question_tokens
        if not rest or not num_new:
            return []
        cost_s = self._cost_s(num_cached, num_new)
        if self._max_depth is not None:
            rest = rest[: max(0, self._max_depth - depth)]
        key = match.key
        counted = []
        for chunk in rest:
            key = path_key(key, chunk.id)
            record = self._memory.record(key, chunk.num_tokens)
            record.touch(now_s)
            record.record_computation(cost_s, num_new)
            alone_s = chunk.num_tokens * self._token_s
            counted.append(Access(key, record.snapshot()._replace(cost_s=alone_s)))
        return counted

    def usage(self, node: Node) -> ItemUsage:
        """What the policy is told of a node, whoever brought it.

        Its cost is the mean over the requests that missed it, and over one more: a request that
        finds all that stands before it and computes it alone, which is the miss that comes next if
        it leaves now.
        """
        usage, misses = node.usage.snapshot(), node.usage.misses
        cost_s = node.num_tokens * self._token_s
        if not node.alone_s and node.num_tokens:
            before = node.end - node.num_tokens
            node.alone_s = self._cost_s(before, node.num_tokens) / node.num_tokens
        cost_per_unit_s = (usage.cost_per_unit_s * misses + node.alone_s) / (misses + 1)
        return usage._replace(cost_s=cost_s, cost_per_unit_s=cost_per_unit_s)
