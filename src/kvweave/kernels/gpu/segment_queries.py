"""The kernels of segments.py in front of attention: queries turned, what shifts add, keys found.

Arguments are called as the tables that they point to (`segment_plan.py` says what is in those).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
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


@triton.jit(do_not_specialize=["num_words"])
def add_shifts(
    added_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, pairs_ptr, shifts_ptr, lift_ptr, num_words,
    k_row, k_head,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    LIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the shift of a pair's chunk adds to the scores of its query [HQ, 32 num_words], from the
    column of its first mask bit on: products with cosines and sines of the places [.., HALF]. The
    query is turned; LIFTED: what it was multiplied by is taken back."""
    pair = tl.program_id(0)
    slot, num = tl.load(shifts_ptr + pair * 2), tl.load(shifts_ptr + pair * 2 + 1)
    if slot >= 0:
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        j = tl.arange(0, BLOCK_HALF)
        n = tl.arange(0, BLOCK_N)
        inside = (h < HQ)[:, None] & (j < HALF)[None, :]
        q_at = q_ptr + (pair.to(tl.int64) * HQ + h)[:, None] * D
        by_at = k_ptr + slot.to(tl.int64) * k_row + (h // G)[:, None] * k_head
        q1 = tl.load(q_at + j[None, :], inside, other=0.0).to(tl.float32)
        q2 = tl.load(q_at + HALF + j[None, :], inside, other=0.0).to(tl.float32)
        b1 = tl.load(by_at + j[None, :], inside, other=0.0).to(tl.float32)
        b2 = tl.load(by_at + HALF + j[None, :], inside, other=0.0).to(tl.float32)
        if LIFTED:
            lift = tl.load(lift_ptr + (h // G)[:, None] * D + j[None, :], inside, other=1.0)
            b1 = b1 / lift
            b2 = b2 / lift
        even = (q1 * b1 + q2 * b2).to(q_ptr.dtype.element_ty)
        odd = (q2 * b1 - q1 * b2).to(q_ptr.dtype.element_ty)
        still = tl.zeros([BLOCK_H], tl.float32)  # of channels that do not turn
        if D > 2 * HALF:
            d = tl.arange(0, BLOCK_D)
            rest = (h < HQ)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
            q = tl.load(q_at + d[None, :], rest, other=0.0).to(tl.float32)
            by = tl.load(by_at + d[None, :], rest, other=0.0).to(tl.float32)
            if LIFTED:
                by = by / tl.load(lift_ptr + (h // G)[:, None] * D + d[None, :], rest, other=1.0)
            still = tl.sum(q * by, 1)
        column = tl.load(pairs_ptr + pair * 4 + 2).to(tl.int64) * 32
        to = added_ptr + h.to(tl.int64)[:, None] * num_words * 32 + column
        for first in range(0, num, BLOCK_N):
            at = first + n
            there = (at < num)[:, None] & (j < HALF)[None, :]
            cos = tl.load(cos_ptr + at[:, None] * HALF + j[None, :], there, other=0.0)
            sin = tl.load(sin_ptr + at[:, None] * HALF + j[None, :], there, other=0.0)
            s = tl.dot(even, tl.trans(cos), input_precision=PRECISION)
            s = tl.dot(odd, tl.trans(sin), s, input_precision=PRECISION) + still[:, None]
            tl.store(to + at[None, :], s, (h < HQ)[:, None] & (at < num)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def place_keys(
    slots_ptr, columns_ptr, step_ptr, blocks_ptr, pages_ptr, words_ptr, shifts_ptr, num_rows,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, CHUNK_PAGE: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """Where the keys of every block by row lie in the pool [blocks, BLOCK_N]; -1: there is none.
    Pairs behind those of the rows look at chunks, whose pages may hold more. SHIFTED: and in which
    column of what shifts add; -1: they add nothing."""
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
        none = tl.full([WINDOW], -1, tl.int32)
        behind = (j >= num) & (j < BLOCK_N)
        tl.store(to + nth, page * size + slot % size, live)
        tl.store(to + j, none, behind)
        if SHIFTED:
            shift = tl.load(shifts_ptr + tl.load(block + 2) * 2)
            column = columns_ptr + tl.cast(b, tl.int64) * BLOCK_N
            tl.store(column + nth, tl.where(shift >= 0, bit + j, -1), live)
            tl.store(column + j, none, behind)
