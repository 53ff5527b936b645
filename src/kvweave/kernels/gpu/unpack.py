"""The kernel of kernels/unpack.py. One program: some tokens, all of their heads.

Codes, parameters and plain elements are three views of the same bytes, so nothing is cast inside.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.rope import Angles
from kvweave.kernels.types import Packing, StoredRows

TOKENS = 8  # per program


@triton.jit
def _codes(code_ptr, first, d, mask, D: tl.constexpr, NIBBLES: tl.constexpr):
    if NIBBLES:
        both = tl.load(code_ptr + first + d % (D // 2), mask, other=0).to(tl.int32)
        return ((both >> (d // (D // 2) * 4)) & 15).to(tl.float32)
    return tl.load(code_ptr + first + d, mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["base_ptr", "index_ptr", "length_ptr", "row_ptr", "num_tokens"])
def _unpack_rows(
    code_ptr, half_ptr, base_ptr, index_ptr, length_ptr, row_ptr, cos_ptr, sin_ptr,
    out_k_ptr, out_v_ptr, num_tokens, ok_row, ok_head, ov_row, ov_head,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, CODE_BYTES: tl.constexpr,
    PARAMS: tl.constexpr, GROUP: tl.constexpr, NIBBLES: tl.constexpr, TURNS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < num_tokens
    base = tl.load(base_ptr + tokens, live, other=0)
    index = tl.load(index_ptr + tokens, live, other=0)
    length = tl.load(length_ptr + tokens, live, other=0)
    rows = tl.load(row_ptr + tokens, live, other=0)
    WIDTH: tl.constexpr = HEADS * D  # channels of a token
    ROW: tl.constexpr = WIDTH // 2 if NIBBLES else WIDTH  # codes of a token
    HEAD: tl.constexpr = D // 2 if NIBBLES else D
    VALUE_GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    # in bytes; plain elements have no parameters, so their values follow their keys at once
    key_groups = (length + GROUP - 1) // GROUP
    k_params = base + length * ROW * CODE_BYTES
    v_codes = k_params + 2 * PARAMS * key_groups * WIDTH
    v_params = v_codes + length * ROW * CODE_BYTES
    k_first = base // CODE_BYTES + index * ROW
    v_first = v_codes // CODE_BYTES + index * ROW
    k_scale = k_params // 2 + index // GROUP * WIDTH
    k_apart = key_groups * WIDTH
    v_scale = v_params // 2 + index * HEADS * VALUE_GROUPS
    v_apart = length * HEADS * VALUE_GROUPS
    j = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = live[:, None] & (j < HALF)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_row = live[:, None] & (d < D)
    beyond = in_row & (d >= 2 * HALF)
    if TURNS:
        at = tokens.to(tl.int64)[:, None] * HALF + j
        cos = tl.load(cos_ptr + at, in_half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, in_half, other=0.0).to(tl.float32)
    for head in range(HEADS):
        first = (k_first + head * HEAD)[:, None]
        k1 = _codes(code_ptr, first, j, in_half, D, NIBBLES)
        k2 = _codes(code_ptr, first, j + HALF, in_half, D, NIBBLES)
        if PARAMS:
            scale = half_ptr + (k_scale + head * D)[:, None] + j
            k1 = k1 * tl.load(scale, in_half, other=0.0).to(tl.float32)
            k2 = k2 * tl.load(scale + HALF, in_half, other=0.0).to(tl.float32)
            if PARAMS == 2:
                low = scale + k_apart[:, None]
                k1 += tl.load(low, in_half, other=0.0).to(tl.float32)
                k2 += tl.load(low + HALF, in_half, other=0.0).to(tl.float32)
        out1 = out_k_ptr + (rows * ok_row + head * ok_head)[:, None] + j
        if TURNS:
            tl.store(out1, k1 * cos - k2 * sin, in_half)
            tl.store(out1 + HALF, k2 * cos + k1 * sin, in_half)
        else:
            tl.store(out1, k1, in_half)
            tl.store(out1 + HALF, k2, in_half)
        if D > 2 * HALF:
            rest = _codes(code_ptr, first, d, beyond, D, NIBBLES)
            if PARAMS:
                scale = half_ptr + (k_scale + head * D)[:, None] + d
                rest = rest * tl.load(scale, beyond, other=0.0).to(tl.float32)
                if PARAMS == 2:
                    rest += tl.load(scale + k_apart[:, None], beyond, other=0.0).to(tl.float32)
            tl.store(out_k_ptr + (rows * ok_row + head * ok_head)[:, None] + d, rest, beyond)
        v = _codes(code_ptr, (v_first + head * HEAD)[:, None], d, in_row, D, NIBBLES)
        if PARAMS:
            scale = half_ptr + (v_scale + head * VALUE_GROUPS)[:, None] + d // GROUP
            v = v * tl.load(scale, in_row, other=0.0).to(tl.float32)
            if PARAMS == 2:
                v += tl.load(scale + v_apart[:, None], in_row, other=0.0).to(tl.float32)
        tl.store(out_v_ptr + (rows * ov_row + head * ov_head)[:, None] + d, v, in_row)


def unpack_rows(
    data: Tensor,
    packing: Packing,
    rows: StoredRows,
    turn: Angles | None,
    out_k: Tensor,
    out_v: Tensor,
) -> None:
    """Run kernels/unpack.unpack; `data` has an even number of bytes."""
    num, (heads, head_dim) = len(rows.base), out_k.shape[1:]
    assert all(x.stride(-1) == 1 for x in (out_k, out_v)), "heads lie apart"
    halves = data.view(torch.float16)
    if packing.kind == "plain":
        codes = data.view(packing.stored)
    else:
        codes = data.view(torch.float8_e4m3fn) if packing.kind == "fp8" else data
    half = head_dim // 2 if turn is None else turn.cos.shape[-1]
    cos, sin = (halves, halves) if turn is None else turn
    _unpack_rows[(triton.cdiv(num, TOKENS),)](
        codes, halves, rows.base, rows.nth, rows.length, rows.row, cos, sin,
        out_k, out_v, num, *out_k.stride()[:2], *out_v.stride()[:2],
        HEADS=heads, D=head_dim, HALF=half, CODE_BYTES=codes.element_size(),
        PARAMS={"plain": 0, "fp8": 1, "int": 2}[packing.kind], GROUP=packing.group,
        NIBBLES=packing.kind == "int" and packing.bits == 4, TURNS=turn is not None,
        BLOCK_T=TOKENS, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
