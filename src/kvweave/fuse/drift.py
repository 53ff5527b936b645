"""Drift: what recomputed rows tell about the rows of their chunk that were not.

Recomputing a row shows how far its stored keys and values had been from where they belong in this
prompt. Much of that change is shared by the whole chunk (it now stands behind other text, and
deeper), so the rest of the chunk is moved by a part of the mean change of its recomputed rows. The
fewer rows a chunk has, the less their mean is trusted.

Shapes: R running rows, C chosen rows, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.fuse.fused_pass import LayerLook
from kvweave.fuse.protocol import Decoder, KVBuffer
from kvweave.fuse.request import FuseRequest, Span, State
from kvweave.kernels.rope import Angles, rotate

# Found by trial on SmolLM2; bench/quality.py is where to check it on another model.
STRENGTH = 0.5
DOUBT = 4.0  # rows that a chunk's mean is diluted with


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A chunk with recomputed rows."""

    span: Span
    rows: slice  # its chosen rows among all chosen
    angles: Angles  # of its whole place
    weight: float


class Drift:
    """Moves the unchosen rows of one request. Made once per request and choice of rows."""

    def __init__(
        self,
        decoder: Decoder,
        request: FuseRequest,
        chosen: Sequence[int],
        strength: float = STRENGTH,
    ) -> None:
        """`chosen` are the recomputed hits, ascending."""
        self._chosen = torch.tensor(chosen, dtype=torch.int64)
        self._back = backwards(decoder.angles(self._chosen.to(decoder.device)))
        self._moved: list[_Moved] = []
        for span in request.spans:
            bounds = torch.searchsorted(self._chosen, torch.tensor([span.start, span.end]))
            first, last = (int(b) for b in bounds)
            if span.state is not State.REUSED or first == last:
                continue
            angles = decoder.angles(torch.arange(span.start, span.end, device=decoder.device))
            weight = strength * (last - first) / (last - first + DOUBT)
            self._moved.append(_Moved(span, slice(first, last), angles, weight))

    def apply(self, look: LayerLook, kv: KVBuffer) -> None:
        """Move one layer, before the fresh rows are written over it."""
        if look.layer == 0 or not self._moved:
            return  # layer 0 depends on the tokens alone: nothing drifts
        rows = torch.searchsorted(look.positions, self._chosen).to(look.stored_v.device)
        change_k = rotate(look.turned_k[rows] - look.stored_k[rows], self._back)  # before RoPE
        change_v = look.fresh.v[rows] - look.stored_v[rows]
        keys, values = kv.keys(look.layer), kv.values(look.layer)
        for moved in self._moved:
            place = slice(moved.span.start, moved.span.end)
            mean_k = change_k[moved.rows].mean(0, keepdim=True) * moved.weight
            add_rotated(keys[place], mean_k, moved.angles)
            values[place] += change_v[moved.rows].mean(0, keepdim=True) * moved.weight


def backwards(angles: Angles) -> Angles:
    """Angles that undo a rotation, and the scale that YaRN puts into it."""
    scale = angles.cos.square() + angles.sin.square()
    return Angles(angles.cos / scale, -angles.sin / scale)


def add_rotated(out: Tensor, x: Tensor, angles: Angles) -> None:
    """Add one vector x [1, Hk, D], turned to each of many positions, to out [R, Hk, D]."""
    half = angles.cos.shape[-1]
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    first, second = out[..., :half], out[..., half : 2 * half]
    first.addcmul_(x1, angles.cos).addcmul_(x2, angles.sin, value=-1)
    second.addcmul_(x2, angles.cos).addcmul_(x1, angles.sin)
    out[..., 2 * half :] += x[..., 2 * half :]
