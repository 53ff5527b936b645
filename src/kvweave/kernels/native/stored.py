"""Stored chunks in C: decoded, turned and laid in one call, moved in two, and fresh rows put among
them in one.

The twins of the codec `int8` with rope.py, of place.mean_changes, shift.shift_runs and place.place,
for float32 on a CPU.

Shapes: N tokens of all chunks, R fresh rows, C of them chosen, M chunks, T rows of the request's
KV, Hk KV heads, D head dim, r rotary dims.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.native.fields import (
    ChangesFields,
    LayingFields,
    PlacingFields,
    ShiftingFields,
    StoredFields,
)
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.types import Owners


class StoredCodes(NamedTuple):
    """One layer of one chunk in 8-bit codes (kv/format/codec.py), and where it goes."""

    data: Tensor  # uint8
    num_tokens: int
    row: int  # of the request's KV, for its first token


def lay_chunks(
    library: CompiledLibrary,
    chunks: Sequence[StoredCodes],
    group: int,
    turn: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
) -> None:
    """Decode chunks into rows of keys, turned, and values [T, Hk, D]. Parameters are of `group`
    values; `turn` are the cosines and sines [N, 1, r/2] of all tokens, chunk by chunk."""
    heads, dim = keys.shape[1:]
    cos, sin = turn
    num = sum(chunk.num_tokens for chunk in chunks)
    _check(cos, sin, num, dim)
    _check_kv(keys, values)
    fields, nth = (StoredFields * len(chunks))(), 0
    for i, (data, tokens, row) in enumerate(chunks):
        params = 4 * heads * (-(-tokens // group) * dim + tokens * -(-dim // group))
        if data.dtype != torch.uint8 or len(data) < 2 * tokens * heads * dim + params:
            raise ValueError(f"{tokens} tokens of {heads} x {dim} do not fit {len(data)} bytes")
        if not 0 <= row <= row + tokens <= len(keys):
            raise ValueError(f"rows {row} to {row + tokens} are not among {len(keys)}")
        fields[i] = StoredFields(data.data_ptr(), tokens, row, nth)
        nth += tokens
    given = LayingFields(
        ctypes.addressof(fields), len(chunks), group, heads, dim, cos.shape[-1], cos.data_ptr(),
        sin.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0),
    )  # fmt: skip
    library.lay_chunks(given, torch.get_num_threads())


class FreshRows(NamedTuple):
    """Rows that were computed and come to some places."""

    k: Tensor  # [R, Hk, D] before RoPE
    v: Tensor  # [R, Hk, D]
    rows: Tensor  # [C] int64: which of them
    at: Tensor  # [C] int64: their rows of the request's KV


def sum_changes(
    library: CompiledLibrary,
    fresh: FreshRows,
    turn: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    owners: Owners,
) -> Tensor:
    """Compute kvweave.kernels.place.mean_changes: [2, M, Hk, D]."""
    k, v, rows, at = fresh
    heads, dim = keys.shape[1:]
    cos, sin = turn
    _check(cos, sin, len(rows), dim)
    _check_kv(keys, values)
    bounds, weights = owners
    _check_fresh(fresh, keys, owners)
    by = torch.empty(2, len(weights), heads, dim)
    if not len(rows) or not len(weights):
        return by.zero_()
    given = ChangesFields(
        k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        rows.data_ptr(), at.data_ptr(), cos.data_ptr(), sin.data_ptr(), keys.data_ptr(),
        values.data_ptr(), keys.stride(0), values.stride(0), bounds.data_ptr(),
        weights.data_ptr(), by.data_ptr(), len(weights), heads, dim, cos.shape[-1],
    )  # fmt: skip
    library.sum_changes(given, torch.get_num_threads())
    return by


def _check_fresh(fresh: FreshRows, keys: Tensor, owners: Owners) -> None:
    """Raise ValueError unless fresh rows, their places and their owners fit each other."""
    k, v, rows, at = fresh
    bounds, weights = owners
    if k.shape[1:] != keys.shape[1:] or v.shape != k.shape or len(at) != len(rows):
        raise ValueError(f"{k.shape}, {v.shape} do not come to {len(at)} rows of {keys.shape}")
    if any(x.dtype != torch.int64 or not x.is_contiguous() for x in (rows, at)):
        raise ValueError("rows are int64, and lie side by side")
    if len(bounds) != len(weights) + 1 or bounds.dtype != torch.int32:
        raise ValueError(f"{len(bounds)} bounds are not of {len(weights)} chunks")
    if len(rows) and len(weights):
        _check_places(fresh, keys, bounds)


def _check_places(fresh: FreshRows, keys: Tensor, bounds: Tensor) -> None:
    """Raise ValueError unless rows, places and bounds lie inside what they point into."""
    k, _, rows, at = fresh
    ends = torch.stack([*rows.aminmax(), *at.aminmax()]).tolist()
    edges = bounds[0], bounds[-1]
    if ends[0] < 0 or ends[1] >= len(k) or ends[2] < 0 or ends[3] >= len(keys):
        raise ValueError(f"rows {ends} are not among {len(k)} fresh and {len(keys)} held ones")
    if int(edges[0]) < 0 or int(edges[1]) > len(rows):
        raise ValueError(f"bounds up to {int(edges[1])} are not of {len(rows)} rows")


def shift_runs(
    library: CompiledLibrary,
    kv: tuple[Tensor, Tensor],
    by: tuple[Tensor, Tensor],
    runs: Tensor,
    turn: tuple[Tensor, Tensor],
) -> None:
    """Run kvweave.kernels.shift.shift_runs: `runs` [M, 2] int64 are the first row of every chunk
    and how many there are, `turn` the cosines and sines [N, 1, r/2] of all of them."""
    (keys, values), (by_k, by_v), (cos, sin) = kv, by, turn
    _check_kv(keys, values)
    _check(cos, sin, int(runs[:, 1].sum()), keys.shape[2])
    if by_k.shape != (len(runs), *keys.shape[1:]) or by_v.shape != by_k.shape:
        raise ValueError(f"{by_k.shape}, {by_v.shape} do not move {len(runs)} chunks")
    if int(runs[:, 0].min()) < 0 or int(runs.sum(1).max()) > len(keys):
        raise ValueError(f"rows of {runs.tolist()} are not among {len(keys)}")
    by_k, by_v, runs = by_k.contiguous(), by_v.contiguous(), runs.contiguous()
    given = ShiftingFields(
        runs.data_ptr(), cos.data_ptr(), sin.data_ptr(), keys.data_ptr(), values.data_ptr(),
        keys.stride(0), values.stride(0), by_k.data_ptr(), by_v.data_ptr(), len(runs),
        *keys.shape[1:], cos.shape[-1],
    )  # fmt: skip
    library.shift_runs(given, torch.get_num_threads())


def place_rows(
    library: CompiledLibrary,
    qkv: tuple[Tensor, Tensor, Tensor],
    turn: tuple[Tensor, Tensor],
    at: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Run kvweave.kernels.place.place: queries turned, [R, Hq, D]."""
    (q, k, v), (cos, sin) = qkv, turn
    num, q_heads, dim = q.shape
    _check(cos, sin, num, dim)
    _check_kv(keys, values)
    if k.shape != (num, *keys.shape[1:]) or v.shape != k.shape or dim != keys.shape[2]:
        raise ValueError(f"{q.shape}, {k.shape}, {v.shape} do not go among {keys.shape}")
    if at.shape != (num,) or at.dtype != torch.int64 or not at.is_contiguous():
        raise ValueError(f"{num} rows do not go to places of {at.shape}")
    turned = torch.empty(q.shape)
    if not num:
        return turned
    first, last = (int(end) for end in at.aminmax())
    if first < 0 or last >= len(keys):
        raise ValueError(f"places {first} to {last} are not among {len(keys)}")
    given = PlacingFields(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), q.stride(1), k.stride(0),
        k.stride(1), v.stride(0), v.stride(1), cos.data_ptr(), sin.data_ptr(), at.data_ptr(),
        turned.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0),
        num, q_heads, *keys.shape[1:], cos.shape[-1],
    )  # fmt: skip
    library.place_rows(given, torch.get_num_threads())
    return turned


def _check(cos: Tensor, sin: Tensor, num: int, dim: int) -> None:
    """An address says nothing of what lies there: what C is given is checked here."""
    if cos.shape != sin.shape or cos.shape[:2] != (num, 1) or 2 * cos.shape[-1] > dim:
        raise ValueError(f"angles of {cos.shape} do not turn {num} rows of {dim}")
    if not (cos.is_contiguous() and sin.is_contiguous() and cos.dtype == torch.float32):
        raise ValueError("angles are float32, and lie side by side")


def _check_kv(keys: Tensor, values: Tensor) -> None:
    if keys.shape != values.shape or keys.dtype != torch.float32 or values.dtype != keys.dtype:
        raise ValueError(f"keys of {keys.shape} and values of {values.shape} are not alike")
    if not has_whole_rows(keys, values):
        raise ValueError("heads and dims of keys and values lie side by side")


def has_whole_rows(*tensors: Tensor) -> bool:
    """Whether heads and dims of [T, Hk, D] lie side by side."""
    return all(x.stride()[1:] == (x.shape[2], 1) for x in tensors)
