"""Where the bytes of a request's chunks lie in one slot of the ring, and where their tokens go.

Made once per request, when the shapes are known; every layer is laid by it. Chunks that stand twice
in a prompt travel once.

Layers travel in groups: of g layers, all g of the first chunk lie in front, one every stride, then
those of the next chunk. So they lie in host memory too, and one copy brings a chunk's.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import ChunkSpan
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles
from kvweave.kernels.types import Packing, StoredRows
from kvweave.kernels.unpack import unpack
from kvweave.kv.format.codec import DTYPES, Codec, GroupedCodec, PlainCodec
from kvweave.kv.format.header import ALIGN, round_up
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer


def packing_of(codec: Codec, model: torch.dtype) -> Packing:
    """How a codec's bytes are to be read. `model` is the dtype that `raw` stores."""
    match codec:
        case PlainCodec():
            return Packing("plain", codec.stored or model)
        case GroupedCodec():
            return Packing("fp8" if codec.is_float else "int", model, codec.bits, codec.group)
    raise AssertionError(f"codec {codec.name!r} has no packing")


class _PackingGroup(NamedTuple):
    """Tokens whose bytes have the same packing."""

    packing: Packing
    rows: list[StoredRows]  # by `_number` of a layer in its group
    compact: Tensor  # [n] their numbers among all placed tokens
    turn: Angles


def strides_of(
    placed: Sequence[ChunkSpan], arrived: Mapping[ChunkKey, EncodedLayer]
) -> dict[ChunkKey, int]:
    """Bytes from one layer of a chunk to its next, of each chunk in the order it first stands in
    the prompt. `arrived` is any layer: all layers of a chunk are alike."""
    return {span.key: round_up(arrived[span.key].data.numel(), ALIGN) for span in placed}


def parts_of(data: Tensor, strides: Mapping[ChunkKey, int], size: int) -> list[Tensor]:
    """Each chunk's part of a buffer for `size` layers."""
    return list(data.split_with_sizes([size * stride for stride in strides.values()]))


class Placement:
    """The plan of one request: immutable, used by the thread that runs the pass."""

    def __init__(
        self,
        decoder: FusionDecoder,
        placed: Sequence[ChunkSpan],
        arrived: Mapping[ChunkKey, EncodedLayer],
        group: int = 1,
        slots: Tensor | None = None,
    ) -> None:
        """For groups of up to `group` layers. `arrived` as in `strides_of`. `slots` [N] on the
        device: chunks go there, token by token, each turned to its place in its chunk; None: to
        their places in the prompt."""
        self._slots = slots
        self._strides = strides_of(placed, arrived)
        self.num_tokens = sum(span.num_tokens for span in placed)
        self._device = decoder.device
        self._group_layers = group
        by_packing: dict[Packing, list[tuple[int, ChunkSpan]]] = {}
        start = 0
        for span in placed:
            encoded = arrived[span.key]
            packing = packing_of(encoded.codec, DTYPES[encoded.shape.dtype])
            by_packing.setdefault(packing, []).append((start, span))
            start += span.num_tokens
        self._groups = [self._group(decoder, p, spans) for p, spans in by_packing.items()]

    def lay(self, data: Tensor, at: tuple[int, int], keys: Tensor, values: Tensor) -> None:
        """Write all placed tokens of one layer to where they belong, keys turned.

        `data` holds a group; `at` is how many layers it has, and which of them this one is.
        """
        for group in self._groups:
            unpack(data, group.packing, group.rows[_number(*at)], group.turn, keys, values)

    def write_unturned(
        self, data: Tensor, at: tuple[int, int], keys: Tensor, values: Tensor
    ) -> None:
        """Write all placed tokens of one layer side by side into [N, Hk, D], keys as stored. `data`
        and `at` are those of `lay`."""
        for group in self._groups:
            rows = group.rows[_number(*at)]._replace(row=group.compact)
            unpack(data, group.packing, rows, None, keys, values)

    def _group(
        self, decoder: FusionDecoder, packing: Packing, spans: Sequence[tuple[int, ChunkSpan]]
    ) -> _PackingGroup:
        """Plan tokens of one packing: chunks are described on the host and spread over their tokens
        on the device."""
        counts = np.array([span.num_tokens for _, span in spans])
        first = np.cumsum(counts) - counts  # token of the group
        of_chunk = [  # of each chunk: what its tokens add their number in the group to, ...
            -first,
            np.array([span.start for _, span in spans]) - first,
            np.array([start for start, _ in spans]) - first,
            counts,  # ... and what they share
            *self._bases(spans),
        ]
        there = on_device(torch.from_numpy(np.stack(of_chunk)), self._device)
        num_tokens = int(counts.sum())
        chunk = torch.repeat_interleave(there[3], output_size=num_tokens)  # of each token
        of_token = there.index_select(1, chunk)
        of_token[:3] += torch.arange(num_tokens, device=self._device)
        nth, row, compact, length, *bases = of_token.unbind()
        if self._slots is not None:
            row = self._slots.index_select(0, compact)
        rows = [StoredRows(base, nth, length, row) for base in bases]
        turn = decoder.angles(row if self._slots is None else nth)
        return _PackingGroup(packing, rows, compact, turn)

    def _bases(self, spans: Sequence[tuple[int, ChunkSpan]]) -> np.ndarray:
        """[places in groups, spans] first byte of a chunk's layer, in the order of `_number`."""
        strides = np.array(list(self._strides.values()))
        nth = {key: i for i, key in enumerate(self._strides)}
        chunks = [nth[span.key] for _, span in spans]
        first, stride = (np.cumsum(strides) - strides)[chunks], strides[chunks]
        places = [(size, i) for size in range(1, self._group_layers + 1) for i in range(size)]
        return np.stack([size * first + i * stride for size, i in places])


def _number(size: int, i: int) -> int:
    """Return the number of layer `i` of a group of `size` layers among all that there can be."""
    return size * (size - 1) // 2 + i
