"""kvweave's own: what the whole question looks at, high up, among the chunks alone.

The probe sees the full stitched context; attention of every question row counts, the chat header
before the answer included, because that is where the answer starts from; the upper third of the
layers, where a question has become a search; softmax over the chunks only, so that what the
preamble soaks up does not matter. The rest of each chunk is then moved along with the rows that
were recomputed (see drift.py). docs/fusion.md tells how this was found and what was tried.
"""

from kvweave.fuse.selectors.query_attention import QueryAttention


def weave(num_layers: int) -> QueryAttention:
    """Attention in the upper third of the layers."""
    layers = tuple(range(num_layers - max(1, num_layers // 3), num_layers))
    return QueryAttention(view="full", layers=layers, normaliser="context", asks="all")
