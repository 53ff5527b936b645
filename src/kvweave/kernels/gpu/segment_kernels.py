"""The kernels of segments.py that attend: rows and tiles over keys and values, and answers merged.

Arguments are called as the tables that they point to (`segment_plan.py` says what is in those).
"""

import triton
import triton.language as tl

from kvweave.kernels.gpu.coded import all_codes, code_scales, high_codes, low_codes

HIDDEN = tl.constexpr(float("-inf"))


@triton.jit
def _block_shift(b, end, blocks_ptr, slots_ptr, BLOCK_N: tl.constexpr):
    """The pair of block b by row, and where its shift lies; -1: there is no such block."""
    pair = tl.load(blocks_ptr + b * 4 + 2, b < end, other=0)
    shift = tl.load(slots_ptr + tl.cast(b, tl.int64) * BLOCK_N + BLOCK_N - 1, b < end, other=-1)
    return pair, shift


@triton.jit
def _shift(slot, v_ptr, v_row, d, D: tl.constexpr):
    """By how much the channels d of values are shifted by what lies at `slot`."""
    at = v_ptr + slot.to(tl.int64) * v_row + d
    return tl.load(at, (d < D) & (slot >= 0), other=0.0).to(tl.float32)


@triton.jit
def _weigh(s, v, acc, m, total, scale, SHIFTED: tl.constexpr, PRECISION: tl.constexpr):
    """One block more: scores s [M, N], HIDDEN where a row does not look, and values v [N, D].
    SHIFTED: the last value is added to each of the others."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == HIDDEN, 0.0, m_new)  # a row that has seen nothing yet
    alpha = tl.exp2(m - base)
    p = tl.exp2(s * scale - base[:, None])
    share = tl.sum(p, 1)
    if SHIFTED:
        last = tl.arange(0, s.shape[1]) == s.shape[1] - 1
        p = tl.where(last[None, :], share[:, None], p)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total * alpha + share


@triton.jit
def _by_row(
    unit, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr, slots_ptr, scale,
    k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr,
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
        if SHIFTED:  # the last row is no key: what it scores, the others score more
            last = j == BLOCK_N - 1
            s += tl.sum(tl.where(last[None, :], s, 0.0), 1)[:, None]
            there = there & (j < BLOCK_N - 1)
        s = tl.where(there[None, :], s, HIDDEN)
        acc, m, total = _weigh(s, v, acc, m, total, scale, SHIFTED, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    part = (cell.to(tl.int64) * HK + head) * G + at
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), at < G)


@triton.jit
def _by_row_codes(
    unit, q_ptr, k_ptr, v_ptr, scales_ptr, own_v_ptr, more_ptr, part_ptr, lse_ptr, pieces_ptr,
    blocks_ptr, slots_ptr, scale, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what `_by_row` does with a piece of codes: the halves of a head's channels are apart."""
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
    own_v = own_v_ptr + head * v_head
    more_at = more_ptr + head * G + at
    more = m
    by0 = c
    by1 = c
    pair = b0
    shift = b0
    if SHIFTED:  # a block ahead, and where it lies two: nothing is waited for
        pair, shift = _block_shift(b0, b1, blocks_ptr, slots_ptr, BLOCK_N)
        more = tl.load(more_at + pair * (HK * G), at < G, other=0.0)
        by0 = _shift(shift, own_v, v_row, c, C)
        by1 = _shift(shift, own_v + C, v_row, c, C)
        pair, shift = _block_shift(b0 + 1, b1, blocks_ptr, slots_ptr, BLOCK_N)
    for b in tl.range(b0, b1, num_stages=STAGES):
        slot = tl.load(slots_ptr + tl.cast(b, tl.int64) * BLOCK_N + j)
        mine = tl.load(blocks_ptr + b * 4 + 2).to(tl.int64) * (HK * G * D)
        there = slot >= 0
        if SHIFTED:  # the last is no key
            there = there & (j < BLOCK_N - 1)
        row = (slot.to(tl.int64) * HK + head) * C
        k = tl.load(k_ptr + row[None, :] + c[:, None], there[None, :] & (c < C)[:, None], 0)
        v = tl.load(v_ptr + row[:, None] + c[None, :], there[:, None] & (c < C)[None, :], 0)
        both = tl.load(scales_ptr + (slot // PAGE * HK + head) * PAGE + slot % PAGE, there, 0)
        q0 = tl.load(q_at + mine, inside, other=0.0)
        q1 = tl.load(q_at + mine + C, inside, other=0.0)
        s = tl.dot(q0, low_codes(k, DTYPE), input_precision=PRECISION)
        s = tl.dot(q1, high_codes(k, DTYPE), s, input_precision=PRECISION)
        k_scale, v_scale = code_scales(both)
        s = s * k_scale[None, :]
        if SHIFTED:
            s += more[:, None]
        s = tl.where(there[None, :], s, HIDDEN)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        base = tl.where(m_new == HIDDEN, 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s * scale - base[:, None])
        share = tl.sum(p, 1)
        total = total * alpha + share
        acc0 = acc0 * alpha[:, None]
        acc1 = acc1 * alpha[:, None]
        if SHIFTED:  # shifts lie as own rows do
            acc0 += share[:, None] * by0[None, :]
            acc1 += share[:, None] * by1[None, :]
            more = tl.load(more_at + pair * (HK * G), at < G, other=0.0)
            by0 = _shift(shift, own_v, v_row, c, C)
            by1 = _shift(shift, own_v + C, v_row, c, C)
            pair, shift = _block_shift(b + 2, b1, blocks_ptr, slots_ptr, BLOCK_N)
        p = (p * v_scale[None, :]).to(DTYPE)
        acc0 = tl.dot(p, low_codes(v, DTYPE), acc0, input_precision=PRECISION)
        acc1 = tl.dot(p, high_codes(v, DTYPE), acc1, input_precision=PRECISION)
        m = m_new
    weight = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    part = (cell.to(tl.int64) * HK + head) * G + at
    part_at = part_ptr + part[:, None] * D + c[None, :]
    tl.store(part_at, acc0 * weight, inside)
    tl.store(part_at + C, acc1 * weight, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), at < G)


@triton.jit
def _by_chunk(
    unit, q_ptr, k_ptr, v_ptr, more_ptr, shifts_ptr, part_ptr, lse_ptr, tiles_ptr, pairs_ptr,
    pages_ptr, words_ptr, first_cell, scale, k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
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
        acc, m, total = _weigh(s, v, acc, m, total, scale, False, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = m + tl.log2(total)
    if SHIFTED:  # all scores of a row by the same, so its weights are what they were
        shift = tl.load(shifts_ptr + pair, here, other=-1)
        by_at = v_ptr + head * v_head + (shift.to(tl.int64) * v_row)[:, None] + d[None, :]
        acc += tl.load(by_at, inside & (shift >= 0)[:, None], other=0.0)
        lse += tl.load(more_ptr + (pair * HK + head) * G + at % G, here, other=0.0) * scale
    cell = first_cell + cut + tl.load(pairs_ptr + pair * 4 + 3, here, other=0)
    part = (cell.to(tl.int64) * HK + head) * G + at % G
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, lse, here)


@triton.jit
def _by_chunk_codes(
    unit, q_ptr, k_ptr, v_ptr, scales_ptr, own_v_ptr, more_ptr, shifts_ptr, part_ptr, lse_ptr,
    tiles_ptr, pairs_ptr, pages_ptr, words_ptr, first_cell, scale, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what `_by_chunk` does, with codes; a block has 64 keys at most."""
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
        keys = tl.trans(all_codes(k, DTYPE, BLOCK_N, BLOCK_C))
        s = tl.dot(q, keys, input_precision=PRECISION)
        k_scale, v_scale = code_scales(both)
        gone = tl.where((j < 32)[None, :], bits0[:, None], bits1[:, None]) >> (j % 32)[None, :]
        s = s * k_scale[None, :]
        s = tl.where(there[None, :] & ((gone & 1) == 0), s, HIDDEN)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        base = tl.where(m_new == HIDDEN, 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s * scale - base[:, None])
        total = total * alpha + tl.sum(p, 1)
        p = (p * v_scale[None, :]).to(DTYPE)
        values = all_codes(v, DTYPE, BLOCK_N, BLOCK_C)
        acc = tl.dot(p, values, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = m + tl.log2(total)
    if SHIFTED:
        shift = tl.load(shifts_ptr + pair, here, other=-1)
        by_at = own_v_ptr + head * v_head + (shift.to(tl.int64) * v_row)[:, None] + d[None, :]
        acc += tl.load(by_at, inside & (shift >= 0)[:, None], other=0.0)
        lse += tl.load(more_ptr + (pair * HK + head) * G + at % G, here, other=0.0) * scale
    cell = first_cell + cut + tl.load(pairs_ptr + pair * 4 + 3, here, other=0)
    part = (cell.to(tl.int64) * HK + head) * G + at % G
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, lse, here)


@triton.jit(do_not_specialize=["first_cell"])
def attend_cells(
    q_ptr, k_ptr, v_ptr, more_ptr, shifts_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr,
    slots_ptr, tiles_ptr, counts_ptr, pairs_ptr, pages_ptr, words_ptr, first_cell, num_walkers,
    scale, k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROW_M: tl.constexpr, ROW_N: tl.constexpr, ROW_STAGES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_STAGES: tl.constexpr,
    PAGE: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first `num_walkers` programs walk over tiles, however many there are, one beside each
    other program of a multiprocessor; every other program answers for a piece."""
    if tl.program_id(0) < num_walkers:
        for unit in range(tl.program_id(0), tl.load(counts_ptr + 1) * HK, num_walkers):
            _by_chunk(
                unit, q_ptr, k_ptr, v_ptr, more_ptr, shifts_ptr, part_ptr, lse_ptr, tiles_ptr,
                pairs_ptr, pages_ptr, words_ptr, first_cell, scale, k_row, k_head, v_row, v_head,
                G, HK, D, BLOCK_D, TILE_M, TILE_N, TILE_STAGES, PAGE, SHIFTED, PRECISION,
            )  # fmt: skip
    else:
        _by_row(
            tl.program_id(0) - num_walkers, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr,
            blocks_ptr, slots_ptr, scale, k_row, k_head, v_row, v_head,
            G, HK, D, BLOCK_D, ROW_M, ROW_N, ROW_STAGES, SHIFTED, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_cell"])
def attend_code_cells(
    q_ptr, k_ptr, v_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, more_ptr, shifts_ptr, part_ptr,
    lse_ptr, pieces_ptr, blocks_ptr, slots_ptr, tiles_ptr, counts_ptr, pairs_ptr, pages_ptr,
    words_ptr, first_cell, num_walkers, scale, k_row, k_head, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, CODE_STAGES: tl.constexpr,
    ROW_M: tl.constexpr, ROW_N: tl.constexpr, ROW_STAGES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_STAGES: tl.constexpr,
    PAGE: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what `attend_cells` does, where chunks lie in 8 bits. There are as many walkers as may run
    at the same time, and as many of these walk as have the same number of tiles."""
    if tl.program_id(0) < num_walkers:
        num_units, walking = tl.load(counts_ptr + 1) * HK, tl.load(counts_ptr + 2)
        first = tl.where(tl.program_id(0) < walking, tl.program_id(0), num_units)
        for unit in range(first, num_units, walking):
            _by_chunk_codes(
                unit, q_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, v_ptr, more_ptr, shifts_ptr,
                part_ptr, lse_ptr, tiles_ptr, pairs_ptr, pages_ptr, words_ptr, first_cell, scale,
                v_row, v_head,
                G, HK, D, BLOCK_C, TILE_M, TILE_N, TILE_STAGES, PAGE, SHIFTED, PRECISION,
            )  # fmt: skip
    else:
        mine = tl.program_id(0) - num_walkers
        if tl.load(pieces_ptr + mine // HK * 4 + 3) > 0:
            _by_row_codes(
                mine, q_ptr, codes_k_ptr, codes_v_ptr, scales_ptr, v_ptr, more_ptr, part_ptr,
                lse_ptr, pieces_ptr, blocks_ptr, slots_ptr, scale, v_row, v_head,
                G, HK, D, BLOCK_C, ROW_M, ROW_N, CODE_STAGES, PAGE, SHIFTED, PRECISION,
            )  # fmt: skip
        else:
            _by_row(
                mine, q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr, slots_ptr,
                scale, k_row, k_head, v_row, v_head,
                G, HK, D, BLOCK_D, ROW_M, ROW_N, ROW_STAGES, SHIFTED, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_cell"])
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
