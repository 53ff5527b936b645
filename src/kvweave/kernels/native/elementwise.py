"""What lies between the products, in C: the twins of norm.py, gate.py, rope.py and of one row of
attention.py, for float32 on a CPU.

A call takes a few microseconds where PyTorch's operators take that for each of their steps: a
decode step has hundreds of them.

Shapes: R rows, H heads, D head dim, N keys, E hidden dim, I inner dims.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from kvweave.kernels.native.library import Library


class _Strides(ctypes.Structure):
    """`Strides` of rows.c."""

    _fields_ = (("row", ctypes.c_int64), ("head", ctypes.c_int64))


@lru_cache(maxsize=256)  # a few layouts per model, again and again
def _strides(row: int, head: int) -> tuple[int, _Strides]:
    """An address, and what must live as long as it is used."""
    made = _Strides(row, head)
    return ctypes.addressof(made), made


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    """As kvweave.kernels.norm.rms_norm, of x [R, E] whose dims lie side by side."""
    y = torch.empty(x.shape) if out is None else out
    if y.shape != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(f"a weight of {weight.shape} and {y.shape} are not for rows of {x.shape}")
    library.rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr(), y.stride(0), *x.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def silu_mul(library: Library, gate_up: Tensor) -> Tensor:
    """As kvweave.kernels.gate.silu_mul, of [R, 2 I] whose dims lie side by side."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    threads = torch.get_num_threads()
    library.silu_mul(gate_up.data_ptr(), gate_up.stride(0), num_rows, inner, threads)
    return gate_up[:, :inner]


def rotate(library: Library, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """As kvweave.kernels.rope.rotate; dims of x [R, H, D], cos, sin and out lie side by side."""
    num_rows, num_heads, dim = x.shape
    per_row, per_head, half = cos.shape
    if (
        out.shape != x.shape
        or cos.shape != sin.shape
        or cos.stride() != sin.stride()
        or per_row not in (1, num_rows)
        or per_head not in (1, num_heads)
        or 2 * half > dim
    ):
        raise ValueError(f"angles of {cos.shape} do not turn {x.shape} into {out.shape}")
    turns = _strides(
        0 if per_row == 1 else cos.stride(0), 0 if per_head == 1 else cos.stride(1)
    )
    library.rotate(
        x.data_ptr(), _strides(x.stride(0), x.stride(1))[0], cos.data_ptr(), sin.data_ptr(),
        turns[0], out.data_ptr(), _strides(out.stride(0), out.stride(1))[0],
        num_rows, num_heads, dim, half, torch.get_num_threads(),
    )  # fmt: skip
    return out


def attend_row(library: Library, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[1, Hq, D]: one row of queries over all of keys and values [N, Hk, D]."""
    num_keys, kv_heads, dim = keys.shape
    if values.shape != keys.shape or q.shape[2] != dim or q.shape[1] % kv_heads or len(q) != 1:
        raise ValueError(f"{q.shape} is no row over keys of {keys.shape}, values of {values.shape}")
    q = q.contiguous()
    out = torch.empty(q.shape)
    failed = library.attend_row(
        q.data_ptr(), keys.data_ptr(), _strides(keys.stride(0), keys.stride(1))[0],
        values.data_ptr(), _strides(values.stride(0), values.stride(1))[0], out.data_ptr(),
        num_keys, kv_heads, q.shape[1] // kv_heads, dim, scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for attention over {num_keys} keys")
    return out
