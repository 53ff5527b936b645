"""What the caches of a tenant hold: tiers of its open knowledge bases, its part of the knowledge
tree, and what left them last.

The tree is read while the engine changes it: what is shown was so a moment ago.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvweave.app.hosts import LibraryHost, LocalModel
from kvweave.app.libraries.libraries import Libraries
from kvweave.errors import RequestError
from kvweave.kv.format.keys import tag_of
from kvweave.kv.tree import KnowledgeTree
from kvweave.kv.tree.node import DEVICE, HOST, Node
from kvweave.types import ChunkId

TREE = "tree"  # the tier of what the knowledge tree held on the device


class TierLine(NamedTuple):
    """One tier of one knowledge base."""

    kb: str
    tier: str
    num_bytes: int | None  # None: it keeps its own books
    capacity_bytes: int | None  # None: no bound of ours
    loads: int  # of chunk KV from there, since the knowledge base was opened


class EvictionLine(NamedTuple):
    """Something that left a tier for something worth more."""

    at_s: float  # seconds since 1970
    kb: str | None  # None: exact KV of the knowledge tree
    chunk: str  # id of the chunk, or its beginning
    title: str  # "": not known
    tier: str
    num_bytes: int
    priority: float | None  # what it was worth; None: not noted


def tier_lines(libraries: Libraries, model: str, tenant: str) -> list[TierLine]:
    """List the tiers with the chunk KV of one model."""
    lines = []
    with libraries.open_of(tenant) as hosts:
        for name, weave in _over(hosts, model):
            store = weave.library.store
            used = store.used_bytes()
            for tier, capacity_bytes in store.capacity_bytes().items():
                loads = int(store.metrics.value("kv_loads_total", tier=tier))
                lines.append(TierLine(name, tier, used.get(tier), capacity_bytes, loads))
    return lines


def misses(libraries: Libraries, tenant: str) -> dict[str, int]:
    """Chunk KV that was wanted and not there, by reason, of what is open now."""
    found: dict[str, int] = {}
    with libraries.open_of(tenant) as hosts:
        for weave in (each for _, host in hosts for each in host.engines):
            for sample in weave.library.store.metrics.snapshot():
                if sample.name == "kv_misses_total":
                    reason = dict(sample.labels)["reason"]
                    found[reason] = found.get(reason, 0) + int(sample.value)
    return found


def evictions(
    libraries: Libraries, model: LocalModel, tenant: str, most: int
) -> list[EvictionLine]:
    """The last ones of one model, newest first. `model` may be over any knowledge base."""
    lines = [
        EvictionLine(gone.at_s, None, name, "", TREE, gone.size_bytes, gone.rank)
        for gone in model.engine.tree.evictions()
        if gone.path.startswith(f"{tenant}|")
        and not (name := gone.chunk_id.rpartition("|")[2]).startswith(PREAMBLE)
    ]
    with libraries.open_of(tenant) as hosts:
        for kb, each in _over(hosts, model.model_name):
            for gone in each.library.store.evictions():
                chunk = tag_of(gone.key).hex()
                lines.append(
                    EvictionLine(gone.at_s, kb, chunk, "", gone.tier, gone.size_bytes, None)
                )
        newest = sorted(lines, key=lambda line: line.at_s, reverse=True)[:most]
        names = titles([host for _, host in hosts], [line.chunk for line in newest])
    return [
        line._replace(chunk=names[line.chunk][0], title=names[line.chunk][1])
        if line.chunk in names
        else line
        for line in newest
    ]


def _over(hosts: Sequence[tuple[str, LibraryHost]], model: str) -> list[tuple[str, LocalModel]]:
    """Find the knowledge bases that a model of this process has open."""
    found = [(name, each) for name, host in hosts for each in host.engines]
    return [(name, each) for name, each in found if each.model_name == model]


def titles(hosts: Sequence[LibraryHost], chunks: Sequence[str]) -> dict[str, tuple[ChunkId, str]]:
    """Id and title of chunks by the beginning of their ids, as far as these knowledge bases know
    them."""
    found: dict[str, tuple[ChunkId, str]] = {}
    for host in hosts:
        wanted = [chunk for chunk in chunks if chunk not in found]
        found |= host.kb.catalogue.chunks_by_beginning(wanted)
    return found


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
