"""Rows chosen by their places alone: EPIC, and the controls that any selector must beat."""

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
from kvweave.fuse.stitched import positions_of


@dataclass(frozen=True, slots=True)
class Epic:
    """EPIC (LegoLink): the first tokens of every chunk. As published a fixed number of each
    (`Strategy.per_chunk`), or an equal share of each so that ratios compare.

    A chunk that was computed by itself makes sinks of its first tokens; in the middle of a prompt
    they are none. Recomputing them repairs the seams, whatever the question.
    """

    per_chunk: int = 0  # tokens of each chunk; 0: its share of the count
    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        return Needs()

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        if self.per_chunk:
            runs = [range(s.start, min(s.end, s.start + self.per_chunk)) for s in scene.fused]
            return [positions_of(runs) for _ in counts]
        return [heads(scene, count) for count in counts]


def heads(scene: Scene, count: int) -> Tensor:
    """Chunk heads, `count` tokens in all, each chunk its share (largest remainders first)."""
    spans, total = scene.fused, len(scene.hits)
    exact = [count * span.num_tokens / total for span in spans]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(spans)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_rest[: count - sum(shares)]:
        shares[i] += 1
    pairs = zip(spans, shares, strict=True)
    return positions_of([range(span.start, span.start + share) for span, share in pairs])


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
