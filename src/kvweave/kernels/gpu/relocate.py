"""The kernel of kernels/relocate.py. One program: some rows, one head of keys and values."""

import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.rope import Angles
from kvweave.kernels.types import RowMoves

ROWS = 16  # per program


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
    """As kernels/relocate.relocate, in memory without gaps: a launch of few arguments takes the
    host less time, and there are two per layer."""
    _, heads, head_dim = keys.shape
    source, target, which = moves
    num_rows = source.shape[0]
    half = head_dim // 2 if turn is None else turn.cos.shape[-1]
    cos, sin = (source, source) if turn is None else (turn.cos, turn.sin)
    _relocate_rows[(-(-num_rows // ROWS), heads)](
        keys, values, out_keys, out_values, source, target, source if which is None else which,
        cos, sin, num_rows, ROW=heads * head_dim,
        D=head_dim, HALF=half, TURNS=turn is not None, BLOCK_R=ROWS,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
