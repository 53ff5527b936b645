"""The kernels of kernels/place.py and kernels/shift.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.rope import Angles
from kvweave.kernels.types import Owners, RowMoves

CHOSEN = 16  # rows of a chunk that are looked at together, by the mean of their changes


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
    """Run kernels/place.place."""
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
    """Run kernels/place.mean_changes."""
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


SHIFTED_ROWS = 8  # per program, all of their heads


@quick
@triton.jit(do_not_specialize=["chunk_ptr", "row_ptr", "num_rows"])
def _shift_rows(
    keys_ptr, values_ptr, by_k_ptr, by_v_ptr, chunk_ptr, row_ptr, cos_ptr, sin_ptr, num_rows,
    k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = n < num_rows
    chunk = tl.load(chunk_ptr + n, live, other=0)
    row = tl.load(row_ptr + n, live, other=0)
    j = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = live[:, None] & (j < HALF)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_row = live[:, None] & (d < D)
    beyond = in_row & (d >= 2 * HALF)
    at = n.to(tl.int64)[:, None] * HALF + j
    cos = tl.load(cos_ptr + at, in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, in_half, other=0.0).to(tl.float32)
    for head in range(HEADS):
        by = (chunk * (HEADS * D) + head * D)[:, None]
        x1 = tl.load(by_k_ptr + by + j, in_half, other=0.0)
        x2 = tl.load(by_k_ptr + by + j + HALF, in_half, other=0.0)
        k1 = keys_ptr + (row * k_row + head * k_head)[:, None] + j
        old1 = tl.load(k1, in_half, other=0.0).to(tl.float32)
        old2 = tl.load(k1 + HALF, in_half, other=0.0).to(tl.float32)
        tl.store(k1, old1 + x1 * cos - x2 * sin, in_half)
        tl.store(k1 + HALF, old2 + x2 * cos + x1 * sin, in_half)
        if D > 2 * HALF:
            rest = keys_ptr + (row * k_row + head * k_head)[:, None] + d
            old = tl.load(rest, beyond, other=0.0).to(tl.float32)
            tl.store(rest, old + tl.load(by_k_ptr + by + d, beyond, other=0.0), beyond)
        v = values_ptr + (row * v_row + head * v_head)[:, None] + d
        old_v = tl.load(v, in_row, other=0.0).to(tl.float32)
        tl.store(v, old_v + tl.load(by_v_ptr + by + d, in_row, other=0.0), in_row)


def shift_rows(
    keys: Tensor,
    values: Tensor,
    by_k: Tensor,
    by_v: Tensor,
    chunk: Tensor,
    row: Tensor,
    turn: Angles,
) -> None:
    """Run kernels/shift.shift."""
    heads, head_dim = keys.shape[1:]
    half = turn.cos.shape[-1]
    assert by_k.is_contiguous(), "one vector behind the other"
    assert by_v.is_contiguous(), "one vector behind the other"
    _shift_rows[(triton.cdiv(len(row), SHIFTED_ROWS),)](
        keys, values, by_k, by_v, chunk, row, turn.cos, turn.sin, len(row),
        *keys.stride()[:2], *values.stride()[:2],
        HEADS=heads, D=head_dim, HALF=half, BLOCK_R=SHIFTED_ROWS,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip


MOVED_ROWS = 16  # per program, one head of keys and values


@quick
@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "which_ptr", "num_rows"])
def _relocate_rows(
    keys_ptr, values_ptr, out_keys_ptr, out_values_ptr, source_ptr, target_ptr, which_ptr,
    cos_ptr, sin_ptr, num_rows,
    ROW: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(1)
    live = n < num_rows
    source = tl.load(source_ptr + n, live, other=0)[:, None]
    target = tl.load(target_ptr + n, live, other=0)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = live[:, None] & (d < D)
    v = tl.load(values_ptr + source * ROW + head * D + d, inside, other=0.0)
    tl.store(out_values_ptr + target * ROW + head * D + d, v, inside)
    from_k = keys_ptr + source * ROW + head * D
    to_k = out_keys_ptr + target * ROW + head * D
    if TURNS:
        j = tl.arange(0, BLOCK_HALF)[None, :]
        in_half = live[:, None] & (j < HALF)
        which = tl.load(which_ptr + n, live, other=0)[:, None]
        cos = tl.load(cos_ptr + which * HALF + j, in_half, other=0.0)
        sin = tl.load(sin_ptr + which * HALF + j, in_half, other=0.0)
        k1 = tl.load(from_k + j, in_half, other=0.0).to(tl.float32)
        k2 = tl.load(from_k + j + HALF, in_half, other=0.0).to(tl.float32)
        tl.store(to_k + j, k1 * cos - k2 * sin, in_half)
        tl.store(to_k + j + HALF, k2 * cos + k1 * sin, in_half)
        if D > 2 * HALF:
            rest = inside & (d >= 2 * HALF)
            tl.store(to_k + d, tl.load(from_k + d, rest, other=0.0), rest)
    else:
        tl.store(to_k + d, tl.load(from_k + d, inside, other=0.0), inside)


def relocate_rows(
    keys: Tensor,
    values: Tensor,
    moves: RowMoves,
    turn: Angles | None,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Run kernels/place.relocate in memory without gaps: a launch of few arguments takes the
    host less time, and there are two per layer."""
    _, heads, head_dim = keys.shape
    source, target, which = moves
    num_rows = source.shape[0]
    half = head_dim // 2 if turn is None else turn.cos.shape[-1]
    cos, sin = (source, source) if turn is None else (turn.cos, turn.sin)
    _relocate_rows[(-(-num_rows // MOVED_ROWS), heads)](
        keys, values, out_keys, out_values, source, target, source if which is None else which,
        cos, sin, num_rows, ROW=heads * head_dim,
        D=head_dim, HALF=half, TURNS=turn is not None, BLOCK_R=MOVED_ROWS,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
