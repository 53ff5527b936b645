"""Whole layers in C: rows go through one, or through many, in a single call.

The twin of what decoder.py does with products, norms, rotation and attention one by one, for
float32 on a CPU, to the last bit. A layer is done here where it has the four products of a plain
one; its weights are rounded or float32.

Shapes: R rows, E hidden dim, L layers, S slots, Hq query heads, Hk KV heads, D head dim.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.native.fields import (
    LayerFields,
    MatrixFields,
    PassFields,
    SequenceFields,
    ShapeFields,
)
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.product import NativeProduct


class LayerParts(Protocol):
    """The weights of a layer; one without an MLP of its own is never done here."""

    @property
    def input_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Projection: ...
    @property
    def q_norm(self) -> Tensor | None: ...
    @property
    def k_norm(self) -> Tensor | None: ...
    @property
    def out(self) -> Projection: ...
    @property
    def mlp_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> Projection | None: ...
    @property
    def down(self) -> Projection | None: ...


class LayerSizes(NamedTuple):
    """The sizes that all layers of a model share."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    half: int  # pairs of dims that are turned
    eps: float


class SequenceSlots(NamedTuple):
    """The KV of one sequence in some memory, and its rows of a batch."""

    num_rows: int
    keys: Tensor  # [L, S, Hk, D]
    values: Tensor  # [L, S, Hk, D]
    pieces: Sequence[tuple[int, int]] | None  # (first slot, slots) in position order; None: from 0


class PlacedRows:
    """Where rows of a batch stand and what they look at. Keeps what it is given."""

    def __init__(
        self, positions: Tensor, slots: Tensor, sequences: Sequence[SequenceSlots]
    ) -> None:
        """`positions` [R], ascending within a sequence; keys and values go to `slots` [R]."""
        counts = [each.num_rows for each in sequences]
        if not len(positions) == len(slots) == sum(counts) or min(counts, default=0) < 1:
            raise ValueError(f"{len(positions)} positions, {len(slots)} slots, rows of {counts}")
        self.positions = positions.to(torch.int64).contiguous()
        self.slots = slots.to(torch.int64).contiguous()
        self._kept = sequences
        self._pieces: list[Tensor] = []
        firsts = (0, *accumulate(counts))
        last_slots = self.slots.tolist()
        self.fields = (SequenceFields * len(sequences))()
        for i, (each, first) in enumerate(zip(sequences, firsts, strict=False)):
            end = first + each.num_rows
            self._check(each, max(last_slots[first:end]), int(positions[end - 1]))
            at, count = 0, 0
            if each.pieces is not None and not (len(each.pieces) == 1 and each.pieces[0][0] == 0):
                pieces = torch.tensor(each.pieces, dtype=torch.int64)
                self._pieces.append(pieces)
                at, count = pieces.data_ptr(), len(pieces)
            self.fields[i] = SequenceFields(
                first, each.num_rows, each.keys.data_ptr(), each.values.data_ptr(),
                each.keys.stride(0), at, count,
            )  # fmt: skip

    @staticmethod
    def _check(held: SequenceSlots, slot: int, position: int) -> None:
        """An address says nothing of what lies there: what C is given is checked here."""
        keys, values = held.keys, held.values
        if keys.shape != values.shape or keys.stride() != values.stride():
            raise ValueError(f"keys of {keys.shape} and values of {values.shape} are not alike")
        if not keys[0].is_contiguous() or keys.dtype != torch.float32:
            raise ValueError("keys and values are float32, and slots lie side by side")
        pieces = held.pieces
        room = keys.shape[1] if pieces is None else sum(count for _, count in pieces)
        end = max([slot + 1, *(first + count for first, count in pieces or ())])
        if end > keys.shape[1]:
            raise ValueError(f"slot {slot} and pieces {pieces} are not in {keys.shape[1]} slots")
        if position >= room:
            raise ValueError(f"a row at {position} looks beyond {room} slots")


class CompiledLayers:
    """The layers of one model as C sees them. Any thread."""

    def __init__(
        self, library: CompiledLibrary, sizes: LayerSizes, layers: Sequence[LayerParts]
    ) -> None:
        self.library = library
        self._layers = layers
        self._sizes = sizes
        self._shape = ShapeFields(*sizes, sizes.dim**-0.5)
        self._table = (LayerFields * len(layers))()
        self._fits: list[bool] = []
        for i, layer in enumerate(layers):
            fields = self._layer_fields(layer)
            self._fits.append(fields is not None)
            if fields is not None:
                self._table[i] = fields

    def fits(self, layer: int) -> bool:
        """Whether a layer can be done here."""
        return self._fits[layer]

    def stretch(self, layer: int) -> int:
        """The end of the layers from `layer` on that can be done here; `layer` itself: none."""
        end = layer
        while end < len(self._fits) and self._fits[end]:
            end += 1
        return end

    def begin(self, layer: int, h: Tensor, out: Tensor) -> None:
        """Queries, keys and values [R, (Hq + 2 Hk) D] of hidden states [R, E]."""
        self._check(h, out, self._sizes.dim * (self._sizes.heads + 2 * self._sizes.kv_heads))
        self._done(
            self.library.begin_layer(
                ctypes.addressof(self._shape), self._address(layer), h.data_ptr(), len(h),
                out.data_ptr(), out.stride(0), torch.get_num_threads(),
            ), len(h)
        )  # fmt: skip

    def end(self, layer: int, h: Tensor, attended: Tensor) -> None:
        """The rest of a layer: h [R, E] is overwritten, by attention output [R, Hq D]."""
        self._check(h, attended, self._sizes.dim * self._sizes.heads)
        self._done(
            self.library.end_layer(
                ctypes.addressof(self._shape), self._address(layer), h.data_ptr(), len(h),
                attended.data_ptr(), attended.stride(0), torch.get_num_threads(),
            ), len(h)
        )  # fmt: skip

    def run(self, layers: range, h: Tensor, turn: tuple[Tensor, Tensor], rows: PlacedRows) -> None:
        """Some layers from beginning to end: h [R, E] is overwritten, keys and values are written.

        `turn` are the cosines and sines [R, 1, r/2] of the rows."""
        sizes, (cos, sin) = self._sizes, turn
        if len(rows.positions) != len(h) or cos.shape != (len(h), 1, sizes.half):
            raise ValueError(f"angles of {cos.shape}, rows of {h.shape}, {len(rows.positions)}")
        if not (cos.is_contiguous() and sin.is_contiguous() and cos.dtype == torch.float32):
            raise ValueError("angles are float32, and lie side by side")
        self._check(h, h, sizes.hidden)
        assert all(self._fits[layer] for layer in layers), (
            "asked for layers that cannot be done here"
        )
        given = PassFields(
            ctypes.addressof(self._shape), ctypes.addressof(self._table), h.data_ptr(), len(h),
            cos.data_ptr(), sin.data_ptr(), rows.positions.data_ptr(), rows.slots.data_ptr(),
            ctypes.addressof(rows.fields), len(rows.fields),
        )  # fmt: skip
        threads = torch.get_num_threads()
        self._done(self.library.run_layers(given, layers.start, layers.stop, threads), len(h))

    def _check(self, h: Tensor, other: Tensor, width: int) -> None:
        if h.shape[1] != self._sizes.hidden or other.shape != (len(h), width):
            raise ValueError(
                f"[R, {self._sizes.hidden}], [R, {width}], not {h.shape}, {other.shape}"
            )
        if not h.is_contiguous() or other.stride(1) != 1 or other.dtype != torch.float32:
            raise ValueError("rows are float32, and their values lie side by side")
        if h.dtype != torch.float32 or not (h.is_cpu and other.is_cpu):
            raise ValueError("rows are float32 on a CPU")

    def _done(self, failed: int, num_rows: int) -> None:
        if failed:
            raise MemoryError(f"no memory for {num_rows} rows of a layer")

    def _address(self, layer: int) -> int:
        assert self._fits[layer], "asked for a layer that cannot be done here"
        return ctypes.addressof(self._table) + layer * ctypes.sizeof(LayerFields)

    def _layer_fields(self, layer: LayerParts) -> LayerFields | None:
        products = _products(layer)
        if len(products) < 4 or self._sizes.dim > self.library.most_dim:
            return None
        made = [_matrix(each) for each in products]
        norms = [layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm]
        if any(x is not None and (x.dtype != torch.float32 or not x.is_cpu) for x in norms):
            return None
        matrices = [each for each in made if each is not None]
        if len(matrices) < 4:
            return None
        return LayerFields(*(0 if x is None else x.data_ptr() for x in norms), *matrices)


def _products(layer: LayerParts) -> list[Projection]:
    every = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return [each for each in every if each is not None]


def _matrix(product: Projection) -> MatrixFields | None:
    """None: not one that can be multiplied here."""
    if isinstance(product, NativeProduct):
        return MatrixFields(product.address, 0, 0, product.in_dim, product.out_dim)
    if not isinstance(product, Linear):
        return None
    weight, bias = product.weight, product.bias
    held = [weight] if bias is None else [weight, bias]
    if not all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in held):
        return None
    out_dim, in_dim = weight.shape
    return MatrixFields(
        0, weight.data_ptr(), 0 if bias is None else bias.data_ptr(), in_dim, out_dim
    )
