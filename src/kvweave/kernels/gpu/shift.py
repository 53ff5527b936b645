"""The kernel of kernels/shift.py. One program: some rows, all of their heads."""

import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.rope import Angles

ROWS = 8  # per program


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
    """As kernels/shift.shift."""
    heads, head_dim = keys.shape[1:]
    half = turn.cos.shape[-1]
    assert by_k.is_contiguous(), "one vector behind the other"
    assert by_v.is_contiguous(), "one vector behind the other"
    _shift_rows[(triton.cdiv(len(row), ROWS),)](
        keys, values, by_k, by_v, chunk, row, turn.cos, turn.sin, len(row),
        *keys.stride()[:2], *values.stride()[:2],
        HEADS=heads, D=head_dim, HALF=half, BLOCK_R=ROWS,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
