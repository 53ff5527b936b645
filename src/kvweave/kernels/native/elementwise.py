"""What lies between the products, in C: the twins of norm.py, gate.py and rope.py, for float32 on a
CPU.

A call takes a few microseconds where PyTorch's operators take that for each of their steps: a
decode step has hundreds of them.

Shapes: R rows, H heads, D head dim, E hidden dim, I inner dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.native.library import CompiledLibrary


def rms_norm(
    library: CompiledLibrary, x: Tensor, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    """As kvweave.kernels.norm.rms_norm, of x [R, E] whose dims lie side by side."""
    y = torch.empty(x.shape) if out is None else out
    if y.shape != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(f"a weight of {weight.shape} and {y.shape} are not for rows of {x.shape}")
    library.rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr(), y.stride(0), *x.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def silu_mul(library: CompiledLibrary, gate_up: Tensor) -> Tensor:
    """As kvweave.kernels.gate.silu_mul, of [R, 2 I] whose dims lie side by side."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    threads = torch.get_num_threads()
    library.silu_mul(gate_up.data_ptr(), gate_up.stride(0), num_rows, inner, threads)
    return gate_up[:, :inner]


def rotate(library: CompiledLibrary, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
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
    library.rotate(
        x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr(),
        0 if per_row == 1 else cos.stride(0), 0 if per_head == 1 else cos.stride(1),
        out.data_ptr(), out.stride(0), out.stride(1),
        num_rows, num_heads, dim, half, torch.get_num_threads(),
    )  # fmt: skip
    return out
