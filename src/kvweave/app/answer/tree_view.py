"""The knowledge tree as a tenant may see it: its own paths, a level at a time.

Read on any thread while the engine changes it: what is shown was so a moment ago.
"""

import math
from typing import NamedTuple

from kvweave.errors import RequestError
from kvweave.kv.tree import KnowledgeTree
from kvweave.kv.tree.node import DEVICE, HOST, Node
from kvweave.types import ChunkId

PREAMBLE = "preamble-"  # begins the name of a preamble, behind its tenant


class NoSuchNode(RequestError):
    """The tree has no such path, or no longer."""


class TreeLine(NamedTuple):
    """A chunk behind its path."""

    id: str  # names the path
    parent: str | None  # None: it begins a path
    chunk: ChunkId | None  # None: a preamble
    num_tokens: int
    end: int  # tokens of the prompt up to and with it
    tier: str  # the fastest that holds it
    num_bytes: int  # there
    priority: float | None  # what it is worth there: the lowest leaves first; None: it stays
    hits: float  # requests that came this way, less with time
    num_children: int


def tree_lines(tree: KnowledgeTree, tenant: str, node: str | None, limit: int) -> list[TreeLine]:
    """What hangs below a node (None: what begins the tenant's paths), used most first. Raises
    NoSuchNode."""
    parent = None if node is None else _find(tree, tenant, node)
    found = _firsts(tree, tenant) if parent is None else list(parent.children.values())
    lines = [_line(each, None if parent is None else parent.key.hex()) for each in found]
    return sorted(lines, key=lambda line: (-line.hits, -line.num_tokens, line.id))[:limit]


def _firsts(tree: KnowledgeTree, tenant: str) -> list[Node]:
    children = list(tree.root.children.values())  # in one go: the engine thread changes it
    return [node for node in children if node.chunk_id.startswith(f"{tenant}|")]


def _find(tree: KnowledgeTree, tenant: str, name: str) -> Node:
    level = _firsts(tree, tenant)
    while level:
        for node in level:
            if node.key.hex() == name:
                return node
        level = [child for node in level for child in list(node.children.values())]
    raise NoSuchNode(f"the knowledge tree has no node {name[:40]!r}; it may just have left")


def _line(node: Node, parent: str | None) -> TreeLine:
    tier = DEVICE if DEVICE in node.pages else HOST
    pages, rank = node.pages.get(tier), node.ranks.get(tier, math.inf)
    name = node.chunk_id.partition("|")[2] or node.chunk_id
    return TreeLine(
        id=node.key.hex(),
        parent=parent,
        chunk=None if name.startswith(PREAMBLE) else ChunkId(name),
        num_tokens=node.num_tokens,
        end=node.end,
        tier=str(tier),
        num_bytes=0 if pages is None else pages.size_bytes,
        priority=rank if math.isfinite(rank) else None,
        hits=round(node.usage.uses, 3),
        num_children=len(node.children),
    )
