"""The kernels of kernels/coded.py. One program: some rows, one head of keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick
from kvweave.kernels.rope import Angles
from kvweave.kernels.types import CodedPages, RowMoves


@triton.jit
def low_codes(x, DTYPE: tl.constexpr):
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
def high_codes(x, DTYPE: tl.constexpr):
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
def all_codes(x, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The codes of numbers x [N, C], one half of the channels behind the other: [N, 2 C]."""
    both = tl.permute(tl.join(low_codes(x, DTYPE), high_codes(x, DTYPE)), (0, 2, 1))
    return tl.reshape(both, (BLOCK_N, 2 * BLOCK_C))


@triton.jit
def code_scales(both):
    """The scales of keys and of values, from numbers that hold two halves."""
    of_keys = (both & 65535).to(tl.int16).to(tl.float16, bitcast=True)
    of_values = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return of_keys.to(tl.float32), of_values.to(tl.float32)


ROWS = 16  # per program
MOST = tl.constexpr(127.0)


@triton.jit
def _byte(d, D: tl.constexpr):
    """Where the code of channel d lies in its head: those of d and d + D/2 share two bytes."""
    return 2 * (d % (D // 2)) + d // (D // 2)


@triton.jit
def _scale_at(slot, head, HK: tl.constexpr, PAGE: tl.constexpr):
    """Where the scale of a key lies; that of its value is the next."""
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


@triton.jit(do_not_specialize=["slots_ptr", "num_rows"])
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
def _pairs(ptr, row, c, inside, scale):
    """Channels c and c + D/2 of coded rows, in float32: they share a number."""
    both = tl.load(ptr + row + c, inside, other=0).to(tl.int32)
    return ((both << 24) >> 24).to(tl.float32) * scale, (both >> 8).to(tl.float32) * scale


@quick
@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "which_ptr", "num_rows"])
def _relocate_coded(
    keys_ptr, values_ptr, k_ptr, v_ptr, scales_ptr, lift_ptr, out_keys_ptr, out_values_ptr,
    source_ptr, target_ptr, which_ptr, cos_ptr, sin_ptr, num_rows,
    HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    LIFTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Two channels share a number, and RoPE turns two together: these are the same two where it
    turns all of a head (HALF is D/2). Elsewhere keys are read byte by byte."""
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(1)
    live = n < num_rows
    source = tl.load(source_ptr + n, live, other=0)
    target = tl.load(target_ptr + n, live, other=0)
    which = tl.load(which_ptr + n, live, other=0)
    code = live & (which > 0)
    scale_at = scales_ptr + _scale_at(source, head, HK, PAGE)
    k_scale = tl.load(scale_at, code, other=0.0).to(tl.float32)[:, None]
    v_scale = tl.load(scale_at + 1, code, other=0.0).to(tl.float32)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = code[:, None] & (c < D // 2)
    from_c = (source * HK + head)[:, None] * (D // 2)
    out = (target * HK + head)[:, None] * D
    low, high = _pairs(v_ptr, from_c, c, inside, v_scale)
    tl.store(out_values_ptr + out + c, low, inside)
    tl.store(out_values_ptr + out + D // 2 + c, high, inside)
    low, high = _pairs(k_ptr, from_c, c, inside, k_scale)
    if LIFTED:
        low *= tl.load(lift_ptr + head * D + c, c < D // 2, other=1.0)
        high *= tl.load(lift_ptr + head * D + D // 2 + c, c < D // 2, other=1.0)
    at = which[:, None] * HALF
    if HALF == D // 2:
        cos = tl.load(cos_ptr + at + c, inside, other=0.0)
        sin = tl.load(sin_ptr + at + c, inside, other=0.0)
        tl.store(out_keys_ptr + out + c, low * cos - high * sin, inside)
        tl.store(out_keys_ptr + out + HALF + c, high * cos + low * sin, inside)
    else:
        byte_ptr = k_ptr.to(tl.pointer_type(tl.int8))
        d = tl.arange(0, BLOCK_D)[None, :]
        wide = code[:, None] & (d < D)
        other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
        j = tl.where(d < HALF, d, d - HALF)
        turns = wide & (d < 2 * HALF)
        cos = tl.load(cos_ptr + at + j, turns, other=1.0)
        sin = tl.load(sin_ptr + at + j, turns, other=0.0)
        row = (source * HK + head)[:, None] * D
        k1 = tl.load(byte_ptr + row + _byte(d, D), wide, other=0).to(tl.float32) * k_scale
        k2 = tl.load(byte_ptr + row + _byte(other, D), wide, other=0).to(tl.float32) * k_scale
        if LIFTED:
            k1 *= tl.load(lift_ptr + head * D + d, d < D, other=1.0)
            k2 *= tl.load(lift_ptr + head * D + other, d < D, other=1.0)
        tl.store(out_keys_ptr + out + d, k1 * cos + tl.where(d < HALF, -k2, k2) * sin, wide)
    raw = live & (which == 0)
    if tl.max(raw.to(tl.int32), 0) > 0:  # the exact front: few programs have some
        d = tl.arange(0, BLOCK_D)[None, :]
        plain = raw[:, None] & (d < D)
        row = (source * HK + head)[:, None] * D
        tl.store(out_keys_ptr + out + d, tl.load(keys_ptr + row + d, plain, other=0.0), plain)
        tl.store(out_values_ptr + out + d, tl.load(values_ptr + row + d, plain, other=0.0), plain)


def encode_rows(keys: Tensor, values: Tensor, slots: Tensor, coded: CodedPages) -> None:
    """Run kernels/coded.encode_rows on rows without gaps."""
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
    """Run kernels/coded.relocate_coded in memory without gaps."""
    _, heads, head_dim = keys.shape
    num_rows, half, lift = moves.source.shape[0], turn.cos.shape[-1], coded.lift
    _relocate_coded[(-(-num_rows // ROWS), heads)](
        keys, values, coded.keys, coded.values, coded.scales,
        coded.scales if lift is None else lift, out_keys, out_values, *moves, *turn, num_rows,
        HK=heads, D=head_dim, HALF=half, PAGE=coded.keys.shape[1], LIFTED=lift is not None,
        BLOCK_R=ROWS, BLOCK_C=triton.next_power_of_2(head_dim // 2),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def _bytes(coded: CodedPages) -> tuple[Tensor, Tensor]:
    return coded.keys.view(torch.int8), coded.values.view(torch.int8)
