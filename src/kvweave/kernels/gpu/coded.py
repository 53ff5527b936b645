"""The kernels of kernels/coded.py. One program: some rows, one head of keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.rope import Angles
from kvweave.kernels.types import CodedPages, RowMoves

ROWS = 16  # per program
MOST = tl.constexpr(127.0)


@triton.jit
def _byte(d, D: tl.constexpr):
    """Where the code of channel d lies in its head: those of d and d + D/2 share two bytes."""
    return 2 * (d % (D // 2)) + d // (D // 2)


@triton.jit
def _scale_at(slot, head, HK: tl.constexpr, PAGE: tl.constexpr):
    """Of a key; that of its value is the next."""
    return ((slot // PAGE * HK + head) * PAGE + slot % PAGE) * 2


@triton.jit
def _encode(x, codes_at, scale_at, live, inside):
    """Rows x [R, D]: codes, and one scale each."""
    scale = (tl.max(tl.abs(x), 1) / MOST).to(tl.float16)
    step = scale.to(tl.float32)
    step = tl.where(step == 0.0, 1.0, step)
    found = tl.floor(x / step[:, None] + 0.5)
    found = tl.minimum(tl.maximum(found, -MOST), MOST)
    tl.store(codes_at, found.to(tl.int8), inside)
    tl.store(scale_at, scale, live)


@triton.jit
def _encode_rows(
    keys_ptr, values_ptr, slots_ptr, k_ptr, v_ptr, scales_ptr, lift_ptr, num_rows,
    HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LIFTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(1)
    live = n < num_rows
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d < D)[None, :]
    slot = tl.load(slots_ptr + n, live, other=0)
    at = (n.to(tl.int64) * HK + head)[:, None] * D + d[None, :]
    to = (slot * HK + head)[:, None] * D + _byte(d, D)[None, :]
    scale_at = scales_ptr + _scale_at(slot, head, HK, PAGE)
    k = tl.load(keys_ptr + at, inside, other=0.0).to(tl.float32)
    if LIFTED:
        k = k / tl.load(lift_ptr + head * D + d, d < D, other=1.0)[None, :]
    _encode(k, k_ptr + to, scale_at, live, inside)
    v = tl.load(values_ptr + at, inside, other=0.0).to(tl.float32)
    _encode(v, v_ptr + to, scale_at + 1, live, inside)


@triton.jit
def _either(raw_ptr, codes_ptr, row, d, scale, is_raw, is_code, D: tl.constexpr):
    """Channels d of rows of which some are raw and some are codes, in float32."""
    raw = tl.load(raw_ptr + row + d, is_raw, other=0.0).to(tl.float32)
    code = tl.load(codes_ptr + row + _byte(d, D), is_code, other=0).to(tl.float32)
    return raw + code * scale[:, None]


@triton.jit
def _relocate_coded(
    keys_ptr, values_ptr, k_ptr, v_ptr, scales_ptr, lift_ptr, out_keys_ptr, out_values_ptr,
    source_ptr, target_ptr, which_ptr, cos_ptr, sin_ptr, num_rows,
    HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    LIFTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(1)
    live = n < num_rows
    source = tl.load(source_ptr + n, live, other=0)
    target = tl.load(target_ptr + n, live, other=0)
    which = tl.load(which_ptr + n, live, other=0)
    raw, code = live & (which == 0), live & (which > 0)
    row = (source * HK + head)[:, None] * D
    out = (target * HK + head)[:, None] * D
    scale_at = scales_ptr + _scale_at(source, head, HK, PAGE)
    k_scale = tl.load(scale_at, code, other=0.0).to(tl.float32)
    v_scale = tl.load(scale_at + 1, code, other=0.0).to(tl.float32)
    d = tl.arange(0, BLOCK_D)[None, :]
    is_raw, is_code = raw[:, None] & (d < D), code[:, None] & (d < D)
    v = _either(values_ptr, v_ptr, row, d, v_scale, is_raw, is_code, D)
    tl.store(out_values_ptr + out + d, v, live[:, None] & (d < D))
    j = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = live[:, None] & (j < HALF)
    is_raw, is_code = raw[:, None] & (j < HALF), code[:, None] & (j < HALF)
    cos = tl.load(cos_ptr + which[:, None] * HALF + j, in_half, other=0.0)
    sin = tl.load(sin_ptr + which[:, None] * HALF + j, in_half, other=0.0)
    k1 = _either(keys_ptr, k_ptr, row, j, k_scale, is_raw, is_code, D)
    k2 = _either(keys_ptr, k_ptr, row, HALF + j, k_scale, is_raw, is_code, D)
    if LIFTED:
        lift = tl.load(lift_ptr + head * D + j, j < HALF, other=1.0)
        k1 = tl.where(is_code, k1 * lift, k1)
        k2 = tl.where(is_code, k2 * lift, k2)
    tl.store(out_keys_ptr + out + j, tl.where(is_raw, k1, k1 * cos - k2 * sin), in_half)
    tl.store(out_keys_ptr + out + HALF + j, tl.where(is_raw, k2, k2 * cos + k1 * sin), in_half)
    if D > 2 * HALF:
        beyond = (d >= 2 * HALF) & (d < D)
        is_raw, is_code = raw[:, None] & beyond, code[:, None] & beyond
        rest = _either(keys_ptr, k_ptr, row, d, k_scale, is_raw, is_code, D)
        if LIFTED:
            lift = tl.load(lift_ptr + head * D + d, beyond, other=1.0)
            rest = tl.where(is_code, rest * lift, rest)
        tl.store(out_keys_ptr + out + d, rest, live[:, None] & beyond)


def encode_rows(keys: Tensor, values: Tensor, slots: Tensor, coded: CodedPages) -> None:
    """As kernels/coded.encode_rows, of rows without gaps."""
    num, heads, head_dim = keys.shape
    if not num:
        return
    lift = coded.lift
    _encode_rows[(-(-num // ROWS), heads)](
        keys, values, slots, *_bytes(coded), coded.scales, coded.scales if lift is None else lift,
        num, HK=heads, D=head_dim, PAGE=coded.keys.shape[1], LIFTED=lift is not None,
        BLOCK_R=ROWS, BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def relocate_coded(
    keys: Tensor,
    values: Tensor,
    coded: CodedPages,
    moves: RowMoves,
    turn: Angles,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """As kernels/coded.relocate_coded, in memory without gaps."""
    _, heads, head_dim = keys.shape
    num_rows, half, lift = moves.source.shape[0], turn.cos.shape[-1], coded.lift
    _relocate_coded[(-(-num_rows // ROWS), heads)](
        keys, values, *_bytes(coded), coded.scales, coded.scales if lift is None else lift,
        out_keys, out_values, *moves, *turn, num_rows,
        HK=heads, D=head_dim, HALF=half, PAGE=coded.keys.shape[1], LIFTED=lift is not None,
        BLOCK_R=ROWS, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def _bytes(coded: CodedPages) -> tuple[Tensor, Tensor]:
    return coded.keys.view(torch.int8), coded.values.view(torch.int8)
