"""How one layer's keys and values become bytes and tensors again.

A codec knows the size of a layer from its shape alone, so a reader refuses an object whose header
disagrees. Encoding writes into the caller's bytes; decoding writes into the caller's tensors, or
gives fresh ones, or for `raw` views of the stored bytes without any copy. Bytes and tensors may lie
on any device, as long as it is the same one: a GPU uploads the small encoded layer and decodes
there.

Shapes: keys and values [T, H, D]; a layer's bytes are uint8 [n].
"""

from collections.abc import Iterator, Sequence
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
from kvweave.kv.layout import Shape

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KEY_AXIS, VALUE_AXIS = 0, 2  # keys are grouped along tokens, values along channels


class LayerKV(NamedTuple):
    """Keys (after q/k norm, before RoPE) and values of one layer of one chunk, each [T, H, D]."""

    k: Tensor
    v: Tensor


class Codec(Protocol):
    """One way to store a layer. Stateless, safe from any thread."""

    @property
    def name(self) -> str: ...

    def num_bytes(self, shape: Shape) -> int:
        """Exactly what `encode` writes. Raises ValueError for a shape it cannot represent."""
        ...

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        """Fill out, uint8 [num_bytes]. Raises ValueError if a value cannot be represented."""
        ...

    def decode(self, data: Tensor, shape: Shape, out: LayerKV | None = None) -> LayerKV:
        """Keys and values in the model's dtype, written into `out` if given.

        Without `out`, `raw` returns views of `data`: read-only, and valid only as long as it is.
        """
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Elements as they are, in the model's dtype (`raw`) or rounded to another."""

    name: str
    stored: torch.dtype | None = None  # None: the model's

    def num_bytes(self, shape: Shape) -> int:
        stored = self.stored or DTYPES[shape.dtype]
        return 2 * _elements(shape) * stored.itemsize

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        stored = out.view(self.stored or kv.k.dtype).view(2, *kv.k.shape)  # [2, T, H, D]
        stored[0].copy_(kv.k)
        stored[1].copy_(kv.v)
        if self.stored == torch.float16 and not bool(stored.isfinite().all()):
            raise ValueError("values beyond ±65504 or not finite do not fit fp16; use raw or bf16")

    def decode(self, data: Tensor, shape: Shape, out: LayerKV | None = None) -> LayerKV:
        model = DTYPES[shape.dtype]
        stored = data.view(self.stored or model)
        k, v = stored.view(2, shape.num_tokens, shape.num_kv_heads, shape.head_dim)
        if out is None:
            return LayerKV(k.to(model), v.to(model))  # no copy where the dtype is the same
        out.k.copy_(k)
        out.v.copy_(v)
        return out


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integer codes with an fp16 (low, scale) per group: int8, int4."""

    name: str
    bits: int
    group: int = 64

    def num_bytes(self, shape: Shape) -> int:
        return sum(_sizes(shape, self.bits, self.group, params=2))

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        pieces: list[Tensor] = []
        for x, axis in zip(kv, (KEY_AXIS, VALUE_AXIS), strict=True):
            groups = quantise(x, bits=self.bits, group=self.group, axis=axis)
            assert groups.low is not None
            pieces += [groups.q, groups.scale, groups.low]
        _fill(out, pieces)

    def decode(self, data: Tensor, shape: Shape, out: LayerKV | None = None) -> LayerKV:
        out = out or _empty(shape, data.device)
        parts = _cut(data, _sizes(shape, self.bits, self.group, params=2))
        for x, axis in zip(out, (KEY_AXIS, VALUE_AXIS), strict=True):
            groups = _groups(parts, shape, self.bits, self.group, axis, has_low=True)
            dequantise(groups, bits=self.bits, group=self.group, axis=axis, out=x)
        return out


@dataclass(frozen=True, slots=True)
class GroupedFp8:
    """e4m3 codes with an fp16 scale per group."""

    name: str = "fp8"
    group: int = 64

    def num_bytes(self, shape: Shape) -> int:
        return sum(_sizes(shape, 8, self.group, params=1))

    def encode(self, kv: LayerKV, out: Tensor) -> None:
        pieces: list[Tensor] = []
        for x, axis in zip(kv, (KEY_AXIS, VALUE_AXIS), strict=True):
            groups = quantise_fp8(x, group=self.group, axis=axis)
            pieces += [groups.q, groups.scale]
        _fill(out, pieces)

    def decode(self, data: Tensor, shape: Shape, out: LayerKV | None = None) -> LayerKV:
        out = out or _empty(shape, data.device)
        parts = _cut(data, _sizes(shape, 8, self.group, params=1))
        for x, axis in zip(out, (KEY_AXIS, VALUE_AXIS), strict=True):
            groups = _groups(parts, shape, 8, self.group, axis, has_low=False)
            dequantise_fp8(groups, group=self.group, axis=axis, out=x)
        return out


CODECS: dict[str, Codec] = {
    "raw": Plain("raw"),
    "fp16": Plain("fp16", torch.float16),
    "bf16": Plain("bf16", torch.bfloat16),
    "int8": Grouped("int8", bits=8),
    "fp8": GroupedFp8(),
    "int4": Grouped("int4", bits=4),
}


def open_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ConfigError(f"no codec {name!r}; known: {', '.join(CODECS)}")
    return CODECS[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name a header and a key carry. ConfigError for a dtype no model of ours has."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(f"chunk KV of {dtype} is not supported; known: {', '.join(DTYPES)}")


def _elements(shape: Shape) -> int:
    return shape.num_tokens * shape.num_kv_heads * shape.head_dim


@lru_cache(maxsize=1024)  # asked for every layer of every chunk
def _sizes(shape: Shape, bits: int, group: int, params: int) -> tuple[int, ...]:
    """Bytes of each piece: K codes, K parameters, V codes, V parameters."""
    if shape.head_dim * bits % 8:
        raise ValueError(f"{bits} bits need an even head dim, not {shape.head_dim}; use int8")
    codes = _elements(shape) * bits // 8
    k_params = 2 * num_groups(shape.num_tokens, group) * shape.num_kv_heads * shape.head_dim
    v_params = 2 * shape.num_tokens * shape.num_kv_heads * num_groups(shape.head_dim, group)
    return (codes, *[k_params] * params, codes, *[v_params] * params)


def _cut(data: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    return iter(data[: sum(sizes)].split_with_sizes(sizes))


def _fill(out: Tensor, pieces: list[Tensor]) -> None:
    sizes = [p.numel() * p.element_size() for p in pieces]
    for part, piece in zip(_cut(out, sizes), pieces, strict=True):
        part.copy_(piece.contiguous().view(torch.uint8).flatten())


def _groups(
    parts: Iterator[Tensor], shape: Shape, bits: int, group: int, axis: int, *, has_low: bool
) -> Groups:
    """The next pieces of a layer as the kernels want them."""
    T, H, D = shape.num_tokens, shape.num_kv_heads, shape.head_dim
    n = num_groups(T if axis == 0 else D, group)
    params = (n, H, D) if axis == 0 else (T, H, n)
    q = next(parts).view(T, H, D * bits // 8)
    scale = _halves(next(parts)).view(params)
    low = _halves(next(parts)).view(params) if has_low else None
    return Groups(q, scale, low)


def _halves(part: Tensor) -> Tensor:
    """Bytes as fp16. Behind an odd number of int4 codes they lie between two halves: copied."""
    return (part.clone() if part.storage_offset() % 2 else part).view(torch.float16)


def _empty(shape: Shape, device: torch.device) -> LayerKV:
    size = (shape.num_tokens, shape.num_kv_heads, shape.head_dim)
    dtype = DTYPES[shape.dtype]
    return LayerKV(
        torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)
    )
