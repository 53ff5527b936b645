"""What the tree is made of: nodes, page handles, and the owner of the bytes behind them."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from kvweave.kv.policies import UsageRecord
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
