"""The query-aware family: FusionRAG, ProphetKV and QCFuse are points of one space.

A probe pushes the question through the model over some view of the context; the attention that each
stored key then gets from the question, at some layers, is its score. The points differ in the view,
the layers, the keys that share a softmax, and how rows, heads and layers are put together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvweave.fuse.encode.extras import SHARE, extra_name
from kvweave.fuse.needs import Needs
from kvweave.fuse.probe import (
    ContextView,
    FrontView,
    ProbedLayer,
    probe,
)
from kvweave.fuse.request import State, bounds_of
from kvweave.fuse.selector import Scene, ranked_positions, scores_of_hits
from kvweave.fuse.selectors.views import AnchorView, FullView
from kvweave.fuse.stitched import positions_of
from kvweave.kernels.column_scores import Normaliser, Reduce, layer_column_scores
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import rotate

View = Literal["question", "preamble", "anchors", "full"]
# Scored together, fewer for long questions: where a chunk is missing the keys of all are copied,
# and what the question sees of itself is held for all.
LAYERS_AT_ONCE, FEW_ROWS = 12, 128


@dataclass(frozen=True, slots=True)
class QueryAttention:
    """One point of the space."""

    view: View
    layers: tuple[int, ...]  # scored; negative ones count from the end
    normaliser: Normaliser = "full"
    rows: Reduce = "sum"
    heads: Reduce = "sum"
    # "encoding" scores keys where they were computed and the question from position 0 on, without
    # chat template: unphysical distances, but what FusionRAG's code does
    keys_at: Literal["request", "encoding"] = "request"
    asks: Literal["user", "all"] = (
        "user"  # whose rows count: the user's words or the whole question
    )
    anchors: str = "anchors:kvzip"  # the extra that the "anchors" view takes
    # a row at the end of the prompt counts for 1 / (1 + late) of one at its front: it costs more
    late: float = 0.0
    # a row also counts for half of the best row within `smooth` around it (odd; 1: itself alone):
    # what is asked about is a run of words, and some models look at one of them only
    smooth: int = 1
    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        layers = resolve_layers(self.layers, num_layers)
        return Needs(
            probe=self.view,
            probe_depth=max(layers),
            key_layers=layers,
            extras=(self.anchors,) if self.view == "anchors" else (),
            probes_ahead=self.view in ("question", "preamble") and self.keys_at == "request",
        )

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        scores = self.scores(scene)
        scene.note(scores)
        scene.stitched.layers.begin()  # copies are many orders: given while the device scores
        scene.stitched.layers.lay_front()
        scene.stitched.make_tables()
        return ranked_positions(scores, scene.hits, counts, scene.scoring)

    def scores(self, scene: Scene) -> Tensor:
        """Score of every hit, [H] float32."""
        scores = self.layer_scores(scene).sum(dim=0)
        if self.smooth > 1 and len(scores):
            scores = (scores + _best_around(scores, self.smooth)) / 2
        return scores / _cost(scene, self.late, scores.device) if self.late else scores

    def layer_scores(self, scene: Scene) -> Tensor:
        """Score of every hit at each of `layers`, ascending: [layers, H] float32. One probe."""
        layers = resolve_layers(self.layers, scene.decoder.spec.num_layers)
        request, at_zero = scene.request, self.keys_at == "encoding"
        probed = probe(
            scene.decoder,
            request,
            self._view(scene),
            layers,
            rows=request.asked if at_zero else None,
            first_position=0 if at_zero else None,
        )
        rows = len(request.prompt_ids) - request.question_start
        some = max(1, LAYERS_AT_ONCE * FEW_ROWS // max(FEW_ROWS, rows))
        parts = [
            self._columns(scene, layers[i : i + some], probed) for i in range(0, len(layers), some)
        ]
        return scene.decoder.sum_over_ranks(scores_of_hits(scene, torch.cat(parts)))

    def _view(self, scene: Scene) -> ContextView:
        if self.view == "question":
            return FrontView()
        if self.view == "preamble":
            return FrontView(scene.stitched.front)
        if self.view == "full":
            return FullView(scene)
        deepest = max(resolve_layers(self.layers, scene.decoder.spec.num_layers))
        return AnchorView(scene, self.anchors, deepest)

    def _columns(
        self, scene: Scene, layers: Sequence[int], probed: Mapping[int, ProbedLayer]
    ) -> Tensor:
        """Scores of all placed tokens at some layers, [layers, N]."""
        request, at_zero = scene.request, self.keys_at == "encoding"
        first = request.asked.start if at_zero else request.question_start
        words = request.asked if self.asks == "user" else range(first, len(request.prompt_ids))
        asked = slice(words.start - first, words.stop - first)
        keys = encoded_keys if at_zero else placed_keys
        return layer_column_scores(
            [probed[layer].q[asked] for layer in layers],
            [keys(scene, layer) for layer in layers],
            others=self._others(scene, layers, probed, asked),
            chunks=bounds_of(span.num_tokens for span in request.placed),
            normaliser=self.normaliser,
            rows=self.rows,
            heads=self.heads,
        )

    def _others(
        self, scene: Scene, layers: Sequence[int], probed: Mapping[int, ProbedLayer], asked: slice
    ) -> list[tuple[list[Tensor], Tensor | None]]:
        """Keys besides the chunks' that a full softmax runs over: preamble and question."""
        if self.normaliser != "full":
            return []
        own = [probed[layer].k for layer in layers]
        num_rows, device = len(own[0]), own[0].device
        seen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()[asked]
        before = [scene.stitched.preamble(layer) for layer in layers]
        front = [kv.k for kv in before if kv is not None]
        return [(own, seen), (front, None)] if front else [(own, seen)]


def _best_around(scores: Tensor, width: int) -> Tensor:
    """The highest of the `width` scores around each one, [H]."""
    return max_pool1d(scores[None, None], width, stride=1, padding=width // 2)[0, 0]


def _cost(scene: Scene, late: float, device: torch.device) -> Tensor:
    """[H]: what each hit costs to recompute, one at position 0 being 1. Made where it is needed: a
    table of all hits is longer than the few numbers it is made from."""
    runs = scene.request.runs(State.REUSED)
    where = [torch.arange(run.start, run.stop, device=device) for run in runs]
    return 1 + late / len(scene.request.prompt_ids) * torch.cat(where)


def placed_keys(scene: Scene, layer: int) -> Tensor:
    """Stitched keys of all placed tokens, [N, Hk, D], turned to their places in this prompt."""
    keys, placed = scene.stitched.keys(layer), scene.stitched.placed
    first, last = int(placed[0]), int(placed[-1])
    if last - first + 1 == len(placed):
        return keys[first : last + 1]
    return keys[on_device(placed, keys.device)]


def encoded_keys(scene: Scene, layer: int) -> Tensor:
    """Keys of all placed tokens as if each chunk stood right behind the preamble, [N, Hk, D]."""
    start = scene.request.preamble_len
    at = positions_of([range(start, start + span.num_tokens) for span in scene.request.placed])
    angles = scene.decoder.angles(on_device(at, scene.decoder.device))
    return rotate(scene.stitched.layers.unturned_kv(layer).k, angles)


def resolve_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layer numbers from 0, ascending; -1 is the last layer."""
    resolved = sorted({layer % num_layers for layer in layers})
    assert all(-num_layers <= layer < num_layers for layer in layers), "a layer of this model"
    return tuple(resolved)


QCFUSE_LAYERS = 3  # critical layers taken, unless the profile says otherwise
QCFUSE_DEPTH = 0.6  # where they lie in a model without a profile, as a share of its layers


def prophetkv(num_layers: int) -> QueryAttention:
    """ProphetKV as QCFuse describes it: the question over the full stitched context, attention
    summed over rows, heads and every layer.

    The best informed probe and the most expensive one: every byte must be there before it can
    score.
    """
    return QueryAttention(view="full", layers=tuple(range(num_layers)), normaliser="full")


def qcfuse(
    critical_layers: Sequence[int], rule: str = "kvzip", share: float = SHARE
) -> QueryAttention:
    """QCFuse: the question over anchors, scored at the layers that a profile found critical, best
    first.

    Anchors stand in for the context, so the probe needs a tenth of the bytes; the keys of a few
    layers suffice.
    """
    layers = tuple(critical_layers[:QCFUSE_LAYERS])
    anchors = extra_name(rule, share)
    return QueryAttention(
        view="anchors", layers=layers, normaliser="full", rows="mean", heads="mean", anchors=anchors
    )


def usual_critical_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that qcfuse scores at in a model whose critical layers nobody looked for: a little
    behind the middle, where the profiles of other models have theirs."""
    best = round(QCFUSE_DEPTH * num_layers)
    near = (best, best - 1, best + 1)
    return tuple(layer for layer in near if 0 < layer < num_layers) or (num_layers - 1,)


# FusionRAG: the question alone, attention at the last layer; every chunk has its own softmax, so
# that the budget spreads over all of them. Keys and question at their places in the request, as the
# paper describes it
FUSIONRAG_PAPER = QueryAttention(view="question", layers=(-1,), normaliser="chunk")
# as the authors' code does it: keys where they were encoded, question from position 0
FUSIONRAG_CODE = replace(FUSIONRAG_PAPER, keys_at="encoding")
