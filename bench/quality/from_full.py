"""Rows of the quality bench that are chosen by what full prefill left behind.

Selectors in flight let every row run to layer 1 and compare: that is the same in full prefill, and
is read off there (`changed`).

The oracle is for the bench alone. Which rows are worth recomputing? Those that the question looks
at and whose stored KV is wrong. It knows both: for every layer the attention that the question of
full prefill pays to a row, times how far the row's stored value is from full prefill's, summed.
No strategy can choose so without computing everything first. It is no bound, as it judges every
row by itself, but a sign of how much a better choice of as many rows could bring.

Shapes: H hits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvweave.calibrate.trials import Trials
from kvweave.fuse.drift import STRENGTH
from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import Scene, ranked_positions
from kvweave.fuse.strategy import Strategy
from kvweave.kernels.attention import attend
from kvweave.kernels.column_scores import causal_column_mass, column_scores
from kvweave.kernels.rope import rotate
from kvweave.kernels.types import Segment

ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Oracle:
    """Chooses by what full prefill left behind as trial number 0."""

    trials: Trials | None = None  # None: not asked yet
    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        return Needs()  # nothing that could be priced

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        return ranked_positions(self.scores(scene), scene.hits, counts)

    @torch.inference_mode()
    def scores(self, scene: Scene) -> Tensor:
        """[H] float32."""
        assert self.trials is not None, "full prefill has been computed"
        decoder, request = scene.decoder, scene.request
        num_tokens, start = len(request.prompt_ids), request.question_start
        hits = scene.hits.to(decoder.device)
        rows = torch.arange(start, num_tokens)  # on the host
        angles = decoder.angles(rows.to(decoder.device))
        seen = torch.ones(len(rows), len(rows), dtype=torch.bool, device=decoder.device).tril()
        h = decoder.embed(torch.tensor(request.prompt_ids[start:], device=decoder.device))
        total = torch.zeros(len(hits), device=decoder.device)
        for layer in range(decoder.spec.num_layers):
            keys = self.trials.keys[layer, 0, :num_tokens]
            values = self.trials.values[layer, 0, :num_tokens]
            q = rotate(decoder.qkv(layer, h)[0], angles)
            looked_at = column_scores(q, keys[:start], others=[(keys[start:], seen)])  # [start]
            off = (values[hits] - scene.stitched.values(layer)[hits]).flatten(1).norm(dim=1)
            total += looked_at[hits] * off
            h = decoder.finish(layer, h, attend(q, rows, [Segment(0, len(rows), keys, values)]))
        return total


def oracle() -> Strategy:
    """By name only: the bench gives it the trials of each question."""
    return Strategy(ORACLE, Oracle(), 0.15, STRENGTH)


def changed(name: str, scene: Scene, trials: Trials) -> Tensor:
    """[H] what an in-flight selector measures at layer 1."""
    decoder, count = scene.decoder, len(scene.request.prompt_ids)
    fresh_k, fresh_v = trials.keys[1, 0, :count], trials.values[1, 0, :count]
    at = scene.hits.to(fresh_k.device)
    fresh, stored = (
        (fresh_k, scene.stitched.keys(1))
        if name == "cacheblend-k"
        else (fresh_v, scene.stitched.values(1))
    )
    moved = (fresh[at] - stored[at]).square().sum((1, 2))
    if name != "kvshare-like":
        return moved
    ids = torch.tensor(scene.request.prompt_ids, device=at.device)
    positions = torch.arange(scene.request.preamble_len, count)
    angles = decoder.angles(positions.to(at.device))
    q = rotate(decoder.qkv(0, decoder.embed(ids))[0][positions.to(at.device)], angles)
    return moved * causal_column_mass(q, positions, trials.keys[0, 0, :count])[at]
