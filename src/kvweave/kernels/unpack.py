"""Chunk KV as it travelled, to keys and values in their places: decoded, turned and laid at once.

A layer of many chunks lies in one buffer of bytes, each chunk encoded by itself (see
kv/format/codec.py): keys, then values, plain or as group codes with fp16 parameters. Every token
finds its bytes through a table (where its chunk starts, its number in it, how long it is), so
chunks of any lengths take one launch. Keys are turned in float32 and rounded once. On a CPU
compiled kernels do the same for 8-bit codes (`lay_codes`); other codecs decode, `rope.py` turns.

Shapes: N stored tokens, T rows of the request's KV, Hk KV heads, D head dim, r rotary dims.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled, has_kernels
from kvweave.kernels.native.stored import StoredCodes, has_whole_rows, lay_chunks
from kvweave.kernels.rope import Angles
from kvweave.kernels.types import Packing, StoredRows


def unpack(
    data: Tensor,
    packing: Packing,
    rows: StoredRows,
    turn: Angles | None,
    out_k: Tensor,
    out_v: Tensor,
) -> None:
    """Write the tokens of `data` uint8 [n] into rows of out_k, out_v [T, Hk, D].

    `turn` [N, 1, r/2] turns the keys; None leaves them as stored.
    """
    if not len(rows.base):
        return
    if has_kernels(data) and _is_even(packing, out_k):
        from kvweave.kernels.gpu.unpack import unpack_rows

        unpack_rows(data, packing, rows, turn, out_k, out_v)
    else:
        unpack_reference(data, packing, rows, turn, out_k, out_v)


def unpack_reference(
    data: Tensor,
    packing: Packing,
    rows: StoredRows,
    turn: Angles | None,
    out_k: Tensor,
    out_v: Tensor,
) -> None:
    """The definition of `unpack`. Indexes every byte: for checking, not for speed."""
    heads, head_dim = out_k.shape[1:]
    k, v = (x.view(-1, heads, head_dim) for x in _decode(data, packing, rows, heads, head_dim))
    if turn is not None:
        cos, sin = turn.cos.float(), turn.sin.float()
        half = cos.shape[-1]
        k1, k2, rest = torch.split(k, [half, half, head_dim - 2 * half], dim=-1)
        k = torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin, rest), dim=-1)
    out_k[rows.row] = k.to(out_k.dtype)
    out_v[rows.row] = v.to(out_v.dtype)


def _decode(
    data: Tensor, packing: Packing, rows: StoredRows, heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of every token, float32 [N, Hk * D] each."""
    base, index, length = (x[:, None] for x in rows[:3])
    width = heads * head_dim
    if packing.kind == "plain":
        size = packing.stored.itemsize
        at = torch.arange(width, device=data.device) * size
        first = base + index * width * size + at
        return (
            _elements(data, first, packing.stored),
            _elements(data, first + length * width * size, packing.stored),
        )
    channel = torch.arange(width, device=data.device)  # [Hk * D]
    row_bytes, params = width * packing.bits // 8, 1 if packing.kind == "fp8" else 2
    key_groups = -(-length // packing.group)
    value_groups = -(-head_dim // packing.group)
    k_params = base + length * row_bytes
    v_codes = k_params + 2 * params * key_groups * width
    v_params = v_codes + length * row_bytes
    of_key = (index // packing.group) * width + channel
    group_of = channel // head_dim * value_groups + channel % head_dim // packing.group
    of_value = index * heads * value_groups + group_of
    out: list[Tensor] = []
    for codes, start, nth, apart in (
        (base, k_params, of_key, key_groups * width),
        (v_codes, v_params, of_value, length * heads * value_groups),
    ):
        x = _codes(data, packing, codes + index * row_bytes, channel, head_dim)
        x = x * _elements(data, start + 2 * nth, torch.float16)
        if params == 2:
            x = x + _elements(data, start + 2 * (apart + nth), torch.float16)
        out.append(x)
    return out[0], out[1]


def _codes(data: Tensor, packing: Packing, first: Tensor, channel: Tensor, dim: int) -> Tensor:
    if packing.kind == "fp8":
        return data[first + channel].view(torch.float8_e4m3fn).float()
    if packing.bits == 8:
        return data[first + channel].float()
    half = dim // 2  # channels d and d + D/2 share a byte
    head, within = channel // dim, channel % dim
    both = data[first + head * half + within % half]
    return torch.where(within < half, both & 15, both >> 4).float()


def _elements(data: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements that begin at bytes `at`, as float32."""
    size = dtype.itemsize
    span = at[..., None] + torch.arange(size, device=data.device)
    return data[span].view(dtype)[..., 0].float()


def _is_even(packing: Packing, out: Tensor) -> bool:
    """Whether parameters lie on whole halves, which a kernel can load."""
    heads, head_dim = out.shape[1:]
    return packing.kind == "plain" or heads * head_dim * packing.bits // 8 % 2 == 0


__all__ = ["StoredCodes", "can_lay_codes", "lay_codes", "takes_codes"]


def can_lay_codes(head_dim: int) -> bool:
    """Whether there are kernels for heads of this size: then for float32 on a CPU."""
    library = find_compiled()
    return library is not None and head_dim <= library.most_dim


def takes_codes(keys: Tensor, values: Tensor) -> bool:
    """Whether they can be laid into this memory [T, Hk, D]."""
    return find_compiled(keys, values) is not None and has_whole_rows(keys, values)


def lay_codes(
    chunks: Sequence[StoredCodes], group: int, turn: Angles, keys: Tensor, values: Tensor
) -> None:
    """Write chunks into rows of keys, turned, and values [T, Hk, D]. `turn` [N, 1, r/2] is of all
    tokens, chunk by chunk; `group` values share parameters. Only where `takes_codes`."""
    library = find_compiled(keys, values)
    assert library is not None, "asked without kernels, or for another dtype than float32"
    lay_chunks(library, chunks, group, turn, keys, values)
