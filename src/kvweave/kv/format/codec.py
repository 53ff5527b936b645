"""How one layer's keys and values become bytes and tensors again.

A codec knows the size of a layer from its shape alone, so a reader refuses an object whose header
disagrees. Encoding writes into the caller's bytes; decoding gives fresh tensors, or for `raw` views
of the stored bytes without any copy. Bytes and tensors may lie on any device, as long as it is the
same one: a GPU uploads the small encoded layer and decodes there.

A layer stored as group codes (int8, fp8, int4) has these pieces, one behind the other:

    keys: codes, scales[, lows]    values: codes, scales[, lows]

Codes are [T, H, D] as kernels/quantise.py packs them, parameters fp16 per group: of keys along
tokens, of values along the head dim.

Shapes: T tokens, H KV heads, D head dim; keys and values [T, H, D]; a layer's bytes are uint8 [n].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.errors import ConfigError
from kvweave.kernels.quantise import (
    Groups,
    dequantise,
    dequantise_fp8,
    num_groups,
    quantise,
    quantise_fp8,
)
from kvweave.kv.format.header import LayerShape

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
AXES = (0, 2)  # keys are grouped along tokens, values along channels


class LayerKV(NamedTuple):
    """Keys (after q/k norm, before RoPE) and values of one layer of one chunk, each [T, H, D]."""

    k: Tensor
    v: Tensor


class Codec(Protocol):
    """How a layer is stored. Stateless, safe from any thread."""

    @property
    def name(self) -> str: ...

    def num_bytes(self, shape: LayerShape) -> int:
        """Exactly what `encode` writes. Raises ValueError for a shape it cannot represent."""
        ...

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        """Fill out, uint8 [num_bytes]. Raises ValueError if a value cannot be represented."""
        ...

    def encode_joined(self, layers: Sequence[LayerKV], out: Tensor) -> None:
        """Fill out, uint8 [L, num_bytes], with layers of one chunk. The same to the bit as one by
        one, in as few steps as one layer takes: on a GPU a step costs more than its work."""
        ...

    def decode(self, data: Tensor, shape: LayerShape) -> LayerKV:
        """Keys and values in the model's dtype. Those of `raw` are views of `data`: read-only, and
        valid only as long as it is."""
        ...


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """Elements as they are, in the model's dtype (`raw`) or rounded to another."""

    name: str
    stored: torch.dtype | None = None  # None: the model's

    def num_bytes(self, shape: LayerShape) -> int:
        stored = self.stored or DTYPES[shape.dtype]
        return 2 * _elements(shape) * stored.itemsize

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        stored = out.view(self.stored or kv.k.dtype).view(2, *kv.k.shape)  # [2, T, H, D]
        stored[0].copy_(kv.k)
        stored[1].copy_(kv.v)
        if self.stored == torch.float16 and not bool(stored.isfinite().all()):
            raise ValueError("values beyond ±65504 or not finite do not fit fp16; use raw or bf16")

    def encode_joined(self, layers: Sequence[LayerKV], out: Tensor) -> None:
        for kv, row in zip(layers, out, strict=True):
            self.encode(kv, row)

    def decode(self, data: Tensor, shape: LayerShape) -> LayerKV:
        model = DTYPES[shape.dtype]
        stored = data.view(self.stored or model)
        k, v = stored.view(2, shape.num_tokens, shape.num_kv_heads, shape.head_dim)
        return LayerKV(k.to(model), v.to(model))  # no copy where the dtype is the same


@dataclass(frozen=True, slots=True)
class GroupedCodec:
    """Codes in groups: integers with an fp16 (low, scale) per group, or e4m3 with a scale."""

    name: str
    bits: int
    is_float: bool = False
    group: int = 64

    def num_bytes(self, shape: LayerShape) -> int:
        return sum(self._sizes(shape))

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        self.encode_joined([kv], out.unsqueeze(0))

    def encode_joined(self, layers: Sequence[LayerKV], out: Tensor) -> None:
        at = 0
        for every, axis in zip(zip(*layers, strict=True), AXES, strict=True):
            # no group crosses a head: layers are like more heads
            x = every[0] if len(every) == 1 else torch.cat(every, dim=1)  # [T, L * H, D]
            if self.is_float:
                groups = quantise_fp8(x, group=self.group, axis=axis)
            else:
                groups = quantise(x, bits=self.bits, group=self.group, axis=axis)
            for piece in groups:
                if piece is None:
                    continue
                split = piece.reshape(piece.shape[0], len(layers), -1, piece.shape[2])
                data = split.transpose(0, 1).contiguous().view(torch.uint8).flatten(1)  # [L, ..]
                out[:, at : at + data.shape[1]] = data
                at += data.shape[1]

    def decode(self, data: Tensor, shape: LayerShape) -> LayerKV:
        size = (2, shape.num_tokens, shape.num_kv_heads, shape.head_dim)
        out = LayerKV(*torch.empty(size, dtype=DTYPES[shape.dtype], device=data.device))
        for x, groups, axis in zip(out, self._view_groups(data, shape), AXES, strict=True):
            if self.is_float:
                dequantise_fp8(groups, group=self.group, axis=axis, out=x)
            else:
                dequantise(groups, bits=self.bits, group=self.group, axis=axis, out=x)
        return out

    def _sizes(self, shape: LayerShape) -> tuple[int, ...]:
        return _piece_sizes(shape, self.bits, self.group, 1 if self.is_float else 2)

    def _view_groups(self, data: Tensor, shape: LayerShape) -> tuple[Groups, Groups]:
        """Return keys and values of a layer: views of the bytes, as far as they can be viewed."""
        sizes = self._sizes(shape)
        pieces = iter(data[: sum(sizes)].split_with_sizes(sizes))
        heads, dim = shape.num_kv_heads, shape.head_dim

        def next_groups(groups_per_head: int) -> Groups:
            q = next(pieces).view(-1, heads, dim * self.bits // 8)
            scale = _halves(next(pieces)).view(-1, heads, groups_per_head)
            return Groups(
                q, scale, None if self.is_float else _halves(next(pieces)).view(scale.shape)
            )

        return next_groups(dim), next_groups(num_groups(dim, self.group))


CODECS: dict[str, Codec] = {
    "raw": PlainCodec("raw"),
    "fp16": PlainCodec("fp16", torch.float16),
    "bf16": PlainCodec("bf16", torch.bfloat16),
    "int8": GroupedCodec("int8", bits=8),
    "fp8": GroupedCodec("fp8", bits=8, is_float=True),
    "int4": GroupedCodec("int4", bits=4),
}


def open_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ConfigError(f"no codec {name!r}; known: {', '.join(CODECS)}")
    return CODECS[name]


def is_lossless(codec: str, dtype: str) -> bool:
    """Whether KV of a model of that dtype comes back with every bit."""
    known = open_codec(codec)
    return isinstance(known, PlainCodec) and known.stored in (None, DTYPES[dtype])


def dtype_name(dtype: torch.dtype) -> str:
    """The name a header and a key carry. ConfigError for a dtype no model of ours has."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(f"chunk KV of {dtype} is not supported; known: {', '.join(DTYPES)}")


def _elements(shape: LayerShape) -> int:
    return shape.num_tokens * shape.num_kv_heads * shape.head_dim


@lru_cache(maxsize=1024)  # asked for every layer of every chunk
def _piece_sizes(shape: LayerShape, bits: int, group: int, params: int) -> tuple[int, ...]:
    """Bytes of each piece: K codes, K parameters, V codes, V parameters.

    Raises ValueError for a shape that these codes cannot represent.
    """
    if shape.head_dim * bits % 8:
        raise ValueError(f"{bits} bits need an even head dim, not {shape.head_dim}; use int8")
    codes = shape.num_tokens * shape.num_kv_heads * shape.head_dim * bits // 8
    k_params = 2 * num_groups(shape.num_tokens, group) * shape.num_kv_heads * shape.head_dim
    v_params = 2 * shape.num_tokens * shape.num_kv_heads * num_groups(shape.head_dim, group)
    return (codes, *[k_params] * params, codes, *[v_params] * params)


def _halves(part: Tensor) -> Tensor:
    """Bytes as fp16. Behind an odd number of int4 codes they lie between two halves: copied."""
    return (part.clone() if part.storage_offset() % 2 else part).view(torch.float16)
