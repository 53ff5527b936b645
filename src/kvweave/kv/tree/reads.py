"""What may be read of the tree from any thread, while the engine thread changes it.

Only dictionaries are followed: what this says may be stale by the time the engine acts, which then
finds fewer nodes and computes the rest.
"""

from collections.abc import Sequence

from kvweave.kv.tree.node import DEVICE, HOST, ChunkRef, Match, Node
from kvweave.types import ChunkId


class TreeReads:
    """Changes nothing, counts nothing. `KnowledgeTree` adds the changes."""

    def __init__(self, root: Node) -> None:
        self.root = root  # the preamble

    def match(self, chunk_ids: Sequence[ChunkId]) -> Match:
        """The longest stored prefix. O(depth); changes nothing, counts nothing."""
        node = self.root
        if node.num_tokens and not node.pages:
            return Match((), 0, 0, 0)
        nodes: list[Node] = []
        for chunk_id in chunk_ids:
            child = node.children.get(chunk_id)
            if child is None:
                break
            nodes.append(child)
            node = child
        host_bytes, host_tokens = 0, 0
        for each in (*reversed(nodes), self.root):  # the device part lies above the host part
            if DEVICE in each.pages:
                break
            if (pages := each.pages.get(HOST)) is not None:
                host_bytes += pages.size_bytes
                host_tokens += each.num_tokens
        return Match(tuple(nodes), node.end, host_bytes, host_tokens)

    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int:
        """Exact tokens `match` would find, preamble included; the same walk and nothing else."""
        node = self.root
        if node.num_tokens and not node.pages:
            return 0
        for chunk in chunks:
            child = node.children.get(chunk.id)
            if child is None:
                break
            node = child
        return node.end
