"""A tree of many preambles, seen from behind one of them: what a planner of one preamble reads."""

from collections.abc import Sequence
from typing import Protocol

from kvweave.kv.policies import UsageRecord
from kvweave.kv.tree.node import ChunkRef, Match, Node
from kvweave.types import ChunkId


class TreePaths(Protocol):
    """What may be read of a tree from any thread. `KnowledgeTree` offers it."""

    @property
    def root(self) -> Node: ...

    def match(self, chunk_ids: Sequence[ChunkId]) -> Match: ...

    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int: ...


class TreeBehind:
    """Changes nothing. Any thread."""

    def __init__(self, tree: TreePaths, preamble: ChunkRef) -> None:
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
