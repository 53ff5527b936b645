"""What planning reads of a knowledge tree."""

from collections.abc import Sequence
from typing import Protocol

from kvweave.kv.tree.node import ChunkRef, Match, Node
from kvweave.types import ChunkId


class ReadableTree(Protocol):
    """Exact KV behind one preamble, its root. Reading changes nothing and may be stale at once."""

    @property
    def root(self) -> Node: ...
    def match(self, chunk_ids: Sequence[ChunkId]) -> Match: ...
    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int: ...
