"""Where else is this chunk's KV? Lookup by shorter and shorter paths (after FusionRAG).

The knowledge tree finds a chunk behind its whole path and nowhere else. A request whose first chunk
is new would therefore find nothing. Here each chunk is looked for behind what stands in front of
it, then with the earliest of that dropped, and so on down to the chunk alone:

    request S A B C      C:  S A B C → S B C → S C → the copy kept by content

Only the first of these is exact. The others are chunk KV in another encoding context. The tree is
read and never changed; what is kept by content is one copy per unique chunk, of whichever
request computed it first: the chunk store keeps account of it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import Node
from kvweave.plan.plan import ReadableTree
from kvweave.types import ChunkId


class FoundCopy(NamedTuple):
    """A copy of one chunk's KV."""

    context: tuple[ChunkId, ...]  # chunks between the preamble and it when it was computed
    node: Node | None  # in the tree, or None: by content, in the chunk store
    exact: bool  # its context is what stands in front of it in this request


class AlternativePaths:
    """Content lookup over an exact tree. Changes nothing."""

    def __init__(self, tree: ReadableTree, has_copy: Callable[[ChunkId], bool]) -> None:
        """`has_copy` says whether a chunk's KV is kept by content."""
        self._tree = tree
        self._has_copy = has_copy

    def find(self, chunk_ids: Sequence[ChunkId]) -> list[FoundCopy | None]:
        """One answer per chunk, in order. At most m²/2 walks, most of which end at their start."""
        return [self._find_one(chunk_ids, place) for place in range(len(chunk_ids))]

    def only_elsewhere(self, chunk_ids: Sequence[ChunkId]) -> set[ChunkId]:
        """Chunks that the tree has behind other paths alone, and no store by content: computed once
        already, and to be computed again in every other context."""
        found = zip(chunk_ids, self.find(chunk_ids), strict=True)
        return {
            chunk_id
            for chunk_id, copy in found
            if copy is not None
            and copy.node is not None
            and not copy.exact
            and not self._has_copy(chunk_id)
        }

    def _find_one(self, chunk_ids: Sequence[ChunkId], place: int) -> FoundCopy | None:
        at_root = self._tree.root.children
        for start in range(place + 1):
            if chunk_ids[start] not in at_root:
                continue
            path = chunk_ids[start : place + 1]
            node = self._node_at(path)
            if node is not None:
                return FoundCopy(tuple(path[:-1]), node, start == 0)
        return FoundCopy((), None, False) if self._has_copy(chunk_ids[place]) else None

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
