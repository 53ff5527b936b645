"""Controls: what any selector must beat, at no cost at all."""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import Scene


@dataclass(frozen=True, slots=True)
class Random:
    """Uniform rows, the same for the same prompt."""

    seed: int = 0
    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        return Needs()

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        ids = scene.request.prompt_ids
        digest = hashlib.blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) ^ self.seed)
        drawn = torch.randperm(len(scene.hits), generator=generator)
        return [scene.hits[drawn[:count]].sort().values for count in counts]


@dataclass(frozen=True, slots=True)
class Stride:
    """Every n-th row."""

    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        return Needs()

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        steps = [len(scene.hits) / count for count in counts]
        return [
            scene.hits[[math.floor(i * step) for i in range(count)]]
            for count, step in zip(counts, steps, strict=True)
        ]
