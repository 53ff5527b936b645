"""The kernel of prompt_rows.py: rows of one prompt over its own pages and over all of its chunks.

Arguments are called as the tables that they point to (`PromptTables` says what is in those).
"""

import triton
import triton.language as tl

from kvweave.kernels.gpu.coded import code_scales, high_codes, low_codes

HIDDEN = tl.constexpr(float("-inf"))


@triton.jit
def _shares(s, m, total, scale):
    """One block more, of scores s [M, N]: its weights before they are divided by their sum, what
    the answer so far is multiplied by, and both sums."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == HIDDEN, 0.0, m_new)  # a row that has seen nothing yet
    alpha = tl.exp2(m - base)
    p = tl.exp2(s * scale - base[:, None])
    return p, alpha, m_new, total * alpha + tl.sum(p, 1)


@triton.jit
def _look(
    q0, q1, acc, m, total, k_ptr, v_ptr, pages_ptr, slot0, num, limit, scale,
    k_row, v_row, D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    LIMITED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`num` keys from slot0 on, of one head. LIMITED: a row sees the first `limit` of them."""
    c = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    for key0 in tl.range(0, num, BLOCK_N, num_stages=STAGES):
        there = key0 + j < num
        slot = slot0 + key0 + j
        page = tl.load(pages_ptr + slot // PAGE, there, other=0)
        slot = (page * PAGE + slot % PAGE).to(tl.int64)
        live = there[:, None] & (c < HALF)[None, :]
        k_at = k_ptr + (slot * k_row)[:, None] + c[None, :]
        k0 = tl.load(k_at, live, other=0.0)
        k1 = tl.load(k_at + HALF, live, other=0.0)
        v_at = v_ptr + (slot * v_row)[:, None] + d[None, :]
        v = tl.load(v_at, there[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        if LIMITED:
            s = tl.where((key0 + j)[None, :] < limit[:, None], s, HIDDEN)
        else:
            s = tl.where(there[None, :], s, HIDDEN)
        p, alpha, m, total = _shares(s, m, total, scale)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m, total


@triton.jit
def _look_at_codes(
    q0, q1, acc0, acc1, m, total, k_ptr, v_ptr, scales_ptr, pages_ptr, slot0, num, head, scale,
    HK: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what `_look` does, with codes: those of both halves of the channels share numbers."""
    c = tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_N)
    DTYPE: tl.constexpr = q0.dtype
    for key0 in tl.range(0, num, BLOCK_N, num_stages=STAGES):
        there = key0 + j < num
        slot = slot0 + key0 + j
        page = tl.load(pages_ptr + slot // PAGE, there, other=0)
        row = ((page * PAGE + slot % PAGE).to(tl.int64) * HK + head) * HALF
        k_live = there[None, :] & (c < HALF)[:, None]
        k = tl.load(k_ptr + row[None, :] + c[:, None], k_live, 0)
        v = tl.load(v_ptr + row[:, None] + c[None, :], there[:, None] & (c < HALF)[None, :], 0)
        both = tl.load(scales_ptr + (page * HK + head) * PAGE + slot % PAGE, there, 0)
        s = tl.dot(q0, low_codes(k, DTYPE), input_precision=PRECISION)
        s = tl.dot(q1, high_codes(k, DTYPE), s, input_precision=PRECISION)
        k_scale, v_scale = code_scales(both)
        s = tl.where(there[None, :], s * k_scale[None, :], HIDDEN)
        p, alpha, m, total = _shares(s, m, total, scale)
        p = (p * v_scale[None, :]).to(DTYPE)
        acc0 = tl.dot(p, low_codes(v, DTYPE), acc0 * alpha[:, None], input_precision=PRECISION)
        acc1 = tl.dot(p, high_codes(v, DTYPE), acc1 * alpha[:, None], input_precision=PRECISION)
    return acc0, acc1, m, total


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_parts"])
def attend_prompt(
    q_ptr, k_ptr, v_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, part_ptr, lse_ptr,
    at_cos, at_sin, back_cos, back_sin, lift_ptr, own_keys_ptr, parts_ptr, runs_ptr, pages_ptr,
    num_rows, num_tiles, num_parts, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, CHUNK_PAGE: tl.constexpr, CODED: tl.constexpr,
    LIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows, a KV head, and a part of the chunks' keys; behind all parts, own pages.

    Queries are turned to their positions and rounded, as if that had been done before, then back by
    the start of each chunk. Programs that read the same keys run side by side."""
    unit = tl.program_id(0)
    tile, head = unit % num_tiles, unit // num_tiles % HK
    part = unit // (num_tiles * HK)
    at = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_H)
    row = tile * (BLOCK_M // G) + at // G
    here = (at // G < BLOCK_M // G) & (row < num_rows)
    inside = here[:, None] & (c < HALF)[None, :]
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    q_at = q_ptr + row.to(tl.int64)[:, None] * q_row + (head * G + at % G)[:, None] * q_head
    x0 = tl.load(q_at + c[None, :], inside, other=0.0).to(tl.float32)
    x1 = tl.load(q_at + HALF + c[None, :], inside, other=0.0).to(tl.float32)
    cos = tl.load(at_cos + row[:, None] * HALF + c[None, :], inside, other=0.0).to(tl.float32)
    sin = tl.load(at_sin + row[:, None] * HALF + c[None, :], inside, other=0.0).to(tl.float32)
    y0 = (x0 * cos - x1 * sin).to(DTYPE)
    y1 = (x1 * cos + x0 * sin).to(DTYPE)
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    cell = row.to(tl.int64) * (num_parts + 1) + part
    part_at = (cell * HK + head) * G + at % G
    out_at = part_ptr + part_at[:, None] * D
    if part == num_parts:
        d = tl.arange(0, BLOCK_D)
        limit = tl.load(own_keys_ptr + row, here, other=0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc, m, total = _look(
            y0, y1, acc, m, total, k_ptr + head * k_head, v_ptr + head * v_head, pages_ptr,
            0, tl.max(limit, 0), limit, scale, k_row, v_row,
            D, HALF, BLOCK_D, BLOCK_H, BLOCK_N, 1, PAGE, True, PRECISION,
        )  # fmt: skip
        share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_at + d[None, :], acc * share, here[:, None] & (d < D)[None, :])
    else:
        run0, run1 = tl.load(parts_ptr + part * 2), tl.load(parts_ptr + part * 2 + 1)
        z0 = y0.to(tl.float32)
        z1 = y1.to(tl.float32)
        if LIFTED:  # keys of chunks were divided by as much
            z0 = z0 * tl.load(lift_ptr + head * D + c, c < HALF, other=1.0)[None, :]
            z1 = z1 * tl.load(lift_ptr + head * D + HALF + c, c < HALF, other=1.0)[None, :]
        if CODED:
            acc0 = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
            acc1 = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
            for run in range(run0, run1):
                slot0, num = tl.load(runs_ptr + run * 4), tl.load(runs_ptr + run * 4 + 1)
                nth = tl.load(runs_ptr + run * 4 + 2)
                back_c = tl.load(back_cos + nth * HALF + c, c < HALF, other=0.0)[None, :]
                back_s = tl.load(back_sin + nth * HALF + c, c < HALF, other=0.0)[None, :]
                q0 = (z0 * back_c - z1 * back_s).to(DTYPE)
                q1 = (z1 * back_c + z0 * back_s).to(DTYPE)
                acc0, acc1, m, total = _look_at_codes(
                    q0, q1, acc0, acc1, m, total, codes_k_ptr, codes_v_ptr, scales_ptr, pages_ptr,
                    slot0, num, head, scale, HK, HALF, BLOCK_H, BLOCK_N, STAGES, CHUNK_PAGE,
                    PRECISION,
                )  # fmt: skip
            share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_at + c[None, :], acc0 * share, inside)
            tl.store(out_at + HALF + c[None, :], acc1 * share, inside)
        else:
            d = tl.arange(0, BLOCK_D)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for run in range(run0, run1):
                slot0, num = tl.load(runs_ptr + run * 4), tl.load(runs_ptr + run * 4 + 1)
                nth = tl.load(runs_ptr + run * 4 + 2)
                back_c = tl.load(back_cos + nth * HALF + c, c < HALF, other=0.0)[None, :]
                back_s = tl.load(back_sin + nth * HALF + c, c < HALF, other=0.0)[None, :]
                q0 = (z0 * back_c - z1 * back_s).to(DTYPE)
                q1 = (z1 * back_c + z0 * back_s).to(DTYPE)
                acc, m, total = _look(
                    q0, q1, acc, m, total, k_ptr + head * k_head, v_ptr + head * v_head, pages_ptr,
                    slot0, num, m, scale, k_row, v_row,
                    D, HALF, BLOCK_D, BLOCK_H, BLOCK_N, STAGES, PAGE, False, PRECISION,
                )  # fmt: skip
            share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_at + d[None, :], acc * share, here[:, None] & (d < D)[None, :])
    tl.store(lse_ptr + part_at, m + tl.log2(total), here)
