"""How far stored KV is from full prefill's, token by token (FusionRAG, figures 3a and 3b).

The deviation of a token is the norm of the difference of its keys and values, over the mean norm of
full prefill's keys and values at that layer. Tokens are the hits: the first chunk is exact.

Shapes: L layers, H hits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from figures.lab import Lab, Question
from figures.places import PLACES, place_in_chunk
from kvweave.fuse.stitched import Stitched

RATIO = 0.15
SECOND = 1  # the layer that the paper shows, counted from 0: the first one never deviates


@torch.inference_mode()
def deviations(question: Question, stitched: Stitched) -> Tensor:
    """[L, H] in float32."""
    hits, full = torch.tensor(stitched.request.hits), question.full.kv
    found = []
    for layer in range(question.lab.num_layers):
        exact = torch.cat([full.keys(layer)[hits], full.values(layer)[hits]], dim=1).flatten(1)
        stored = torch.cat([stitched.keys(layer)[hits], stitched.values(layer)[hits]], dim=1)
        off = (exact - stored.flatten(1)).float().norm(dim=1)
        found.append(off / exact.float().norm(dim=1).mean())
    return torch.stack(found)


def left_by_oracle(deviation: Tensor, ratio: float) -> float:
    """The share of all deviation [H] that is left when the `ratio` of most deviation is exact."""
    best = deviation.sort(descending=True).values
    count = round(ratio * len(best))
    return float(best[count:].sum() / best.sum())


def measure_deviation(lab: Lab, question: Question) -> dict[str, Any]:
    """Deviation of one question's isolated chunk KV: what an oracle leaves, and where it lies."""
    stitched = question.stitch("isolated")
    off = deviations(question, stitched)
    second = off[SECOND]
    mean, found = float(second.mean()), {}
    places = place_in_chunk(stitched.request.hits, question.case)
    for name, (low, high) in PLACES.items():
        at = torch.tensor([low <= place.token < high for place in places])
        if at.any():
            found[name] = float(second[at].mean()) / mean
    by_chunk = {}
    for chunk in sorted({place.chunk for place in places}):
        at = torch.tensor([place.chunk == chunk for place in places])
        by_chunk[str(chunk + 1)] = float(second[at].mean()) / mean
    return {
        "left_all_layers": left_by_oracle(off.mean(0), RATIO),
        "left_second_layer": left_by_oracle(second, RATIO),
        # not of the first layer: what it stores depends on a token alone
        "left_each_layer": [left_by_oracle(each, RATIO) for each in off[1:]],
        "second_layer": mean,
        "all_layers": float(off.mean()),
        "by_place": found,
        "by_chunk": by_chunk,
    }


def sum_up_deviation(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over questions, and the layers where an oracle leaves least and most."""
    layers = np.array([value["left_each_layer"] for value in values]).mean(0)
    return {
        "n": len(values),
        "ratio": RATIO,
        **{name: _mean(values, name) for name in ("left_all_layers", "left_second_layer")},
        "left_least_of_layers": round(float(layers.min()), 4),
        "left_most_of_layers": round(float(layers.max()), 4),
        "second_layer": _mean(values, "second_layer"),
        "all_layers": _mean(values, "all_layers"),
        "by_place": mean_by_name([value["by_place"] for value in values]),
        "by_chunk": mean_by_name([value["by_chunk"] for value in values]),
    }


def mean_by_name(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the questions that have it."""
    names = sorted({name for value in values for name in value})
    return {n: round(float(np.mean([v[n] for v in values if n in v])), 4) for n in names}


def _mean(values: Sequence[Mapping[str, Any]], name: str) -> float:
    return round(float(np.mean([value[name] for value in values])), 4)
