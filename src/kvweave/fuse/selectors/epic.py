"""EPIC (LegoLink): the first tokens of every chunk.

A chunk that was computed by itself makes sinks of its first tokens; in the middle of a prompt they
are none. Recomputing them repairs the seams, whatever the question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import Scene
from kvweave.fuse.stitched import positions_of


@dataclass(frozen=True, slots=True)
class Epic:
    """Chooses an equal share of every chunk's head, so that ratios compare."""

    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        return Needs()

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
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
