"""What stands between the products of a layer, each in one pass over its memory.

RMS norm, the gate of the MLP, the rotation of queries and keys: in float32 inside, and rounded
where their definitions round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(
    x_ptr, weight_ptr, out_ptr, heads, x_row, x_head, out_row, out_head, eps,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    x_at = x_ptr + row // heads * x_row + row % heads * x_head
    x = tl.load(x_at + e, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    y = (x * scale).to(out_ptr.dtype.element_ty)
    w = tl.load(weight_ptr + e, inside, other=0.0)
    out_at = out_ptr + row // heads * out_row + row % heads * out_head
    tl.store(out_at + e, (y.to(tl.float32) * w.to(tl.float32)), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """kernels/norm.rms_norm for x [R, E] or [R, H, E]; the last axis has stride 1.

    A program has read its row before it writes it: `out` may be x.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    heads = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(x.shape[-1])
    _norm[(x.shape[0] * heads,)](
        x, weight, out, heads, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
        out.stride(0), out.stride(1) if out.dim() == 3 else 0, eps,
        E=x.shape[-1], BLOCK_E=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul(x_ptr, x_row, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0).to(tl.int64) * x_row + i
    gate = tl.load(at, i < I, other=0.0).to(tl.float32)
    up = tl.load(at + I, i < I, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(at, gate * up, i < I)


def silu_mul(gate_up: Tensor) -> Tensor:
    """kernels/gate.silu_mul: overwrites the first half of gate_up [R, 2 I] and returns it."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    block = min(2048, triton.next_power_of_2(inner))
    if rows:
        _silu_mul[(rows, triton.cdiv(inner, block))](
            gate_up, gate_up.stride(0), I=inner, BLOCK=block, num_warps=8
        )
    return gate_up[:, :inner]


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads,
    x_row, x_head, out_row, out_head,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + row * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
    inside = (h < heads)[:, None] & (j < HALF)[None, :]
    x_at = x_ptr + row * x_row + h[:, None] * x_head
    out_at = out_ptr + row * out_row + h[:, None] * out_head
    x1 = tl.load(x_at + j[None, :], inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + HALF + j[None, :], inside, other=0.0).to(tl.float32)
    tl.store(out_at + j[None, :], x1 * cos - x2 * sin, inside)
    tl.store(out_at + HALF + j[None, :], x2 * cos + x1 * sin, inside)
    if D > 2 * HALF:
        d = tl.arange(0, BLOCK_D)
        rest = (h < heads)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
        tl.store(out_at + d[None, :], tl.load(x_at + d[None, :], rest, other=0.0), rest)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """kernels/rope.rotate: x [R, H, D] by cos, sin [R, 1, r/2] into out [R, H, D]."""
    rows, heads, head_dim = x.shape
    if not x.numel():
        return out
    half = cos.shape[-1]
    block_h = min(8, triton.next_power_of_2(heads))
    _rotate[(rows, triton.cdiv(heads, block_h))](
        x, cos.contiguous(), sin.contiguous(), out, heads,
        *x.stride()[:2], *out.stride()[:2],
        D=head_dim, HALF=half, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_H=block_h, num_warps=2,
    )  # fmt: skip
    return out
