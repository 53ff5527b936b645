"""Column sums of attention in two passes, without the matrix: the log-sum-exp of every row, then
the probabilities of a block of columns, reduced over the rows as they come.

Rows may see a part of the columns only (`limits`), in which case they ascend: a block of columns
then skips the rows in front of it.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
BLOCK_M, BLOCK_N = 64, 64
BUSY = 512  # programs that keep a large chip busy


@triton.jit
def _row_lse(
    q_ptr, k_ptr, limits_ptr, out_ptr, num_rows, num_columns, per_split, scale,
    q_row, q_head, k_row, k_head,
    G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LIMITED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [splits, HQ, R]: log2-sum-exp2 of a row over one split of the columns."""
    head, split = tl.program_id(1), tl.program_id(2)
    r = tl.program_id(0) * M + tl.arange(0, M)
    live = r < num_rows
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + r.to(tl.int64)[:, None] * q_row + head * q_head + d[None, :]
    q = tl.load(q_at, live[:, None] & (d < D)[None, :], other=0.0)
    first = split * per_split
    last = tl.minimum(first + per_split, num_columns)
    if LIMITED:
        limit = tl.load(limits_ptr + r, live, other=0)
        last = tl.minimum(last, tl.max(limit, 0))
    m = tl.full([M], -1.0e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    for start in range(first, last, N):
        n = start + tl.arange(0, N)
        k_at = k_ptr + n.to(tl.int64)[:, None] * k_row + head // G * k_head + d[None, :]
        k = tl.load(k_at, (n < num_columns)[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (n < last)[None, :]
        if LIMITED:
            seen = seen & (n[None, :] < limit[:, None])
        s = tl.where(seen, s, -1.0e30)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(seen, tl.exp2(s - m_new[:, None]), 0.0)
        total = total * tl.exp2(m - m_new) + tl.sum(p, 1)
        m = m_new
    # a split that a row sees nothing of weighs nothing
    lse = tl.where(total > 0.0, m + tl.log2(tl.maximum(total, 1.0e-37)), -1.0e30)
    out_at = (split.to(tl.int64) * HQ + head) * num_rows + r
    tl.store(out_ptr + out_at, lse, live)


@triton.jit
def _column_reduce(
    q_ptr, k_ptr, limits_ptr, lse_ptr, out_ptr, num_rows, num_columns, scale,
    q_row, q_head, k_row, k_head,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LIMITED: tl.constexpr, LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [HQ, N]: sum or maximum over the rows of exp2(score - lse)."""
    head = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    d = tl.arange(0, BLOCK_D)
    k_at = k_ptr + n.to(tl.int64)[:, None] * k_row + head // G * k_head + d[None, :]
    k = tl.load(k_at, (n < num_columns)[:, None] & (d < D)[None, :], other=0.0)
    best = tl.zeros([N], tl.float32)
    for start in range(0, num_rows, M):
        r = start + tl.arange(0, M)
        live = r < num_rows
        some = True
        if LIMITED:
            limit = tl.load(limits_ptr + r, live, other=0)
            some = tl.max(limit, 0) > tl.program_id(0) * N
        if some:
            q_at = q_ptr + r.to(tl.int64)[:, None] * q_row + head * q_head + d[None, :]
            q = tl.load(q_at, live[:, None] & (d < D)[None, :], other=0.0)
            lse = tl.load(lse_ptr + head * num_rows + r, live, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = live[:, None]
            if LIMITED:
                seen = seen & (n[None, :] < limit[:, None])
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            best = tl.maximum(best, tl.max(p, 0)) if LARGEST else best + tl.sum(p, 0)
    tl.store(out_ptr + head.to(tl.int64) * num_columns + n, best, n < num_columns)


def row_lse(q: Tensor, keys: Tensor, limits: Tensor | None = None) -> Tensor:
    """log2 of the softmax's denominator [Hq, R] of rows q [R, Hq, D] over keys [N, Hk, D]."""
    rows, heads, head_dim = q.shape
    blocks = triton.cdiv(rows, BLOCK_M) * heads
    steps = triton.cdiv(len(keys), BLOCK_N)
    splits = max(1, min(triton.cdiv(BUSY, blocks), triton.cdiv(steps, 4)))
    per_split = triton.cdiv(steps, splits) * BLOCK_N
    lse = torch.empty(splits, heads, rows, dtype=torch.float32, device=q.device)
    _row_lse[(triton.cdiv(rows, BLOCK_M), heads, splits)](
        q, keys, q if limits is None else limits, lse, rows, len(keys), per_split,
        head_dim**-0.5 * LOG2_E, *q.stride()[:2], *keys.stride()[:2],
        G=heads // keys.shape[1], HQ=heads, D=head_dim, BLOCK_D=_padded(head_dim),
        M=BLOCK_M, N=BLOCK_N, LIMITED=limits is not None, PRECISION=_precision(q),
    )  # fmt: skip
    if splits == 1:
        return lse[0]
    return (lse / LOG2_E).logsumexp(0) * LOG2_E


def column_reduce(
    q: Tensor,
    keys: Tensor,
    lse: Tensor,
    rows: Literal["sum", "max"],
    limits: Tensor | None = None,
) -> Tensor:
    """[Hq, N] float32: what each key gets of rows whose `lse` [Hq, R] is known."""
    num_rows, heads, head_dim = q.shape
    out = torch.empty(heads, len(keys), dtype=torch.float32, device=q.device)
    _column_reduce[(triton.cdiv(len(keys), BLOCK_N), heads)](
        q, keys, q if limits is None else limits, lse.contiguous(), out, num_rows, len(keys),
        head_dim**-0.5 * LOG2_E, *q.stride()[:2], *keys.stride()[:2],
        G=heads // keys.shape[1], D=head_dim, BLOCK_D=_padded(head_dim), M=BLOCK_M, N=BLOCK_N,
        LIMITED=limits is not None, LARGEST=rows == "max", PRECISION=_precision(q),
    )  # fmt: skip
    return out


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"
