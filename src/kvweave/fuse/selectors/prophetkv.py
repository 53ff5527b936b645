"""ProphetKV as QCFuse describes it: the question over the full stitched context, all layers.

The best informed probe and the most expensive one: every byte must be there before it can score.
"""

from kvweave.fuse.selectors.query_attention import QueryAttention


def prophetkv(num_layers: int) -> QueryAttention:
    """Attention summed over rows, heads and every layer."""
    return QueryAttention(view="full", layers=tuple(range(num_layers)), normaliser="full")
