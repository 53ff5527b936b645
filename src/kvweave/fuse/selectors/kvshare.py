"""KVShare-like: deviation scaled by attention at layer 0.

Our reading of one sentence about it, so its results are labelled "like": rows that changed much and
that the prompt looks at. The attention is that of all rows at layer 0, which all run anyway.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvweave.fuse.fused_pass import LayerLook
from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import InFlightChoice, Scene, top_positions
from kvweave.fuse.selectors.cacheblend import deviation, rows_of
from kvweave.kernels.column_scores import causal_column_mass
from kvweave.kernels.rope import rotate

CHECK_LAYER = 1


@dataclass(frozen=True, slots=True)
class KVShareLike:
    """score = squared value deviation at layer 1 × attention received at layer 0."""

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
        scores = moved * self._mass[hits.to(moved.device)]
        self._scene.note(scores)
        return top_positions(scores, hits, self._count)
