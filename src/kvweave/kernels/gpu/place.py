"""The kernels of kernels/place.py. One program: some tokens, all of their heads.

The angle of a (token, frequency) is computed once and used for every head. Sines of large angles
are the full-precision ones: a position of 100,000 is turned as exactly as position 1.
"""

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 8  # per program: tokens * D/2 lanes of 4-byte angles fill two warps


@triton.jit
def _place_rows(
    k_ptr, v_ptr, pos_ptr, slot_ptr, freq_ptr, out_k_ptr, out_v_ptr,
    num_tokens, factor,
    k_row, k_head, v_row, v_head, ok_row, ok_head, ov_row, ov_head,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < num_tokens
    tokens = tokens.to(tl.int64)
    at = tl.load(pos_ptr + tokens, live, other=0)
    rows = tl.load(slot_ptr + tokens, live, other=0).to(tl.int64) if HAS_SLOTS else at.to(tl.int64)
    j = tl.arange(0, BLOCK_HALF)
    in_half = live[:, None] & (j < HALF)[None, :]
    phase = at.to(tl.float32)[:, None] * tl.load(freq_ptr + j, j < HALF, other=0.0)[None, :]
    cos, sin = tl.cos(phase) * factor, tl.sin(phase) * factor
    d = tl.arange(0, BLOCK_D)
    in_row = live[:, None] & (d < D)[None, :]
    beyond = in_row & (d >= 2 * HALF)[None, :]
    for head in range(HEADS):
        k1_at = k_ptr + tokens[:, None] * k_row + head * k_head + j[None, :]
        k1 = tl.load(k1_at, in_half, other=0.0).to(tl.float32)
        k2 = tl.load(k1_at + HALF, in_half, other=0.0).to(tl.float32)
        out1 = out_k_ptr + rows[:, None] * ok_row + head * ok_head + j[None, :]
        tl.store(out1, k1 * cos - k2 * sin, in_half)
        tl.store(out1 + HALF, k2 * cos + k1 * sin, in_half)
        if D > 2 * HALF:
            rest = tl.load(
                k_ptr + tokens[:, None] * k_row + head * k_head + d[None, :], beyond, other=0.0
            )
            tl.store(out_k_ptr + rows[:, None] * ok_row + head * ok_head + d[None, :], rest, beyond)
        v = tl.load(v_ptr + tokens[:, None] * v_row + head * v_head + d[None, :], in_row, other=0.0)
        tl.store(out_v_ptr + rows[:, None] * ov_row + head * ov_head + d[None, :], v, in_row)


def place_rows(
    stored_k: Tensor,
    stored_v: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    out_k: Tensor,
    out_v: Tensor,
    slots: Tensor | None,
) -> None:
    """As kernels/place.place; any strides but the last, which is 1."""
    num, heads, head_dim = stored_k.shape
    if num == 0:
        return
    assert all(x.stride(-1) == 1 for x in (stored_k, stored_v, out_k, out_v)), "heads lie apart"
    _place_rows[(triton.cdiv(num, TOKENS),)](
        stored_k, stored_v, positions, positions if slots is None else slots, inv_freq,
        out_k, out_v, num, attention_factor,
        *stored_k.stride()[:2], *stored_v.stride()[:2], *out_k.stride()[:2], *out_v.stride()[:2],
        HEADS=heads, D=head_dim, HALF=len(inv_freq),
        BLOCK_T=TOKENS, BLOCK_HALF=triton.next_power_of_2(len(inv_freq)),
        BLOCK_D=triton.next_power_of_2(head_dim), HAS_SLOTS=slots is not None,
    )  # fmt: skip
