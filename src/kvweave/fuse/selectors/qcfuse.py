"""QCFuse: the question over anchors, scored at the layers a profile found critical.

Anchors stand in for the context, so the probe needs a tenth of the bytes; the profile says which
layers show best what a question looks for, so the keys of a few layers suffice.
"""

from collections.abc import Sequence

from kvweave.fuse.selectors.query_attention import QueryAttention

NUM_LAYERS = 3  # critical layers taken, unless the profile says otherwise


def qcfuse(critical_layers: Sequence[int], anchors: str = "kvzip") -> QueryAttention:
    """`critical_layers` best first; anchors by KVzip."""
    layers = tuple(critical_layers[:NUM_LAYERS])
    return QueryAttention(
        view="anchors", layers=layers, normaliser="full", rows="mean", heads="mean", anchors=anchors
    )
