"""CacheBlend and KVShare-like: the rows that changed most against what is stored.

In flight: every row runs layer 0, and at the check layer the fresh values are compared with the
stored ones. Layer 0 depends on the tokens alone, so layer 1 is the first that can differ. With
several check layers the candidates shrink step by step (gradual filtering).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvweave.fuse.fused_pass import LayerLook
from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import InFlightChoice, Scene, top_positions
from kvweave.kernels.column_scores import causal_column_mass
from kvweave.kernels.rope import rotate

Signal = Literal["v", "k", "kv"]


@dataclass(frozen=True, slots=True)
class CacheBlend:
    """`checks` are (layer, multiple of the budget) with falling multiples; the last one is 1.

    A model too shallow for all of them takes its budget at the last check below its last layer.
    """

    signal: Signal = "v"
    checks: tuple[tuple[int, float], ...] = ((1, 1.0),)
    in_flight: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        layers = [layer for layer, _ in self.checks]
        assert layers == sorted(set(layers)), "check layers ascend"
        assert layers[0] >= 1, "nothing deviates at layer 0"
        assert self.checks[-1][1] == 1.0, "the last check leaves the budget"

    def needs(self, num_layers: int) -> Needs:
        layers = tuple(layer for layer, _ in self.checks)
        return Needs(
            key_layers=layers if "k" in self.signal else (),
            value_layers=layers if "v" in self.signal else (),
            full_width_layers=layers[0],
        )

    def begin(self, scene: Scene, count: int) -> InFlightChoice:
        last_layer = scene.decoder.spec.num_layers - 1  # nothing runs on behind it
        checks = {layer: times for layer, times in self.checks if layer < last_layer}
        if checks:
            checks[max(checks)] = 1.0
        return _DeviationChoice(scene, count, self.signal, checks)


class _DeviationChoice:
    def __init__(self, scene: Scene, count: int, signal: Signal, checks: dict[int, float]) -> None:
        self._scene = scene
        self._hits = scene.hits
        self._count = count
        self._signal = signal
        self._checks = checks

    def choose(self, look: LayerLook) -> Tensor | None:
        if look.layer not in self._checks:
            return None
        wanted = min(len(self._hits), max(1, int(self._count * self._checks[look.layer])))
        rows = rows_of(look.positions, self._hits)
        scores = self._scene.decoder.sum_over_ranks(deviation(look, rows, self._signal))
        self._scene.note(scores, self._hits)
        self._hits = top_positions(scores, self._hits, wanted)
        return self._hits


def deviation(look: LayerLook, rows: Tensor, signal: Signal) -> Tensor:
    """Squared distance of fresh from stored keys, values or both, for some running rows: [n]."""
    at = rows.to(look.stored_v.device)
    total = torch.zeros(len(rows), dtype=torch.float32, device=at.device)
    if "v" in signal:
        total += (look.fresh.v[at].float() - look.stored_v[at].float()).square().sum((1, 2))
    if "k" in signal:
        total += (look.turned_k[at].float() - look.stored_k[at].float()).square().sum((1, 2))
    return total


def rows_of(running: Tensor, positions: Sequence[int] | Tensor) -> Tensor:
    """Indices of `positions` among the running rows, both ascending."""
    return torch.searchsorted(running, torch.as_tensor(positions))


CHECK_LAYER = 1


@dataclass(frozen=True, slots=True)
class KVShareLike:
    """score = squared value deviation at layer 1 × attention received at layer 0.

    Our reading of one sentence about it, so its results are labelled "like": rows that changed much
    and that the prompt looks at. The attention is that of all rows at layer 0, which all run
    anyway.
    """

    in_flight: ClassVar[Literal[True]] = True

    def needs(self, num_layers: int) -> Needs:
        return Needs(value_layers=(CHECK_LAYER,), full_width_layers=CHECK_LAYER)

    def begin(self, scene: Scene, count: int) -> InFlightChoice:
        return _WeightedChoice(scene, count)


class _WeightedChoice:
    def __init__(self, scene: Scene, count: int) -> None:
        self._scene = scene
        self._count = count
        self._mass: Tensor | None = None  # [T] attention that each position gets

    def choose(self, look: LayerLook) -> Tensor | None:
        hits = self._scene.hits
        if look.layer == 0:
            # layer 0 is the same stitched or fresh, and misses stand in the fresh rows
            keys = self._scene.stitched.keys(0).clone()
            keys[look.positions.to(keys.device)] = look.turned_k
            angles = self._scene.decoder.angles(look.positions.to(keys.device))
            q = rotate(look.fresh.q, angles)
            self._mass = causal_column_mass(q, look.positions, keys)
        if look.layer != CHECK_LAYER:
            return None
        assert self._mass is not None, "layer 0 comes first"
        moved = deviation(look, rows_of(look.positions, hits), "v")
        mass = self._mass[hits.to(moved.device)]
        moved, mass = self._scene.decoder.sum_over_ranks(torch.stack([moved, mass]))
        scores = moved * mass
        self._scene.note(scores)
        return top_positions(scores, hits, self._count)
