"""Where the bytes of a request's chunks lie in one buffer, and where their tokens go.

Made once per request, when the shapes are known; every layer is laid by it. Chunks that stand twice
in a prompt travel once.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.protocol import Decoder
from kvweave.fuse.request import Span
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles
from kvweave.kernels.unpack import Packing, Rows, unpack
from kvweave.kv.codec import DTYPES, Codec, Grouped, GroupedFp8, Plain
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import round_up
from kvweave.kv.objects import EncodedLayer

ALIGN = 256  # of every chunk in the buffer: what device copies and loads like


def packing_of(codec: Codec, model: torch.dtype) -> Packing:
    """How a codec's bytes are to be read. `model` is the dtype that `raw` stores."""
    match codec:
        case Plain():
            return Packing("plain", codec.stored or model)
        case Grouped():
            return Packing("int", model, codec.bits, codec.group)
        case GroupedFp8():
            return Packing("fp8", model, 8, codec.group)
    raise AssertionError(f"codec {codec.name!r} has no packing")


class _Group(NamedTuple):
    """Tokens whose bytes are read in one way."""

    packing: Packing
    rows: Rows
    compact: Tensor  # [n] their numbers among all placed tokens
    turn: Angles


class Placement:
    """The plan of one request: immutable, used by the thread that runs the pass."""

    def __init__(
        self, decoder: Decoder, placed: Sequence[Span], arrived: Mapping[ChunkKey, EncodedLayer]
    ) -> None:
        """`arrived` is any layer: all layers of a chunk are alike."""
        self.offsets: dict[ChunkKey, int] = {}
        at = 0
        for span in placed:
            if span.key not in self.offsets:
                self.offsets[span.key] = at
                at = round_up(at + arrived[span.key].data.numel(), ALIGN)
        self.num_bytes = at
        self.num_tokens = sum(span.num_tokens for span in placed)
        self._device = decoder.device
        by_packing: dict[Packing, list[tuple[int, Span]]] = {}
        start = 0
        for span in placed:
            encoded = arrived[span.key]
            packing = packing_of(encoded.codec, DTYPES[encoded.shape.dtype])
            by_packing.setdefault(packing, []).append((start, span))
            start += span.num_tokens
        self._groups = [self._group(decoder, p, spans) for p, spans in by_packing.items()]

    def lay(self, data: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write all placed tokens from `data` [num_bytes] to their positions, keys turned."""
        for group in self._groups:
            unpack(data, group.packing, group.rows, group.turn, keys, values)

    def unturned(self, data: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write them side by side into [N, Hk, D], keys as stored."""
        for group in self._groups:
            unpack(data, group.packing, group.rows._replace(row=group.compact), None, keys, values)

    def _group(
        self, decoder: Decoder, packing: Packing, spans: Sequence[tuple[int, Span]]
    ) -> _Group:
        counts = np.array([span.num_tokens for _, span in spans])
        index = np.concatenate([np.arange(count) for count in counts])
        bases = [self.offsets[span.key] for _, span in spans]
        columns = np.stack(
            [
                np.repeat(bases, counts),
                index,
                np.repeat(counts, counts),
                np.repeat([span.start for _, span in spans], counts) + index,
                np.repeat([start for start, _ in spans], counts) + index,
            ]
        )
        base, nth, length, row, compact = on_device(
            torch.from_numpy(columns), self._device
        ).unbind()
        return _Group(packing, Rows(base, nth, length, row), compact, decoder.angles(row))
