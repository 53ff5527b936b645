"""Codes and scales as numbers, from the bytes that chunks in 8 bits lie in (`kernels/coded.py`).

For kernels that attend over them: a number holds the codes of two channels, or the scales of a key
and of its value.
"""

import triton
import triton.language as tl


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
    """Of keys and of values, from numbers that hold two halves."""
    of_keys = (both & 65535).to(tl.int16).to(tl.float16, bitcast=True)
    of_values = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return of_keys.to(tl.float32), of_values.to(tl.float32)
