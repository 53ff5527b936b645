"""Where the KV of a prompt's chunks comes from, one layer at a time.

A source gives one layer of all placed chunks, laid behind each other in prompt order, keys before
RoPE. It may block until the bytes are there. For the one thread that runs the pass.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import ChunkSpan
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.unpack import (
    StoredCodes,
    can_lay_codes,
    lay_codes,
    takes_codes,
)
from kvweave.kv.format.codec import Codec, GroupedCodec, LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer


class ChunkLost(Exception):
    """Stored KV that was promised did not arrive. The pass must start over without it."""

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        super().__init__(f"{len(keys)} chunks did not arrive")
        self.keys = tuple(keys)


class ChunkSource(Protocol):
    """Layers of the placed chunks."""

    @property
    def placer(self) -> "LayerPlacer | None":
        """Writes layers where they belong; None: this source only gives them."""
        ...

    def layer(self, layer: int) -> LayerKV:
        """[N, Hk, D] each on the decoder's device, N tokens of all placed chunks. Read-only. Raises
        ChunkLost when a chunk does not come."""
        ...

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        """The extra `name` of the chunks that have it, as uint8 tensors in host memory. They may be
        copied from, not written to."""
        ...


class LayerPlacer(Protocol):
    """Writes layers into the request's own KV, keys turned. See transfer/pipeline.py."""

    def lay(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write all placed chunks into one layer of the request's KV [T, Hk, D]. Blocks and raises
        as `ChunkSource.layer`."""
        ...

    def begin(self) -> None:
        """Let layers come. The layers that a selector wants first were asked for before."""
        ...

    def stalled_s(self) -> float:
        """How long the pass has waited for bytes so far."""
        ...


class LayerTransfer(Protocol):
    """The part of a transfer that a source reads. See kv/transfers.py."""

    def is_ready(self, layer: int) -> bool: ...

    def wait_layer(self, layer: int) -> Mapping[ChunkKey, EncodedLayer]: ...

    def whole(self, keys: Iterable[ChunkKey]) -> Sequence[Tensor] | None: ...

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]: ...


@dataclass(eq=False)
class StoredChunks:
    """Chunks on their way from the store, decoded as they are laid.

    With compiled kernels 8-bit codes are decoded, turned and laid in one go. Other codecs are
    decoded first.
    """

    _decoder: FusionDecoder
    _placed: Sequence[ChunkSpan]
    _layers: LayerTransfer
    # [N] where tokens go, each turned to its place in its chunk; None: to its place in the prompt
    _slots: Tensor | None = None
    _laid_s: float = 0.0

    @property
    def placer(self) -> "StoredChunks | None":
        return self if self._decoder.device.type == "cpu" else None

    def lay(self, layer: int, keys: Tensor, values: Tensor) -> None:
        started_s = time.perf_counter()
        arrived = self._layers.wait_layer(layer)
        check_arrived(self._decoder, self._placed, arrived)
        groups = {_group_of_codes(encoded.codec) for encoded in arrived.values()}
        group = groups.pop() if len(groups) == 1 else None
        can_lay = can_lay_codes(self._decoder.spec.head_dim) and takes_codes(keys, values)
        if self._slots is None and group is not None and can_lay:
            chunks = [
                StoredCodes(arrived[span.key].data, span.num_tokens, span.start)
                for span in self._placed
            ]
            lay_codes(chunks, group, self._turn, keys, values)
        else:
            at = 0
            for span in self._placed:
                stored, end = arrived[span.key].decode(), at + span.num_tokens
                turn = Angles(self._turn.cos[at:end], self._turn.sin[at:end])
                if self._slots is None:
                    rotate(stored.k, turn, out=keys[span.start : span.end])
                    values[span.start : span.end] = stored.v
                else:
                    rows = self._slots[at:end]
                    keys[rows] = rotate(stored.k.to(keys.dtype), turn)
                    values[rows] = stored.v.to(values.dtype)
                at = end
        self._laid_s += time.perf_counter() - started_s

    @cached_property
    def _turn(self) -> Angles:
        """Angles that all placed tokens are turned by."""
        starts = [span.start if self._slots is None else 0 for span in self._placed]
        spans = zip(starts, self._placed, strict=True)
        runs = [torch.arange(start, start + span.num_tokens) for start, span in spans]
        return self._decoder.angles(torch.cat(runs))

    def begin(self) -> None:
        """Do nothing: layers come by themselves."""

    def stalled_s(self) -> float:
        """Return the time spent waiting for bytes, and decoding and laying them."""
        return self._laid_s

    def layer(self, layer: int) -> LayerKV:
        arrived = self._layers.wait_layer(layer)
        check_arrived(self._decoder, self._placed, arrived)
        decoded = {key: encoded.decode() for key, encoded in arrived.items()}
        parts = [decoded[span.key] for span in self._placed]
        device = self._decoder.device
        return LayerKV(
            torch.cat([kv.k for kv in parts]).to(device),
            torch.cat([kv.v for kv in parts]).to(device),
        )

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        return self._layers.extras(name)


def _group_of_codes(codec: Codec) -> int | None:
    """Values that share parameters, of a codec with 8-bit codes; None: another one."""
    if isinstance(codec, GroupedCodec) and codec.bits == 8 and not codec.is_float:
        return codec.group
    return None


def check_arrived(
    decoder: FusionDecoder, placed: Sequence[ChunkSpan], arrived: Mapping[ChunkKey, EncodedLayer]
) -> None:
    """Raise ChunkLost unless every placed chunk is there and has the shape of its place."""
    spec = decoder.spec
    lost = [
        span.key
        for span in placed
        if span.key not in arrived
        or arrived[span.key].shape[:3] != (span.num_tokens, spec.num_kv_heads, spec.head_dim)
    ]
    if lost:
        raise ChunkLost(lost)


class ComputedChunks:
    """Chunk KV that was just computed and never stored: calibration and benches use it."""

    placer = None

    def __init__(
        self,
        chunks: Sequence[Sequence[LayerKV]],
        extras: Mapping[str, Mapping[ChunkKey, bytes]] | None = None,
    ) -> None:
        """`chunks` in prompt order, each as `encode_chunks` made it."""
        self.blobs = extras or {}  # by name
        self._layers = [
            LayerKV(torch.cat([kv.k for kv in same]), torch.cat([kv.v for kv in same]))
            for same in zip(*chunks, strict=True)
        ]

    def layer(self, layer: int) -> LayerKV:
        return self._layers[layer]

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        blobs = self.blobs.get(name, {}).items()
        return {key: torch.from_numpy(np.frombuffer(b, np.uint8).copy()) for key, b in blobs}
