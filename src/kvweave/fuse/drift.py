"""Drift: what recomputed rows tell about the rows of their chunk that were not.

Recomputing a row shows how far its stored keys and values had been from where they belong in this
prompt. Much of that change is shared by the whole chunk (it now stands behind other text, and
deeper), so the rest of the chunk is moved by a part of the mean change of its recomputed rows. The
fewer rows a chunk has, the less their mean is trusted.

Shapes: R running rows, C chosen rows, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.fuse.fused_pass import LayerLook
from kvweave.fuse.protocol import Decoder, KVBuffer, Projected
from kvweave.fuse.request import FuseRequest, Span, State
from kvweave.fuse.stitched import positions_of
from kvweave.kernels.host import on_device
from kvweave.kernels.place import Owners, mean_changes
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.shift import shift

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


class MovedAtOnce(NamedTuple):
    """All such chunks together, for a device where many small steps cost more than the work."""

    owners: Owners  # of the chosen rows: take changes to each chunk's weighted mean
    chunk: Tensor  # [N] of every row of these chunks
    row: Tensor  # [N] its position
    angles: Angles  # of these rows

    @classmethod
    def of(cls, decoder: Decoder, spans: Sequence[tuple[Span, int, float]]) -> "MovedAtOnce":
        """`spans` with their number of chosen rows and weight; all chosen rows belong to them."""
        bounds = torch.tensor([0, *(count for _, count, _ in spans)]).cumsum(0, dtype=torch.int32)
        weights = torch.tensor([weight / count for _, count, weight in spans])
        sizes = torch.tensor([span.num_tokens for span, _, _ in spans])
        chunk = torch.repeat_interleave(torch.arange(len(spans)), sizes)
        row = positions_of([range(span.start, span.end) for span, _, _ in spans])
        chunk, row = on_device(torch.stack([chunk, row]), decoder.device).unbind()
        owners = Owners(*(on_device(x, decoder.device) for x in (bounds, weights)))
        return cls(owners, chunk, row, decoder.angles(row))

    def add(self, change_k: Tensor, change_v: Tensor, keys: Tensor, values: Tensor) -> None:
        """Move these rows of keys and values [T, Hk, D] by the mean of their chunk's changes."""
        self.add_means(self.owners.sums(torch.stack([change_k, change_v]).float()), keys, values)

    def add_means(self, by: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `add`, from the mean of every chunk: keys and values, [2, chunks, Hk, D] float32."""
        shift(keys, values, by[0], by[1], self.chunk, self.row, self.angles)


class Drift:
    """Moves the unchosen rows of one request. Made once per request and choice of rows."""

    def __init__(
        self,
        decoder: Decoder,
        request: FuseRequest,
        chosen: Sequence[int] | Tensor,
        strength: float = STRENGTH,
        *,
        at_once: bool | None = None,
    ) -> None:
        """`chosen` are the recomputed hits, ascending. `at_once`: all chunks in a few steps, as on
        a GPU (None: where there is one)."""
        if at_once is None:
            at_once = decoder.device.type == "cuda"
        self._chosen = torch.as_tensor(chosen, dtype=torch.int64)
        self._device = decoder.device
        self._at = on_device(self._chosen, decoder.device)
        self._turn = decoder.angles(self._at)
        self._moved: list[_Moved] = []
        spans: list[tuple[Span, int, float]] = []
        reused = [span for span in request.spans if span.state is State.REUSED]
        edges = torch.tensor([(span.start, span.end) for span in reused], dtype=torch.int64)
        bounds: list[list[int]] = torch.searchsorted(self._chosen, edges).tolist()
        for span, (first, last) in zip(reused, bounds, strict=True):
            if first == last:
                continue
            weight = strength * (last - first) / (last - first + DOUBT)
            spans.append((span, last - first, weight))
            if not at_once:
                angles = decoder.angles(torch.arange(span.start, span.end, device=decoder.device))
                self._moved.append(_Moved(span, slice(first, last), angles, weight))
        self._at_once = MovedAtOnce.of(decoder, spans) if at_once and spans else None
        self._rows: Tensor | None = None  # of the chosen among the running ones

    @cached_property
    def _back(self) -> Angles:
        """For `apply` alone: `move` needs none of these orders."""
        return backwards(self._turn)

    def apply(self, look: LayerLook, kv: KVBuffer) -> None:
        """Move one layer, before the fresh rows are written over it."""
        if look.layer == 0 or not (self._moved or self._at_once):
            return  # layer 0 depends on the tokens alone: nothing drifts
        rows = self._among(look.positions)
        change_k = rotate(look.turned_k[rows] - look.stored_k[rows], self._back)  # before RoPE
        change_v = look.fresh.v[rows] - look.stored_v[rows]
        keys, values = kv.keys(look.layer), kv.values(look.layer)
        if self._at_once is not None:
            self._at_once.add(change_k, change_v, keys, values)
        for moved in self._moved:
            place = slice(moved.span.start, moved.span.end)
            mean_k = change_k[moved.rows].mean(0, keepdim=True) * moved.weight
            add_rotated(keys[place], mean_k, moved.angles)
            values[place] += change_v[moved.rows].mean(0, keepdim=True) * moved.weight

    @property
    def at_once(self) -> bool:
        return self._at_once is not None

    def move(self, layer: int, positions: Tensor, fresh: Projected, kv: KVBuffer) -> None:
        """As `apply`, in two steps. For `at_once` alone."""
        if layer == 0 or self._at_once is None:
            return
        keys, values = kv.keys(layer), kv.values(layer)
        rows = self._among(positions)
        owners = self._at_once.owners
        by = mean_changes(fresh.k, fresh.v, rows, self._turn, self._at, keys, values, owners)
        self._at_once.add_means(by, keys, values)

    def _among(self, positions: Tensor) -> Tensor:
        """The chosen among the running rows. They run from the start: always the same."""
        if self._rows is None:
            self._rows = on_device(torch.searchsorted(positions, self._chosen), self._device)
        return self._rows


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
