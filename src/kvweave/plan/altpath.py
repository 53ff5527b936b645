"""Where else is this chunk's KV? Lookup by shorter and shorter paths (after FusionRAG).

The knowledge tree finds a chunk behind its whole path and nowhere else. A request whose first chunk
is new would therefore find nothing. Here each chunk is looked for behind what stands in front of
it, then with the earliest of that dropped, and so on down to the chunk alone:

    request S A B C      C:  S A B C → S B C → S C → the copy kept by content

Only the first of these is exact. The others are chunk KV in another encoding context: material for
fusion. The tree is read and never changed; what is kept by content is one copy per unique chunk,
whoever computed it first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import Node
from kvweave.kv.tree.tree import KnowledgeTree
from kvweave.types import ChunkId


class Found(NamedTuple):
    """A copy of one chunk's KV."""

    context: tuple[ChunkId, ...]  # chunks between the preamble and it when it was computed
    node: Node | None  # in the tree, or None: by content, in the chunk store
    exact: bool  # its context is what stands in front of it in this request


class AlternativePaths:
    """Content lookup over an exact tree. Read by the planner, changed by the engine thread."""

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._copies: dict[ChunkId, tuple[ChunkId, ...]] = {}  # chunk → context of its one copy

    def find(self, chunk_ids: Sequence[ChunkId]) -> list[Found | None]:
        """One answer per chunk, in order. At most m²/2 walks, most of which end at their start."""
        return [self._find_one(chunk_ids, place) for place in range(len(chunk_ids))]

    def stored(self, chunk_id: ChunkId, context: Sequence[ChunkId] = ()) -> bool:
        """A copy of a chunk was offered to be kept by content. False: there is one already."""
        if chunk_id in self._copies:
            return False
        self._copies[chunk_id] = tuple(context)
        return True

    def forget(self, chunk_id: ChunkId) -> None:
        """Its copy left the store."""
        self._copies.pop(chunk_id, None)

    def __len__(self) -> int:
        """Copies kept by content: as many as unique chunks."""
        return len(self._copies)

    def _find_one(self, chunk_ids: Sequence[ChunkId], place: int) -> Found | None:
        for start in range(place + 1):
            path = chunk_ids[start : place + 1]
            node = self._node_at(path)
            if node is not None:
                return Found(tuple(path[:-1]), node, start == 0)
        context = self._copies.get(chunk_ids[place])
        if context is None:
            return None
        return Found(context, None, context == tuple(chunk_ids[:place]))

    def _node_at(self, path: Sequence[ChunkId]) -> Node | None:
        """The node at the end of exactly this path."""
        node = self._tree.root
        if node.num_tokens and not node.pages:
            return None
        for chunk_id in path:
            child = node.children.get(chunk_id)
            if child is None:
                return None
            node = child
        return node
