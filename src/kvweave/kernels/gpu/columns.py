"""Column sums of attention in two passes, without the matrix: the log-sum-exp of every row, then
the probabilities of a block of columns, reduced over the rows as they come.

Rows may see a part of the columns only (`limits`), in which case they ascend: a block of columns
then skips the rows in front of it.

Several layers take one launch of each kernel: their queries lie behind each other, and a table
says how far the keys of each lie from those of the first.

Shapes: S layers, R rows, N columns, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.gpu.row_plan import to_device
from kvweave.kernels.gpu.tiles import LOG2_E, precision, tile_width

BLOCK_M, BLOCK_N = 64, 64
BUSY = 512  # programs that keep a large chip busy
FEW_SPLITS, MOST_SPLITS = 8, 32  # of the columns: merged at once by the kernel that reads them


@quick
@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _row_lse(
    q_ptr, k_ptr, apart_ptr, limits_ptr, out_ptr, num_rows, num_columns, per_split, scale,
    q_layer, q_row, q_head, k_row, k_head,
    G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LIMITED: tl.constexpr, APART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [splits, S * HQ, R]: log2-sum-exp2 of a row over one split of the columns."""
    layer, head, split = tl.program_id(1) // HQ, tl.program_id(1) % HQ, tl.program_id(2)
    q_ptr += layer.to(tl.int64) * q_layer
    if APART > 0:
        k_ptr += tl.load(apart_ptr + layer) * APART
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
    out_at = (split.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * num_rows + r
    tl.store(out_ptr + out_at, lse, live)


@quick
@triton.jit(do_not_specialize=["num_rows", "num_columns", "splits"])
def _column_reduce(
    q_ptr, k_ptr, apart_ptr, limits_ptr, lse_ptr, out_ptr, num_rows, num_columns, splits, scale,
    q_layer, q_row, q_head, k_row, k_head,
    G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, LIMITED: tl.constexpr,
    APART: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [S * HQ, N]: sum or maximum over the rows of exp2(score - lse), with lse of all splits
    [splits, S * HQ, R] put together."""
    layer, head = tl.program_id(1) // HQ, tl.program_id(1) % HQ
    q_ptr += layer.to(tl.int64) * q_layer
    if APART > 0:
        k_ptr += tl.load(apart_ptr + layer) * APART
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
            nth = tl.arange(0, SPLITS)[:, None]
            lse_at = (nth * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_rows
            parts = tl.load(
                lse_ptr + lse_at + r[None, :], (nth < splits) & live[None, :], other=-1.0e30
            )
            highest = tl.max(parts, 0)
            lse = highest + tl.log2(tl.sum(tl.exp2(parts - highest[None, :]), 0))
            lse = tl.where(live, lse, 0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = live[:, None]
            if LIMITED:
                seen = seen & (n[None, :] < limit[:, None])
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            best = tl.maximum(best, tl.max(p, 0)) if LARGEST else best + tl.sum(p, 0)
    tl.store(out_ptr + tl.program_id(1).to(tl.int64) * num_columns + n, best, n < num_columns)


class Stack(NamedTuple):
    """The keys of some layers: alike, wherever they lie."""

    first: Tensor  # [N, Hk, D]
    apart: Tensor | None  # [S] int64: how far each layer's lie from them; None: there is one
    unit: int  # in units of how many elements

    @classmethod
    def from_layers(cls, keys: Sequence[Tensor]) -> "Stack":
        """Find how far the keys of layers lie apart, in units of 16 wherever possible: the kernel
        may then read wide."""
        if len(keys) == 1:
            return cls(keys[0], None, 0)
        assert len({(k.shape, k.stride(), k.dtype) for k in keys}) == 1, "layers are alike"
        size = keys[0].element_size()
        at = np.array([k.data_ptr() for k in keys], dtype=np.int64) - keys[0].data_ptr()
        assert not (at % size).any(), "keys of a layer lie between elements"
        unit = 1 if (at % (16 * size)).any() else 16
        return cls(keys[0], to_device(at // (size * unit), keys[0].device), unit)


def row_lse(q: Tensor, keys: Tensor, limits: Tensor | None = None) -> Tensor:
    """log2 of the softmax's denominator [Hq, R] of rows q [R, Hq, D] over keys [N, Hk, D]."""
    return merge_parts(split_lse(q[None], Stack.from_layers([keys]), limits))[0]


def split_lse(q: Tensor, keys: Stack, limits: Tensor | None = None) -> Tensor:
    """Compute `row_lse` of every layer, q [S, R, Hq, D], from some parts of the columns each:
    [parts, S, Hq, R]."""
    layers, rows, heads, head_dim = q.shape
    first, num_columns = keys.first, len(keys.first)
    blocks = triton.cdiv(rows, BLOCK_M) * heads * layers
    steps = triton.cdiv(num_columns, BLOCK_N)
    splits = max(1, min(triton.cdiv(BUSY, blocks), triton.cdiv(steps, 4), MOST_SPLITS))
    per_split = triton.cdiv(steps, splits) * BLOCK_N
    lse = torch.empty(splits, layers, heads, rows, dtype=torch.float32, device=q.device)
    _row_lse[(triton.cdiv(rows, BLOCK_M), layers * heads, splits)](
        q, first, q if keys.apart is None else keys.apart, q if limits is None else limits, lse,
        rows, num_columns, per_split, head_dim**-0.5 * LOG2_E,
        *q.stride()[:3], *first.stride()[:2],
        G=heads // first.shape[1], HQ=heads, D=head_dim, BLOCK_D=tile_width(head_dim),
        M=BLOCK_M, N=BLOCK_N, LIMITED=limits is not None, APART=keys.unit,
        PRECISION=precision(q),
    )  # fmt: skip
    return lse


def merge_parts(lse: Tensor) -> Tensor:
    """Put the parts of `split_lse` [parts, ...] together: [...]."""
    if len(lse) == 1:
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
    return columns_reduce(q[None], Stack.from_layers([keys]), lse[None, None], rows, limits)[0]


def columns_reduce(
    q: Tensor,
    keys: Stack,
    lse: Tensor,
    rows: Literal["sum", "max"],
    limits: Tensor | None = None,
) -> Tensor:
    """Compute `column_reduce` of every layer, [S, Hq, N] float32, with `lse` [parts, S, Hq, R] of
    `split_lse`."""
    layers, num_rows, heads, head_dim = q.shape
    first, num_columns = keys.first, len(keys.first)
    out = torch.empty(layers, heads, num_columns, dtype=torch.float32, device=q.device)
    _column_reduce[(triton.cdiv(num_columns, BLOCK_N), layers * heads)](
        q, first, q if keys.apart is None else keys.apart, q if limits is None else limits,
        lse.contiguous(), out, num_rows, num_columns, len(lse), head_dim**-0.5 * LOG2_E,
        *q.stride()[:3], *first.stride()[:2],
        G=heads // first.shape[1], HQ=heads, D=head_dim, BLOCK_D=tile_width(head_dim),
        M=BLOCK_M, N=BLOCK_N, SPLITS=FEW_SPLITS if len(lse) <= FEW_SPLITS else MOST_SPLITS,
        LIMITED=limits is not None, APART=keys.unit, LARGEST=rows == "max",
        PRECISION=precision(q),
    )  # fmt: skip
    return out
