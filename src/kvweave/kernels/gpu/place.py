"""The kernels of kernels/place.py. One program: one row, all heads of one kind."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.rope import Angles
from kvweave.kernels.types import Owners

CHOSEN = 16  # rows of a chunk that are looked at together


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, x_head, out_head, cos, sin,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK_H)[:, None]
    j = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (h < HEADS) & (j < HALF)
    x1 = tl.load(x_ptr + h * x_head + j, inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + h * x_head + j + HALF, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + h * out_head + j, x1 * cos - x2 * sin, inside)
    tl.store(out_ptr + h * out_head + j + HALF, x2 * cos + x1 * sin, inside)
    if D > 2 * HALF:
        d = tl.arange(0, BLOCK_D)[None, :]
        rest = (h < HEADS) & (d >= 2 * HALF) & (d < D)
        tl.store(out_ptr + h * out_head + d, tl.load(x_ptr + h * x_head + d, rest), rest)


@quick
@triton.jit(do_not_specialize=["rows_ptr"])
def _place_rows(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, rows_ptr, out_ptr, keys_ptr, values_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, keys_row, keys_head, values_row, values_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + n * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + n * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        _turn_heads(
            q_ptr + n * q_row, out_ptr + n * (HQ * D), q_head, D, cos, sin,
            HQ, D, HALF, BLOCK_HQ, BLOCK_HALF, BLOCK_D,
        )  # fmt: skip
    else:
        row = tl.load(rows_ptr + n).to(tl.int64)
        _turn_heads(
            k_ptr + n * k_row, keys_ptr + row * keys_row, k_head, keys_head, cos, sin,
            HK, D, HALF, BLOCK_HK, BLOCK_HALF, BLOCK_D,
        )  # fmt: skip
        h = tl.arange(0, BLOCK_HK)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        inside = (h < HK) & (d < D)
        v = tl.load(v_ptr + n * v_row + h * v_head + d, inside, other=0.0)
        tl.store(values_ptr + row * values_row + h * values_head + d, v, inside)


def place_rows(
    q: Tensor, k: Tensor, v: Tensor, turn: Angles, rows: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """As kernels/place.place."""
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    half, kv_heads = turn.cos.shape[-1], k.shape[1]
    _place_rows[(num_rows, 2)](
        q, k, v, turn.cos.contiguous(), turn.sin.contiguous(), rows, out, keys, values,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2],
        HQ=num_heads, HK=kv_heads, D=head_dim, HALF=half,
        BLOCK_HQ=triton.next_power_of_2(num_heads), BLOCK_HK=triton.next_power_of_2(kv_heads),
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out


@quick
@triton.jit(do_not_specialize=["rows_ptr", "at_ptr", "bounds_ptr", "weights_ptr", "num_chunks"])
def _mean_change_rows(
    k_ptr, v_ptr, rows_ptr, cos_ptr, sin_ptr, at_ptr, bounds_ptr, weights_ptr,
    keys_ptr, values_ptr, out_ptr, num_chunks,
    k_row, k_head, v_row, v_head, keys_row, keys_head, values_row, values_head,
    HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one head of the chosen rows of one chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(bounds_ptr + chunk), tl.load(bounds_ptr + chunk + 1)
    weight = tl.load(weights_ptr + chunk)
    j = tl.arange(0, BLOCK_HALF)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    sum1 = tl.zeros([BLOCK_HALF], tl.float32)
    sum2 = tl.zeros([BLOCK_HALF], tl.float32)
    sum_rest = tl.zeros([BLOCK_D], tl.float32)
    sum_v = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_R):
        n = start + tl.arange(0, BLOCK_R)
        live = n < last
        row = tl.load(rows_ptr + n, live, other=0).to(tl.int64)[:, None]
        at = tl.load(at_ptr + n, live, other=0).to(tl.int64)[:, None]
        in_half = live[:, None] & (j < HALF)
        inside = live[:, None] & (d < D)
        turn = n.to(tl.int64)[:, None] * HALF + j
        cos = tl.load(cos_ptr + turn, in_half, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn, in_half, other=0.0).to(tl.float32)
        scale = cos * cos + sin * sin
        k_at = k_ptr + row * k_row + head * k_head
        stored = keys_ptr + at * keys_row + head * keys_head
        x1 = tl.load(k_at + j, in_half, other=0.0).to(tl.float32)
        x2 = tl.load(k_at + j + HALF, in_half, other=0.0).to(tl.float32)
        a1 = x1 * cos - x2 * sin - tl.load(stored + j, in_half, other=0.0).to(tl.float32)
        a2 = x2 * cos + x1 * sin - tl.load(stored + j + HALF, in_half, other=0.0).to(tl.float32)
        sum1 += tl.sum((a1 * cos + a2 * sin) / scale, 0)
        sum2 += tl.sum((a2 * cos - a1 * sin) / scale, 0)
        if D > 2 * HALF:
            beyond = inside & (d >= 2 * HALF)
            fresh = tl.load(k_at + d, beyond, other=0.0).to(tl.float32)
            sum_rest += tl.sum(fresh - tl.load(stored + d, beyond, other=0.0).to(tl.float32), 0)
        fresh_v = tl.load(v_ptr + row * v_row + head * v_head + d, inside, other=0.0)
        old_v = tl.load(values_ptr + at * values_row + head * values_head + d, inside, other=0.0)
        sum_v += tl.sum(fresh_v.to(tl.float32) - old_v.to(tl.float32), 0)
    out_k = out_ptr + (chunk * HK + head) * D
    half = tl.arange(0, BLOCK_HALF)
    tl.store(out_k + half, sum1 * weight, half < HALF)
    tl.store(out_k + half + HALF, sum2 * weight, half < HALF)
    all_ = tl.arange(0, BLOCK_D)
    if D > 2 * HALF:
        tl.store(out_k + all_, sum_rest * weight, (all_ >= 2 * HALF) & (all_ < D))
    tl.store(out_k + num_chunks * HK * D + all_, sum_v * weight, all_ < D)


def mean_change_rows(
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    turn: Angles,
    at: Tensor,
    keys: Tensor,
    values: Tensor,
    owners: Owners,
) -> Tensor:
    """As kernels/place.mean_changes."""
    kv_heads, head_dim = keys.shape[1:]
    num, half = len(owners.weights), turn.cos.shape[-1]
    out = torch.empty(2, num, kv_heads, head_dim, dtype=torch.float32, device=k.device)
    if not num:
        return out
    _mean_change_rows[(num, kv_heads)](
        k, v, rows, turn.cos.contiguous(), turn.sin.contiguous(), at, owners.bounds, owners.weights,
        keys, values, out, num,
        *k.stride()[:2], *v.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        HK=kv_heads, D=head_dim, HALF=half, BLOCK_R=CHOSEN,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out
