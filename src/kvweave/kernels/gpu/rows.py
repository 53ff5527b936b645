"""Sparse-row attention for any GPU, head size and precision, and for decode, in Triton.

One program answers for a piece of a plan (`row_plan.py`) and one KV head: a tile of rows times the
G query heads that share it. Keys before the tile's first row need no mask; the few blocks between
its first and its last row do. Keys lie in one tensor per sequence, or in pages.
"""

import triton
import triton.language as tl

from kvweave.kernels.gpu.quick import quick

HIDDEN = tl.constexpr(float("-inf"))


@triton.jit
def _block(
    b, q, acc, m, total, limit, hi, scale, k_base, v_base, k_row, v_row,
    k_page, v_page, pages,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys = b * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if PAGE > 0:
        if MASKED:
            page = tl.load(pages + keys // PAGE, keys < hi, other=0).to(tl.int64)
        else:
            page = tl.load(pages + keys // PAGE).to(tl.int64)
        k_at = page * k_page + (keys % PAGE) * k_row
        v_at = page * v_page + (keys % PAGE) * v_row
    else:
        k_at = keys.to(tl.int64) * k_row
        v_at = keys.to(tl.int64) * v_row
    k_at = k_base + k_at[:, None] + d[None, :]
    v_at = v_base + v_at[:, None] + d[None, :]
    if MASKED:
        there = (keys < hi)[:, None] & (d < D)[None, :]
        k = tl.load(k_at, there, other=0.0)
        v = tl.load(v_at, there, other=0.0)
    elif D < BLOCK_D:
        there = (d < D)[None, :]
        k = tl.load(k_at, there, other=0.0)
        v = tl.load(v_at, there, other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        s = tl.where(keys[None, :] < limit[:, None], s, HIDDEN)
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = m_new
    if MASKED:  # a row that has seen nothing yet keeps a sum of nothing
        base = tl.where(m_new == HIDDEN, 0.0, m_new)
    alpha = tl.exp2(m - base)
    p = tl.exp2(s * scale - base[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total


@quick
@triton.jit(do_not_specialize=["pages_stride"])
def attend_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, limits_ptr, items_ptr, apart_ptr, pages_ptr,
    pages_stride, scale, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
    out_row, out_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, APART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`apart` [sequences, 2] int64: how far a sequence's keys and values lie from the first one's,
    in units of APART elements; APART is 0 where all are reached from k_ptr and v_ptr."""
    head = tl.program_id(0) % HK
    item = items_ptr + tl.program_id(0) // HK * 8
    row0, num_rows = tl.load(item), tl.load(item + 1)
    b0, b1 = tl.load(item + 2), tl.load(item + 3)
    hi, free = tl.load(item + 4), tl.load(item + 5)
    seq, slot = tl.load(item + 6), tl.load(item + 7)
    k_base = k_ptr + head * k_head
    v_base = v_ptr + head * v_head
    if APART > 0:
        k_base += tl.load(apart_ptr + seq * 2) * APART
        v_base += tl.load(apart_ptr + seq * 2 + 1) * APART
    pages = pages_ptr + seq.to(tl.int64) * pages_stride

    at = tl.arange(0, BLOCK_M)
    here = at // G < num_rows
    d = tl.arange(0, BLOCK_D)
    row = (row0 + at // G).to(tl.int64)
    q_at = q_ptr + (row * q_row + (head * G + at % G) * q_head)[:, None] + d[None, :]
    inside = here[:, None] & (d < D)[None, :]
    q = tl.load(q_at, inside, other=0.0)
    limit = tl.load(limits_ptr + row, here, other=1)
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    edge = tl.minimum(tl.maximum(free, b0), b1)
    for b in range(b0, edge):
        acc, m, total = _block(
            b, q, acc, m, total, limit, hi, scale, k_base, v_base, k_row, v_row,
            k_page, v_page, pages, D, BLOCK_D, BLOCK_N, PAGE, False, PRECISION,
        )  # fmt: skip
    for b in range(edge, b1):
        acc, m, total = _block(
            b, q, acc, m, total, limit, hi, scale, k_base, v_base, k_row, v_row,
            k_page, v_page, pages, D, BLOCK_D, BLOCK_N, PAGE, True, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if slot < 0:
        out_at = out_ptr + (row * out_row + (head * G + at % G) * out_head)[:, None] + d[None, :]
        tl.store(out_at, acc.to(q.dtype), inside)
    else:
        part = (slot.to(tl.int64) * HK + head) * BLOCK_M + at
        tl.store(part_ptr + part[:, None] * D + d[None, :], acc, (d < D)[None, :])
        tl.store(lse_ptr + part, m + tl.log2(total))


@quick
@triton.jit
def merge_pieces(
    out_ptr, part_ptr, lse_ptr, merges_ptr, out_row, out_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, PART_M: tl.constexpr, PART_S: tl.constexpr,
):  # fmt: skip
    """Rows whose keys were cut: the pieces' answers, each by its share of the softmax.

    A row of which no piece saw a key (padding of a fixed batch) becomes zero.
    """
    merge = merges_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    row0, num_rows = tl.load(merge), tl.load(merge + 1)
    slot0, num_slots = tl.load(merge + 2), tl.load(merge + 3)
    at = tl.program_id(2) * PART_M + tl.arange(0, PART_M)
    if tl.program_id(2) * PART_M < num_rows * G:
        d = tl.arange(0, BLOCK_D)
        nth = tl.arange(0, PART_S)
        m = tl.full([PART_M], -1.0e30, tl.float32)
        total = tl.zeros([PART_M], tl.float32)
        acc = tl.zeros([PART_M, BLOCK_D], tl.float32)
        for start in range(0, num_slots, PART_S):  # several pieces at a time: their loads overlap
            slot = slot0.to(tl.int64) + start + nth
            live = (start + nth < num_slots)[:, None]
            part = (slot[:, None] * HK + head) * BLOCK_M + at[None, :]  # [S, M]
            lse = tl.load(lse_ptr + part, live, other=float("-inf"))
            o_at = part_ptr + part[:, :, None] * D + d[None, None, :]
            o = tl.load(o_at, live[:, :, None] & (d < D)[None, None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(lse, 0))
            alpha, share = tl.exp2(m - m_new), tl.exp2(lse - m_new[None, :])
            acc = acc * alpha[:, None] + tl.sum(o * share[:, :, None], 0)
            total = total * alpha + tl.sum(share, 0)
            m = m_new
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        row = (row0 + at // G).to(tl.int64)
        out_at = out_ptr + (row * out_row + (head * G + at % G) * out_head)[:, None] + d[None, :]
        inside = (at // G < num_rows)[:, None] & (d < D)[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), inside)
