"""The knowledge tree: exact KV by ordered path of chunks from the preamble (after RAGCache, 2024).

Bookkeeping only. No torch here: pages are handles, and a `PageOwner` moves the bytes behind them.
"""

from kvweave.kv.tree.node import ChunkRef, Match, Node, PageOwner, Pages, TreeTier
from kvweave.kv.tree.tree import Extended, KnowledgeTree, TreeConfig, TreeLease

__all__ = [
    "ChunkRef",
    "Extended",
    "KnowledgeTree",
    "Match",
    "Node",
    "PageOwner",
    "Pages",
    "TreeConfig",
    "TreeLease",
    "TreeTier",
]
