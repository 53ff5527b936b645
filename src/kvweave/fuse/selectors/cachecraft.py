"""Like Cache-Craft: rows that looked outside their chunk when it was encoded.

Query-agnostic and free online: the score was measured at the last layer while the chunk was
encoded, and lies beside its KV. The original keeps copies of a chunk from several past prompts and
chooses one by scores of overlap and order, whose formulas are not in our sources; here a chunk has
one copy, behind its encoding context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvweave.fuse.encode.extras import INTER
from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import Scene, ranked_positions
from kvweave.fuse.sources import ChunkLost


@dataclass(frozen=True, slots=True)
class CacheCraftLike:
    """Highest inter-chunk attention first."""

    in_flight: ClassVar[Literal[False]] = False

    def needs(self, num_layers: int) -> Needs:
        return Needs(extras=(INTER,))

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        stored = scene.stitched.layers.extras(INTER)
        # of another size it would shift the scores of all chunks behind it
        sizes = {key: len(blob) for key, blob in stored.items()}
        if unfit := [s.key for s in scene.fused if sizes.get(s.key) != 2 * s.num_tokens]:
            raise ChunkLost(unfit)
        parts = [stored[span.key].view(torch.float16) for span in scene.fused]
        scores = torch.cat(parts).float()
        scene.note(scores)
        return ranked_positions(scores, scene.hits, counts)
