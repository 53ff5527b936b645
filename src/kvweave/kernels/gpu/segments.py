"""Attention over own pages and shared chunks: each chunk is read once for all rows that hold it.

Three launches answer for a layer, over tables of a fixed place that a CUDA graph can replay
(`segment_plan.py` says what is in them):

    turn    every row's query, turned to what the row looks at: own pages, or one of its chunks
    attend  by row: what one row alone looks at, in even pieces; and
            by chunk: what several rows look at, a tile of their queries over the pages of one chunk
    merge   the answers of each row, by their shares of the softmax

One launch attends both ways: reading is bound by memory, tiles by products, and the two overlap. A
step begins with one more (`begin_step`), which writes down where each key of each block lies.

Chunks may lie in 8 bits (`kernels/coded.py`): by chunk, and in pieces of their own by row, codes
are multiplied as they are, and their scales go into scores and weights.

Tables are written by `SegmentTables.update`: who holds which chunk when a sequence comes or goes,
everything else at every step.
"""

import math
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvweave.kernels.gpu.attention import Launch, choose, cores
from kvweave.kernels.gpu.row_plan import stream_of
from kvweave.kernels.gpu.segment_plan import WINDOW, ChunkArrays, ChunkTiling, Room, Sharing
from kvweave.kernels.gpu.tiles import LOG2_E, padded, precision
from kvweave.kernels.rope import Angles, Turn
from kvweave.kernels.types import CodedPages, SegmentedRows, SharedChunk

HIDDEN = tl.constexpr(float("-inf"))
ALIGNED = 4  # numbers: tables begin at multiples of 16 bytes
PART_S = 16  # cells that are merged at a time
PIECES = 6  # by row, per multiprocessor: small ones fill the gaps that tiles leave
TURN_HEADS = 32  # that one program turns
CODE_STAGES = 6  # of reading codes by row: half the bytes of a block, so twice as many under way
SLACK = WINDOW // 32 + 1  # mask words that may be read behind the last ones


class SegmentShape(NamedTuple):
    """Heads and pages that tables are for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype
    coded: bool = False  # chunks lie in 8 bits

    @property
    def chunk_page(self) -> int:
        """Tokens of a chunk in a page."""
        return self.page * self.dtype.itemsize if self.coded else self.page


@triton.jit
def turn_queries(
    q_ptr, out_ptr, at_cos, at_sin, back_cos, back_sin, pairs_ptr, lift_ptr, q_row, q_head,
    num_rows,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    PLACED: tl.constexpr, LIFTED: tl.constexpr,
):  # fmt: skip
    """The query of every pair [pairs, HQ, D]: turned back by its start. PLACED: first to its row's
    position, and rounded, as if that had been done before. LIFTED: multiplied by what the keys of
    chunks, whose pairs come behind those of the rows, were divided by."""
    pair = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_HALF)
    inside = (h < HQ)[:, None] & (j < HALF)[None, :]
    row = tl.load(pairs_ptr + pair * 4).to(tl.int64)
    if row >= 0:
        x_at = q_ptr + row * q_row + h[:, None] * q_head
        out_at = out_ptr + (pair.to(tl.int64) * HQ + h)[:, None] * D
        x1 = tl.load(x_at + j[None, :], inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + HALF + j[None, :], inside, other=0.0).to(tl.float32)
        if PLACED:
            cos = tl.load(at_cos + row * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
            sin = tl.load(at_sin + row * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
            y1 = (x1 * cos - x2 * sin).to(q_ptr.dtype.element_ty).to(tl.float32)
            x2 = (x2 * cos + x1 * sin).to(q_ptr.dtype.element_ty).to(tl.float32)
            x1 = y1
        cos = tl.load(back_cos + pair * HALF + j, j < HALF, other=0.0)[None, :]
        sin = tl.load(back_sin + pair * HALF + j, j < HALF, other=0.0)[None, :]
        lift_at = lift_ptr + (h // G)[:, None] * D
        lifts = inside & (pair >= num_rows)
        if LIFTED:
            lift = tl.load(lift_at + j[None, :], lifts, other=1.0)
            x1 = x1 * lift
            x2 = x2 * lift
        tl.store(out_at + j[None, :], x1 * cos - x2 * sin, inside)
        tl.store(out_at + HALF + j[None, :], x2 * cos + x1 * sin, inside)
        if D > 2 * HALF:
            d = tl.arange(0, BLOCK_D)
            rest = (h < HQ)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
            x = tl.load(x_at + d[None, :], rest, other=0.0)
            if LIFTED:
                lifts = rest & (pair >= num_rows)
                x = x.to(tl.float32) * tl.load(lift_at + d[None, :], lifts, other=1.0)
            tl.store(out_at + d[None, :], x, rest)


@triton.jit
def _weigh(s, v, acc, m, total, scale, PRECISION: tl.constexpr):
    """One block more: scores s [M, N], HIDDEN where a row does not look, and values v [N, D]."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == HIDDEN, 0.0, m_new)  # a row that has seen nothing yet
    alpha = tl.exp2(m - base)
    p = tl.exp2(s * scale - base[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total


@triton.jit
def _low(x, DTYPE: tl.constexpr):
    """The codes in the lower bytes: of the first half of a head's channels."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        # a code c >= 0 is (128 + its 7 bits) - 128, one below 0 is (128 + its 7 bits) - 256, and
        # all of these are exact; the unit that converts integers is four times as slow
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, minus;
            mov.b32 minus, 0xbf80bf80;
            lop3.b32 a, $1, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, $1, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, b, minus, a;
            }""",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = ((x.to(tl.int32) << 24) >> 24).to(DTYPE)
    return found


@triton.jit
def _high(x, DTYPE: tl.constexpr):
    """The codes in the upper bytes: of the other half."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, up, minus;
            mov.b32 minus, 0xbf80bf80;
            shr.b32 up, $1, 8;
            lop3.b32 a, up, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, up, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, b, minus, a;
            }""",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = (x.to(tl.int32) >> 8).to(DTYPE)
    return found


@triton.jit
def _all(x, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The codes of numbers x [N, C], one half of the channels behind the other: [N, 2 C]."""
    both = tl.permute(tl.join(_low(x, DTYPE), _high(x, DTYPE)), (0, 2, 1))
    return tl.reshape(both, (BLOCK_N, 2 * BLOCK_C))


@triton.jit
def _scales(both):
    """Of keys and of values, from numbers that hold two halves."""
    of_keys = (both & 65535).to(tl.int16).to(tl.float16, bitcast=True)
    of_values = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return of_keys.to(tl.float32), of_values.to(tl.float32)


@triton.jit
def place_keys(
    slots_ptr, step_ptr, blocks_ptr, pages_ptr, words_ptr, num_rows,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, CHUNK_PAGE: tl.constexpr,
):  # fmt: skip
    """Where the keys of every block by row lie in the pool [blocks, BLOCK_N]; -1: there is none.
    Pairs behind those of the rows look at chunks, whose pages may hold more."""
    j = tl.arange(0, WINDOW)
    for b in range(tl.program_id(0), tl.load(step_ptr), tl.num_programs(0)):
        block = blocks_ptr + b * 4
        slot, num, bit = tl.load(block) + j, tl.load(block + 1), tl.load(block + 3)
        live = j < num
        nth = j
        if bit >= 0:  # replaced rows are left out
            word = tl.load(words_ptr + (bit + j) // 32)
            kept = (((word >> ((bit + j) % 32)) & 1) == 0).to(tl.int32)
            nth = tl.cumsum(kept, 0) - 1
            live = (kept > 0) & (nth < num)
        size = PAGE
        if CHUNK_PAGE != PAGE:
            size = tl.where(tl.load(block + 2) >= num_rows, CHUNK_PAGE, PAGE)
        page = tl.load(pages_ptr + slot // size, live, other=0)
        to = slots_ptr + tl.cast(b, tl.int64) * BLOCK_N
        tl.store(to + nth, page * size + slot % size, live)
        tl.store(to + j, tl.full([WINDOW], -1, tl.int32), (j >= num) & (j < BLOCK_N))


@triton.jit
def _by_row(
    unit, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr, slots_ptr, scale,
    k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A piece and a KV head."""
    head = unit % HK
    piece = pieces_ptr + unit // HK * 4
    b0, b1, cell = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    inside = (at < G)[:, None] & (d < D)[None, :]
    q_at = q_ptr + ((head * G + at) * D)[:, None] + d[None, :]
    k_base = k_ptr + head * k_head + d[None, :]
    v_base = v_ptr + head * v_head + d[None, :]
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for b in tl.range(b0, b1, num_stages=STAGES):
        slot = tl.load(slots_ptr + tl.cast(b, tl.int64) * BLOCK_N + j)
        pair = tl.load(blocks_ptr + b * 4 + 2)
        there = slot >= 0
        live = there[:, None] & (d < D)[None, :]
        k = tl.load(k_base + (slot.to(tl.int64) * k_row)[:, None], live, other=0.0)
        v = tl.load(v_base + (slot.to(tl.int64) * v_row)[:, None], live, other=0.0)
        q = tl.load(q_at + pair.to(tl.int64) * (HK * G * D), inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(there[None, :], s, HIDDEN)
        acc, m, total = _weigh(s, v, acc, m, total, scale, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    part = (cell.to(tl.int64) * HK + head) * G + at
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), at < G)


@triton.jit
def _by_row_codes(
    unit, q_ptr, k_ptr, v_ptr, scales_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr, slots_ptr,
    scale,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_by_row`, of a piece that has codes: the halves of a head's channels are apart."""
    head = unit % HK
    piece = pieces_ptr + unit // HK * 4
    b0, b1, cell = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    at = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK_N)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    C: tl.constexpr = D // 2
    inside = (at < G)[:, None] & (c < C)[None, :]
    q_at = q_ptr + ((head * G + at) * D)[:, None] + c[None, :]
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    acc1 = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for b in tl.range(b0, b1, num_stages=STAGES):
        slot = tl.load(slots_ptr + tl.cast(b, tl.int64) * BLOCK_N + j)
        pair = tl.load(blocks_ptr + b * 4 + 2)
        there = slot >= 0
        row = (slot.to(tl.int64) * HK + head) * C
        k = tl.load(k_ptr + row[None, :] + c[:, None], there[None, :] & (c < C)[:, None], 0)
        v = tl.load(v_ptr + row[:, None] + c[None, :], there[:, None] & (c < C)[None, :], 0)
        both = tl.load(scales_ptr + (slot // PAGE * HK + head) * PAGE + slot % PAGE, there, 0)
        q0 = tl.load(q_at + pair.to(tl.int64) * (HK * G * D), inside, other=0.0)
        q1 = tl.load(q_at + pair.to(tl.int64) * (HK * G * D) + C, inside, other=0.0)
        s = tl.dot(q0, _low(k, DTYPE), input_precision=PRECISION)
        s = tl.dot(q1, _high(k, DTYPE), s, input_precision=PRECISION)
        k_scale, v_scale = _scales(both)
        s = tl.where(there[None, :], s * k_scale[None, :], HIDDEN)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        base = tl.where(m_new == HIDDEN, 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s * scale - base[:, None])
        total = total * alpha + tl.sum(p, 1)
        p = (p * v_scale[None, :]).to(DTYPE)
        acc0 = tl.dot(p, _low(v, DTYPE), acc0 * alpha[:, None], input_precision=PRECISION)
        acc1 = tl.dot(p, _high(v, DTYPE), acc1 * alpha[:, None], input_precision=PRECISION)
        m = m_new
    share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    part = (cell.to(tl.int64) * HK + head) * G + at
    part_at = part_ptr + part[:, None] * D + c[None, :]
    tl.store(part_at, acc0 * share, inside)
    tl.store(part_at + C, acc1 * share, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), at < G)


@triton.jit
def _by_chunk(
    unit, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, tiles_ptr, pairs_ptr, pages_ptr, words_ptr,
    first_cell, scale, k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile and a KV head."""
    at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    head = unit % HK
    tile = tiles_ptr + unit // HK * 8
    slot0, num = tl.load(tile), tl.load(tile + 1)
    word0, pair0 = tl.load(tile + 2), tl.load(tile + 3)
    members, cut, masked = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
    here = at // G < members
    inside = here[:, None] & (d < D)[None, :]
    pair = pair0 + at // G
    q_at = (pair.to(tl.int64) * (HK * G) + head * G + at % G) * D
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], inside, other=0.0)
    mask = tl.load(pairs_ptr + pair * 4 + 2, here, other=-1)
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key0 in tl.range(0, num, BLOCK_N, num_stages=STAGES):
        there = key0 + j < num
        slot = slot0 + key0 + j
        page = tl.load(pages_ptr + slot // PAGE, there, other=0)
        slot = (page * PAGE + slot % PAGE).to(tl.int64)
        live = there[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + head * k_head + (slot * k_row)[:, None] + d[None, :], live, other=0.0)
        v = tl.load(v_ptr + head * v_head + (slot * v_row)[:, None] + d[None, :], live, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(there[None, :], s, HIDDEN)
        if masked > 0:
            gone = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
            for w in tl.static_range(BLOCK_N // 32):
                bits_at = words_ptr + mask + word0 + key0 // 32 + w
                bits = tl.load(bits_at, mask >= 0, other=0)
                gone = tl.where((j // 32 == w)[None, :], bits[:, None], gone)
            s = tl.where(((gone >> (j % 32)[None, :]) & 1) == 0, s, HIDDEN)
        acc, m, total = _weigh(s, v, acc, m, total, scale, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    cell = first_cell + cut + tl.load(pairs_ptr + pair * 4 + 3, here, other=0)
    part = (cell.to(tl.int64) * HK + head) * G + at % G
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), here)


@triton.jit
def _by_chunk_codes(
    unit, q_ptr, k_ptr, v_ptr, scales_ptr, part_ptr, lse_ptr, tiles_ptr, pairs_ptr, pages_ptr,
    words_ptr, first_cell, scale,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_by_chunk`, of codes; a block has 64 keys at most."""
    at = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    x = tl.arange(0, 2 * BLOCK_C)
    j = tl.arange(0, BLOCK_N)
    head = unit % HK
    tile = tiles_ptr + unit // HK * 8
    slot0, num = tl.load(tile), tl.load(tile + 1)
    word0, pair0 = tl.load(tile + 2), tl.load(tile + 3)
    members, cut = tl.load(tile + 4), tl.load(tile + 5)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    C: tl.constexpr = D // 2
    d = x // BLOCK_C * C + x % BLOCK_C  # both halves are filled up
    here = at // G < members
    inside = here[:, None] & (x % BLOCK_C < C)[None, :]
    pair = pair0 + at // G
    q_at = (pair.to(tl.int64) * (HK * G) + head * G + at % G) * D
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], inside, other=0.0)
    mask = tl.load(pairs_ptr + pair * 4 + 2, here, other=-1)
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 2 * BLOCK_C], tl.float32)
    for key0 in tl.range(0, num, BLOCK_N, num_stages=STAGES):
        there = key0 + j < num
        slot = slot0 + key0 + j
        page = tl.load(pages_ptr + slot // PAGE, there, other=0)
        row = ((page * PAGE + slot % PAGE).to(tl.int64) * HK + head) * C
        live = there[:, None] & (c < C)[None, :]
        k = tl.load(k_ptr + row[:, None] + c[None, :], live, 0)
        v = tl.load(v_ptr + row[:, None] + c[None, :], live, 0)
        both = tl.load(scales_ptr + (page * HK + head) * PAGE + slot % PAGE, there, 0)
        # here, and for all tiles: so they are under way as early as the keys are
        word = words_ptr + mask + word0 + key0 // 32
        bits0 = tl.load(word, mask >= 0, other=0)
        bits1 = tl.load(word + (BLOCK_N // 32 - 1), mask >= 0, other=0)
        keys = tl.trans(_all(k, DTYPE, BLOCK_N, BLOCK_C))
        s = tl.dot(q, keys, input_precision=PRECISION)
        k_scale, v_scale = _scales(both)
        gone = tl.where((j < 32)[None, :], bits0[:, None], bits1[:, None]) >> (j % 32)[None, :]
        s = tl.where(there[None, :] & ((gone & 1) == 0), s * k_scale[None, :], HIDDEN)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        base = tl.where(m_new == HIDDEN, 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s * scale - base[:, None])
        total = total * alpha + tl.sum(p, 1)
        p = (p * v_scale[None, :]).to(DTYPE)
        values = _all(v, DTYPE, BLOCK_N, BLOCK_C)
        acc = tl.dot(p, values, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    cell = first_cell + cut + tl.load(pairs_ptr + pair * 4 + 3, here, other=0)
    part = (cell.to(tl.int64) * HK + head) * G + at % G
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), here)


@triton.jit
def attend_cells(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr, slots_ptr, tiles_ptr,
    counts_ptr, pairs_ptr, pages_ptr, words_ptr, first_cell, num_walkers, scale,
    k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROW_M: tl.constexpr, ROW_N: tl.constexpr, ROW_STAGES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_STAGES: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first `num_walkers` programs walk over tiles, however many there are, one beside each
    other program of a multiprocessor; every other program answers for a piece."""
    if tl.program_id(0) < num_walkers:
        for unit in range(tl.program_id(0), tl.load(counts_ptr + 1) * HK, num_walkers):
            _by_chunk(
                unit, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, tiles_ptr, pairs_ptr, pages_ptr,
                words_ptr, first_cell, scale, k_row, k_head, v_row, v_head,
                G, HK, D, BLOCK_D, TILE_M, TILE_N, TILE_STAGES, PAGE, PRECISION,
            )  # fmt: skip
    else:
        _by_row(
            tl.program_id(0) - num_walkers, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr,
            blocks_ptr, slots_ptr, scale, k_row, k_head, v_row, v_head,
            G, HK, D, BLOCK_D, ROW_M, ROW_N, ROW_STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def attend_code_cells(
    q_ptr, k_ptr, v_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, part_ptr, lse_ptr, pieces_ptr,
    blocks_ptr, slots_ptr, tiles_ptr, counts_ptr, pairs_ptr, pages_ptr, words_ptr, first_cell,
    num_walkers, scale, k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, CODE_STAGES: tl.constexpr,
    ROW_M: tl.constexpr, ROW_N: tl.constexpr, ROW_STAGES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_STAGES: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend_cells`, where chunks lie in 8 bits. There are as many walkers as may run at the
    same time, and as many of these walk as have the same number of tiles."""
    if tl.program_id(0) < num_walkers:
        num_units, walking = tl.load(counts_ptr + 1) * HK, tl.load(counts_ptr + 2)
        first = tl.where(tl.program_id(0) < walking, tl.program_id(0), num_units)
        for unit in range(first, num_units, walking):
            _by_chunk_codes(
                unit, q_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, part_ptr, lse_ptr,
                tiles_ptr, pairs_ptr, pages_ptr, words_ptr, first_cell, scale,
                G, HK, D, BLOCK_C, TILE_M, TILE_N, TILE_STAGES, PAGE, PRECISION,
            )  # fmt: skip
    else:
        mine = tl.program_id(0) - num_walkers
        if tl.load(pieces_ptr + mine // HK * 4 + 3) > 0:
            _by_row_codes(
                mine, q_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, part_ptr, lse_ptr,
                pieces_ptr, blocks_ptr, slots_ptr, scale,
                G, HK, D, BLOCK_C, ROW_M, ROW_N, CODE_STAGES, PAGE, PRECISION,
            )  # fmt: skip
        else:
            _by_row(
                mine, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr,
                blocks_ptr, slots_ptr, scale, k_row, k_head, v_row, v_head,
                G, HK, D, BLOCK_D, ROW_M, ROW_N, ROW_STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def merge_cells(
    out_ptr, part_ptr, lse_ptr, by_row_ptr, by_chunk_ptr, first_cell, out_row, out_head,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PART_S: tl.constexpr,
):  # fmt: skip
    """One row and head: its cells by row and by chunk. A row that saw no key becomes zero."""
    row, head = tl.program_id(0), tl.program_id(1)
    own0, num_own = tl.load(by_row_ptr + row * 2), tl.load(by_row_ptr + row * 2 + 1)
    held0, num_held = tl.load(by_chunk_ptr + row * 2), tl.load(by_chunk_ptr + row * 2 + 1)
    d = tl.arange(0, BLOCK_D)
    nth = tl.arange(0, PART_S)
    m = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_own + num_held, PART_S):
        i = start + nth
        cell = tl.where(i < num_own, own0 + i, first_cell + held0 + i - num_own).to(tl.int64)
        live = i < num_own + num_held
        part = cell * HQ + head
        lse = tl.load(lse_ptr + part, live, other=HIDDEN)
        o_at = part_ptr + part[:, None] * D + d[None, :]
        o = tl.load(o_at, live[:, None] & (d < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        alpha, share = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        acc = acc * alpha + tl.sum(o * share[:, None], 0)
        total = total * alpha + tl.sum(share, 0)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + row.to(tl.int64) * out_row + head * out_head
    tl.store(out_at + d, acc.to(out_ptr.dtype.element_ty), d < D)


def by_chunk_launch(dtype: torch.dtype, head_dim: int, group: int) -> Launch:
    """The tile that reads a chunk for several rows."""
    wide, least = padded(head_dim), triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Launch(max(32, least), 32, 4, 1, 1)
    if wide <= 128:
        return Launch(max(64, least), 64, 4, 3, 1)
    return Launch(max(64, least), 32, 4, 2, 1)


class SegmentTables:
    """What each of `num_rows` rows looks at. Owned by the thread that launches.

    Rows of absent sequences come out as zero. `num_columns` more numbers of each row travel along
    and stand in `rows` [num_columns, num_rows] afterwards.
    """

    def __init__(
        self,
        num_rows: int,
        room: Room,
        shape: SegmentShape,
        device: torch.device,
        num_columns: int = 0,
    ) -> None:
        self.num_rows, self.room, self.shape = num_rows, room, shape
        group = shape.num_heads // shape.num_kv_heads
        self.by_row = choose(shape.dtype, shape.head_dim, group, 1)
        self.by_chunk = by_chunk_launch(shape.dtype, shape.head_dim, group)
        self.at_once = self.by_chunk.per_core * cores(device)  # programs that walk over tiles
        self.tiling = ChunkTiling(
            shape.chunk_page, self.by_row.block_n, self.by_chunk.block_n,
            self.by_chunk.block_m // group, shape.num_kv_heads, self.at_once, shape.coded,
        )  # fmt: skip
        least = self.tiling.lists * num_rows
        self.num_pieces = least + -(-PIECES * cores(device) // shape.num_kv_heads)
        # held, written by `hold`:    counts | pairs | tiles | row_cells | words | chunk pages
        # moving, written by `update`: step | rows | pieces | row_pieces | blocks, own pages at once
        held = {
            "counts": (4,), "pairs": (room.pairs, 4),
            "tiles": (room.most_cuts(self.tiling), 8),
            "row_cells": (num_rows, 2), "words": (room.words + SLACK,),
            # own pages are found from here, and a view of nothing has no address
            "pages": (max(1, room.chunk_pages),),
        }  # fmt: skip
        moving = {
            "step": (4,), "rows": (num_columns, num_rows), "pieces": (self.num_pieces, 4),
            "row_pieces": (num_rows, 2), "blocks": (room.blocks, 4), "own": (room.own_pages,),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = held | moving
        sizes = [_aligned(math.prod(each)) for each in shapes.values()]
        self._starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.on_device = {
            name: self._all[start : start + math.prod(shapes[name])].view(shapes[name])
            for name, start in self._starts.items()
        }
        self._arrays: dict[int, ChunkArrays] = {}
        self._held: tuple[int, ...] = ()
        self._sharing: Sharing | None = None

    @property
    def rows(self) -> Tensor:
        return self.on_device["rows"]

    def hold(self, chunks: Sequence[Sequence[SharedChunk]]) -> bool:
        """Row r looks at chunks[r], whole; an object that was given before is not looked into
        again. False: there is no room, and nothing has changed. Does not wait for the device."""
        held = tuple(id(each) for each in chunks)
        if held == self._held and self._sharing is not None:
            return True
        arrays: dict[int, ChunkArrays] = {}
        for number, each in zip(held, chunks, strict=True):
            if each and number not in arrays:  # rows of one prompt hold the same object
                known = self._arrays.get(number)
                arrays[number] = known or ChunkArrays(each, self.tiling.row_keys)
        of_rows = [arrays.get(number) for number in held]
        of_rows += [None] * (self.num_rows - len(of_rows))
        sharing = Sharing(of_rows, self.tiling)
        if not sharing.fits(self.room):
            return False
        self._arrays, self._held, self._sharing = arrays, held, sharing
        pairs = np.full((self.room.pairs, 4), -1, dtype=np.int32)  # the rest are none
        pairs[: len(sharing.pairs), :3] = sharing.pairs
        pairs[: len(sharing.pairs), 3] = sharing.pair_cells
        counts = np.array([len(sharing.pairs), len(sharing.tiles), sharing.num_walkers, 0])
        self._send("counts", [counts])
        self._send("pairs", [pairs])
        self._send("tiles", [sharing.tiles])
        self._send("row_cells", [sharing.row_cells])
        self._send("words", [sharing.words])
        self._send("pages", [sharing.pages])
        return True

    def update(
        self,
        own_keys: Sequence[int],
        own_pages: Sequence[ArrayLike],
        rows: ArrayLike | None = None,
    ) -> None:
        """Row i looks at the first own_keys[i] keys of its own pages, and at what it holds. Fewer
        rows than room: the rest are absent. `rows` are the numbers of all rows, absent ones too.
        Does not wait for the device."""
        assert self._sharing is not None, "hold comes before update"
        tables = [np.asarray(table, dtype=np.int32) for table in own_pages]
        num_pages = sum(map(len, tables))
        assert num_pages <= self.room.own_pages, f"{num_pages} pages for {self.room.own_pages}"
        keys = np.zeros(self.num_rows, dtype=np.int64)
        keys[: len(own_keys)] = own_keys
        num_blocks = self._sharing.count_blocks(keys)
        assert num_blocks <= self.room.blocks, f"{num_blocks} blocks for {self.room.blocks}"
        # own pages come right behind the blocks; slots are counted from the first chunk page on
        page0 = self._starts["blocks"] + 4 * num_blocks - self._starts["pages"]
        firsts = np.zeros(self.num_rows, dtype=np.int64)
        firsts[: len(tables)] = list(accumulate(map(len, tables), initial=page0))[:-1]
        slots = firsts * self.shape.page
        blocks, pieces, row_pieces = self._sharing.by_row(keys, slots, self.num_pieces)
        shape = self.rows.shape
        numbers = np.zeros(shape) if rows is None else np.asarray(rows).reshape(shape)
        step = np.array([num_blocks, 0, 0, 0])
        self._send("step", [step, numbers, pieces, row_pieces, blocks, *tables])

    def _send(self, first: str, parts: Sequence[NDArray[np.generic]]) -> None:
        """Write tables that lie behind each other, from the one called `first` on, in one copy."""
        is_cuda, names = self._all.is_cuda, list(self._starts)
        start, at = self._starts[first], 0
        fixed = names[names.index(first) : names.index(first) + 5]  # these have their places
        size = sum(part.size for part in parts) + ALIGNED * len(parts)
        # fresh memory each time: the last step's copy may still be reading its own
        sent = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        flat = sent.numpy()
        for nth, part in enumerate(parts):
            if nth < len(fixed):
                at = self._starts[fixed[nth]] - start
            flat[at : at + part.size] = part.reshape(-1)
            at += part.size
        self._all[start : start + at].copy_(sent[:at], non_blocking=is_cuda)


def _aligned(num: int) -> int:
    return -(-num // ALIGNED) * ALIGNED


def room_for_rows(
    num_rows: int, most_tokens: int, num_chunks: int, num_pages: int, shape: SegmentShape
) -> Room:
    """Room for sequences of up to `most_tokens` that hold `num_chunks` together, over a pool of
    `num_pages`."""
    block = choose(shape.dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads, 1).block_n
    return Room(
        pairs=num_rows + num_chunks,
        chunk_pages=num_pages,
        words=num_rows * -(-most_tokens // 32) + num_chunks,
        blocks=num_rows * (-(-most_tokens // block) + 1) + num_chunks,
        own_pages=num_rows * min(num_pages, -(-most_tokens // shape.page)),
    )


class SegmentStep(NamedTuple):
    """What all layers of a step share."""

    back: Angles  # [pairs, 1, r/2] float32: how the query of each pair is turned
    slots: Tensor  # [blocks, keys] int32: where keys lie


def begin_step(tables: SegmentTables, turn: Turn) -> SegmentStep:
    """Launched once per step, after `update`, in front of the first layer."""
    on, device = tables.on_device, tables.rows.device
    cos, sin = turn(-on["pairs"][:, 1])
    size = tables.by_row.block_n
    slots = torch.empty(max(1, tables.room.blocks), size, dtype=torch.int32, device=device)
    place_keys[(min(len(slots), 4 * cores(device)),)](
        slots, on["step"], on["blocks"], on["pages"], on["words"], tables.num_rows,
        BLOCK_N=size, WINDOW=WINDOW, PAGE=tables.shape.page, CHUNK_PAGE=tables.shape.chunk_page,
    )  # fmt: skip
    return SegmentStep(Angles(cos.float().contiguous(), sin.float().contiguous()), slots)


def attend_tables(
    q: Tensor,
    tables: SegmentTables,
    step: SegmentStep,
    key_pages: Tensor,
    value_pages: Tensor,
    at: Angles | None = None,
    coded: CodedPages | None = None,
) -> Tensor:
    """Attention output [B, Hq, D] of the rows of `tables` over pages [P, page, Hk, D].

    q is turned to the rows' positions, or it will be by `at`. Chunks lie in `coded` pages, if the
    tables were made for such.
    """
    num, heads, head_dim = q.shape
    shape, on, device = tables.shape, tables.on_device, q.device
    assert num == tables.num_rows, f"{num} rows for {tables.num_rows}"
    assert q.stride(-1) == 1, "the channels of a head lie side by side"
    assert shape.coded == (coded is not None), "tables are for chunks that lie otherwise"
    kv_heads = shape.num_kv_heads
    turned = _turned(q, tables, step.back, at, None if coded is None else coded.lift)
    cells = (tables.num_pieces + tables.room.most_cells(tables.tiling)) * heads
    part = torch.empty(cells * head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(cells, dtype=torch.float32, device=device)
    row, tile = tables.by_row, tables.by_chunk
    where = (
        part, lse, on["pieces"], on["blocks"], step.slots, on["tiles"], on["counts"], on["pairs"],
        on["pages"], on["words"], tables.num_pieces, tables.at_once, head_dim**-0.5 * LOG2_E,
        *_row_strides(key_pages), *_row_strides(value_pages),
    )  # fmt: skip
    sizes = {
        "G": heads // kv_heads, "HK": kv_heads, "D": head_dim, "BLOCK_D": padded(head_dim),
        "ROW_M": row.block_m, "ROW_N": row.block_n, "ROW_STAGES": row.stages,
        "TILE_M": tile.block_m, "TILE_N": tile.block_n, "TILE_STAGES": tile.stages,
        "PAGE": shape.chunk_page, "PRECISION": precision(q), "num_warps": tile.warps,
    }  # fmt: skip
    grid = (tables.at_once + tables.num_pieces * kv_heads,)
    if coded is None:
        attend_cells[grid](turned, key_pages, value_pages, *where, **sizes)
    else:
        attend_code_cells[grid](
            turned, key_pages, value_pages, coded.keys, coded.values,
            coded.scales.view(torch.int32), *where,
            BLOCK_C=max(16, padded(head_dim) // 2), CODE_STAGES=CODE_STAGES, **sizes,
        )  # fmt: skip
    out = torch.empty(num, heads, head_dim, dtype=q.dtype, device=device)
    merge_cells[(num, heads)](
        out, part, lse, on["row_pieces"], on["row_cells"], tables.num_pieces, *out.stride()[:2],
        HQ=heads, D=head_dim, BLOCK_D=padded(head_dim), PART_S=PART_S, num_warps=2,
    )  # fmt: skip
    return out


def _turned(
    q: Tensor, tables: SegmentTables, back: Angles, at: Angles | None, lift: Tensor | None
) -> Tensor:
    """The queries of all pairs [pairs, Hq, D]."""
    (_, heads, head_dim), half = q.shape, back.cos.shape[-1]
    pairs = tables.room.pairs
    turned = torch.empty(pairs, heads, head_dim, dtype=q.dtype, device=q.device)
    block_h = min(TURN_HEADS, triton.next_power_of_2(heads))
    placed = back if at is None else Angles(at.cos.contiguous(), at.sin.contiguous())
    turn_queries[pairs, triton.cdiv(heads, block_h)](
        q, turned, *placed, *back, tables.on_device["pairs"], back.cos if lift is None else lift,
        *q.stride()[:2], tables.num_rows,
        HQ=heads, G=heads // tables.shape.num_kv_heads, D=head_dim, HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=block_h, PLACED=at is not None, LIFTED=lift is not None, num_warps=4,
    )  # fmt: skip
    return turned


def _row_strides(pages: Tensor) -> tuple[int, int]:
    """Row and head stride of pages [P, page, Hk, D] that lie behind each other."""
    page, row, head, one = pages.stride()
    assert one == 1, "the channels of a head lie side by side"
    assert page == pages.shape[1] * row, "pages lie behind each other"
    return row, head


class _TablesCache(threading.local):
    """What the next layer will need again. Each thread has its own."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.kept: tuple[Sequence[SegmentedRows], Tensor] | None = None  # keeps the key's objects
        self.made: tuple[SegmentTables, SegmentStep] | None = None


_cache = _TablesCache()


def attend_segments(
    q: Tensor,
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    key_pages: Tensor,
    value_pages: Tensor,
    turn: Turn,
    coded: CodedPages | None = None,
) -> Tensor:
    """kernels/segments.attend_segments on a GPU. Tables are kept for the next layer: `rows` and
    `ranks` are the same objects there, and have not changed."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "attention over ranks on the host cannot be recorded: a replay would see the old ones; "
            "record gpu/segments.attend_tables instead"
        )
    q = q if q.stride(-1) == 1 else q.contiguous()
    page = key_pages.shape[1]
    is_coded = coded is not None
    shape = SegmentShape(q.shape[1], key_pages.shape[2], q.shape[2], page, q.dtype, is_coded)
    key = (id(rows), id(ranks), shape, stream_of(q.device))
    if _cache.made is None or _cache.key != key:
        tables = _tables_for(positions, ranks, rows, shape, q.device)
        _cache.key, _cache.kept = key, (rows, ranks)
        _cache.made = tables, begin_step(tables, turn)
    tables, step = _cache.made
    return attend_tables(q, tables, step, key_pages, value_pages, None, coded)


def _tables_for(
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    shape: SegmentShape,
    device: torch.device,
) -> SegmentTables:
    """Tables in which every row stands by itself, those of one sequence share its chunks."""
    at, own_keys = positions.tolist(), [rank + 1 for rank in ranks.tolist()]
    chunks: list[Sequence[SharedChunk]] = []
    pages: list[Sequence[int]] = []
    for sequence in rows:
        assert sequence.start == len(chunks), "sequences lie behind each other in the batch"
        for row in range(sequence.start, sequence.end):
            chunks.append(_visible(sequence.chunks, at[row]))
            pages.append(sequence.own.page_table[: -(-own_keys[row] // shape.page)])
    held = [chunk for each in chunks for chunk in each]
    block = choose(shape.dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads, 1).block_n
    room = Room(
        pairs=len(chunks) + len(held),
        chunk_pages=sum(len(chunk.pages) for chunk in held),
        words=sum(-(-chunk.num_tokens // 32) for chunk in held),
        blocks=sum(-(-n // block) for n in own_keys)
        + sum(-(-chunk.num_tokens // min(block, WINDOW)) for chunk in held),
        own_pages=sum(map(len, pages)),
    )
    tables = SegmentTables(len(chunks), room, shape, device)
    assert tables.hold(chunks), "tables were made for these chunks"
    tables.update(own_keys, pages)
    return tables


def _visible(chunks: Sequence[SharedChunk], position: int) -> Sequence[SharedChunk]:
    """What a row at `position` sees of chunks; the same object, if that is all of them."""
    if all(chunk.start + chunk.num_tokens <= position + 1 for chunk in chunks):
        return chunks
    found = []
    for pages, num_tokens, start, replaced in chunks:
        seen = min(num_tokens, position + 1 - start)
        if seen > 0:
            gone = None if replaced is None else replaced[:seen]
            found.append(SharedChunk(pages, seen, start, gone))
    return found
