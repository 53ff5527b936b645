"""The probe: push the question through the model over some view of its context.

What a query-aware selector wants to know is which context tokens the question looks at. The views
differ in how much of the context the question's own hidden states have seen on their way up:

    "question"   nothing: the question alone
    "anchors"    a few stored tokens of every chunk, and the preamble
    "full"       everything that is stitched

Queries at layer l need context KV of the layers below l only.

Shapes: U question rows, N context keys, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.fuse.protocol import Decoder
from kvweave.fuse.request import FuseRequest
from kvweave.kernels.attention import Segment, attend
from kvweave.kernels.rope import rotate


class ContextView(Protocol):
    """The context as a probe sees it."""

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys (turned) [N, Hk, D], values [N, Hk, D], positions [N] on the host; None: nothing."""
        ...


class Probed(NamedTuple):
    """What the question looks like at one layer."""

    q: Tensor  # [U, Hq, D] turned to the probe's positions
    k: Tensor  # [U, Hk, D] turned


class NoContext:
    """The question alone."""

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        return None


@torch.inference_mode()
def probe(
    decoder: Decoder,
    request: FuseRequest,
    view: ContextView,
    layers: Collection[int],
    *,
    rows: range | None = None,
    first_position: int | None = None,
) -> dict[int, Probed]:
    """Queries and keys of the question at `layers`.

    `rows` are the positions of the question to push (all by default). They stand at their true
    positions, or from `first_position` on. Computes no logits, writes nothing.
    """
    rows = rows or range(request.question_start, len(request.prompt_ids))
    start = rows.start if first_position is None else first_position
    positions = torch.arange(start, start + len(rows))  # on the host
    angles = decoder.angles(positions.to(decoder.device))
    ids = [request.prompt_ids[i] for i in rows]
    h = decoder.embed(torch.tensor(ids, device=decoder.device))
    found: dict[int, Probed] = {}
    deepest = max(layers)
    for layer in range(deepest + 1):
        projected = decoder.qkv(layer, h)
        q, k = rotate(projected.q, angles), rotate(projected.k, angles)
        if layer in layers:
            found[layer] = Probed(q, k)
        if layer == deepest:
            break
        before = view.context(layer)
        keys, values, at = k, projected.v, positions
        if before is not None:
            keys, values = torch.cat([before[0], k]), torch.cat([before[1], projected.v])
            at = torch.cat([before[2], positions])
        segment = Segment(0, len(q), keys, values, at)
        h = decoder.finish(layer, h, attend(q, positions, [segment]))
    return found
