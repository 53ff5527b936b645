"""Critical layers: where the question's attention shows best what it asks for.

For questions whose answers are marked in the passages: probe the question over the anchors of the
chunks, rank all context tokens by the attention they get at one layer, and count how much of the
marked answer lies in the best 10 %. Layers in the order of that recall are the profile; a curve
over the best k together says how many are worth their bytes.

The anchor view is fixed (KVzip, a tenth), so only the layer varies, and one probe per sample serves
all layers. Contexts should have 2,000 tokens: of a short one 10 % is a dozen, and recall noise.

Shapes: L layers, N context tokens, S samples.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvweave.calibrate.bootstrap import Bootstrap, Values
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import KVZIP, ContextPrefixes, FixedContext
from kvweave.calibrate.profiles import LayerProfile
from kvweave.calibrate.trials import Trials
from kvweave.errors import RequestError
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.selector import Scene
from kvweave.fuse.selectors.query_attention import QueryAttention, View
from kvweave.fuse.stitched import stitch

BUDGET = 0.10  # of the context's tokens; a constant of profiling, unrelated to serving ratios
MAX_LAYERS = 8  # length of the curve
WORTH = 0.005  # recall that one more layer must add


def profile_layers(
    decoder: FusionDecoder,
    cases: Iterable[Case],
    repeat_ids: tuple[int, ...],
    *,
    on_sample: Callable[[int], None] | None = None,
) -> LayerProfile:
    """Rank the layers of a model. Cases without marked answers are an error of the caller's.

    `repeat_ids` asks for the repetition that KVzip anchors come from. `on_sample` hears how many
    samples are done.
    """
    num_layers = decoder.spec.num_layers
    prefixes = ContextPrefixes(decoder)
    encoding = FixedContext(decoder, prefixes, "isolated", (), repeat_ids)
    kept: list[tuple[Tensor, Tensor]] = []  # scores [L, N] and gold [N] of every sample
    reference: list[float] = []
    for case in cases:
        scene = _scene(decoder, prefixes, encoding, case)
        gold = torch.isin(scene.hits, torch.tensor(case.gold))
        assert bool(gold.any()), "a sample without a marked answer"
        kept.append((_attention("anchors", num_layers).layer_scores(scene).cpu(), gold))
        reference.append(recall_at(_attention("full", num_layers).scores(scene), gold))
        if on_sample is not None:
            on_sample(len(kept))
    if not kept:
        raise RequestError("no sample has marked answers; critical layers cannot be found")
    return _summarise(kept, reference, num_layers)


def recall_at(scores: Tensor, gold: Tensor, budget: float = BUDGET) -> float:
    """Share of `gold` [N] (bool) among the best `budget` of `scores` [N]; ties go to the first."""
    count = max(1, int(budget * len(scores) + 1e-9))
    best = torch.sort(scores.float().cpu(), descending=True, stable=True).indices[:count]
    return float(gold[best].sum() / gold.sum())


def worth_taking(curve: tuple[float, ...]) -> int:
    """Return how many layers to take: one more must add at least WORTH."""
    for k, (now, more) in enumerate(pairwise(curve), start=1):
        if more - now < WORTH:
            return k
    return len(curve)


def _attention(view: View, num_layers: int) -> QueryAttention:
    """Return the selector that qcfuse scores with, at all layers."""
    return QueryAttention(
        view=view,
        layers=tuple(range(num_layers)),
        normaliser="full",
        rows="mean",
        heads="mean",
    )


def _scene(
    decoder: FusionDecoder, prefixes: ContextPrefixes, encoding: FixedContext, case: Case
) -> Scene:
    """Return a scene with all chunks as hits, the first one too: the answer may stand in it."""
    request = case.request(case.keys, first_is_exact=False)
    source = encoding.prepare(case, [KVZIP])
    kv = Trials(decoder, 1, case.num_tokens, 0).kv(0)
    stitched = stitch(decoder, request, prefixes.prefix_for(case.preamble), source, kv)
    return Scene(stitched, torch.tensor(request.hits, dtype=torch.int64))


def _summarise(
    kept: list[tuple[Tensor, Tensor]], reference: list[float], num_layers: int
) -> LayerProfile:
    alone = np.array([[recall_at(row, gold) for row in scores] for scores, gold in kept])  # [S, L]
    boot = Bootstrap(len(kept))
    intervals = [boot.mean(alone[:, layer]) for layer in range(num_layers)]
    order = sorted(range(num_layers), key=lambda layer: (-intervals[layer].mean, layer))

    def together(layers: list[int]) -> float:
        found: Values = np.array([recall_at(scores[layers].sum(0), gold) for scores, gold in kept])
        return float(found.mean())

    curve = tuple(together(order[:k]) for k in range(1, min(MAX_LAYERS, num_layers) + 1))
    return LayerProfile(
        num_samples=len(kept),
        mean_context_tokens=float(np.mean([len(gold) for _, gold in kept])),
        recall=tuple(interval.mean for interval in intervals),
        recall_low=tuple(interval.low for interval in intervals),
        recall_high=tuple(interval.high for interval in intervals),
        order=tuple(order),
        curve=curve,
        all_layers=together(list(range(num_layers))),
        full_context=float(np.mean(reference)),
        critical=tuple(order[: worth_taking(curve)]),
    )
