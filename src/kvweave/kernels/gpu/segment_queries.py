"""The kernels of segments.py in front of attention: queries turned, keys found.

Arguments are called as the tables that they point to (`segment_plan.py` says what is in those).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def turn_queries(
    q_ptr, out_ptr, more_ptr, k_ptr, at_cos, at_sin, back_cos, back_sin, pairs_ptr, shifts_ptr,
    lift_ptr, q_row, q_head, k_row, k_head, num_rows,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    PLACED: tl.constexpr, LIFTED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The query of every pair [pairs, HQ, D]: turned back by its start. PLACED: first to its row's
    position, and rounded, as if that had been done before. LIFTED: multiplied by what the keys of
    chunks, whose pairs come behind those of the rows, were divided by. SHIFTED: and what the shift
    of its chunk adds to its scores [pairs, HQ]."""
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
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        tl.store(out_at + j[None, :], y1, inside)
        tl.store(out_at + HALF + j[None, :], y2, inside)
        more = tl.zeros([BLOCK_H], tl.float32)
        shift = tl.load(shifts_ptr + pair)
        by_at = k_ptr + shift.to(tl.int64) * k_row + (h // G)[:, None] * k_head
        if SHIFTED:
            moved = inside & (shift >= 0)
            more += tl.sum(y1 * tl.load(by_at + j[None, :], moved, other=0.0), 1)
            more += tl.sum(y2 * tl.load(by_at + HALF + j[None, :], moved, other=0.0), 1)
        if D > 2 * HALF:
            d = tl.arange(0, BLOCK_D)
            rest = (h < HQ)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
            x = tl.load(x_at + d[None, :], rest, other=0.0)
            if LIFTED:
                lifts = rest & (pair >= num_rows)
                x = x.to(tl.float32) * tl.load(lift_at + d[None, :], lifts, other=1.0)
            tl.store(out_at + d[None, :], x, rest)
            if SHIFTED:
                by = tl.load(by_at + d[None, :], rest & (shift >= 0), other=0.0)
                more += tl.sum(x.to(tl.float32) * by, 1)
        if SHIFTED:
            tl.store(more_ptr + pair * HQ + h, more, h < HQ)


@triton.jit(do_not_specialize=["num_rows"])
def place_keys(
    slots_ptr, step_ptr, blocks_ptr, pages_ptr, words_ptr, shifts_ptr, num_rows,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, CHUNK_PAGE: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """Where the keys of every block by row lie in the pool [blocks, BLOCK_N]; -1: there is none.
    Pairs behind those of the rows look at chunks, whose pages may hold more. SHIFTED: the last of a
    block is the row of its shift."""
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
        tl.store(to + nth, page * size + slot % size, live)
        tl.store(to + j, none, (j >= num) & (j < (BLOCK_N - 1 if SHIFTED else BLOCK_N)))
        if SHIFTED:
            tl.store(to + BLOCK_N - 1, tl.load(shifts_ptr + tl.load(block + 2)))
