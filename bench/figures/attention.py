"""How is the question's attention spread over tokens and layers (QCFuse, figure 5)?

The question is pushed over all stitched chunk KV. `covered` is the share of the attention on chunk
tokens, summed over heads, rows and layers, that the tokens with most of it get. `agrees` is the
share of the 10 % of tokens that one layer ranks highest which all layers together rank so, too.

Shapes: L layers, H hits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from figures.lab import Lab, Question
from kvweave.fuse.selectors.query_attention import QueryAttention

SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)
TOP = 0.1


def full_view(num_layers: int) -> QueryAttention:
    """What ProphetKV scores by, layer by layer."""
    return QueryAttention(view="full", layers=tuple(range(num_layers)))


def covered(scores: Tensor, share: float) -> float:
    """The part of all scores [H] that the best `share` of them hold."""
    best = scores.sort(descending=True).values
    return float(best[: max(1, round(share * len(best)))].sum() / best.sum())


def overlap(one: Tensor, other: Tensor, share: float) -> float:
    """The part of the best `share` by one score [H] that is among the best by another."""
    count = max(1, round(share * len(one)))
    first, second = (set(x.topk(count).indices.tolist()) for x in (one, other))
    return len(first & second) / count


def measure_attention(lab: Lab, question: Question) -> dict[str, Any]:
    """Attention of one question over its chunks."""
    scores = full_view(lab.num_layers).layer_scores(question.scene("isolated")).float()
    together = scores.sum(0)
    return {
        "covered": {f"{share:g}": covered(together, share) for share in SHARES},
        "agrees": [overlap(layer, together, TOP) for layer in scores],
    }


def sum_up_attention(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over questions; layers in thirds, and those that agree most, best first."""
    agrees = np.array([value["agrees"] for value in values]).mean(0)
    thirds = [round(float(part.mean()), 4) for part in np.array_split(agrees, 3)]
    return {
        "n": len(values),
        "covered": {
            name: round(float(np.mean([value["covered"][name] for value in values])), 4)
            for name in values[0]["covered"]
        },
        "agrees": [round(each, 4) for each in agrees.tolist()],
        "agrees_by_third": thirds,
        "agree_most": np.argsort(-agrees)[:5].tolist(),
    }
