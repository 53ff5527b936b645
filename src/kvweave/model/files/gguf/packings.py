"""How GGUF packs numbers, and how to unpack them to float32.

A tensor's last axis is cut into blocks of a fixed number of values. A block is a small record: one
or two half-precision scales and the values in a few bits each. The record layouts below are the
file format; each `_unpack_*` function turns N records into float32 [N, values].

Everything here is pure and works on views: a caller that slices rows out of a memory-mapped file
reads only those pages.

By hand, though the `gguf` package does the same (tests hold the two equal bit for bit): it would
bring pyyaml, requests and tqdm to machines that have torch and numpy alone, and it takes up to
twice as long. Its reader is no replacement for file.py either: it meets a cut or altered file with
an IndexError, a ValueError or a UnicodeDecodeError from somewhere inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Records = npt.NDArray[Any]  # [N] of a record dtype below
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFPacking:
    """One GGUF tensor type."""

    name: str  # as GGUF tools print it
    values: int  # numbers per block
    record: np.dtype[Any]  # one block in the file
    unpack: Callable[[Records], F32]  # [N] records → [N, values]

    @property
    def record_bytes(self) -> int:
        return self.record.itemsize


def dequantise(rows: Bits, packing: GGUFPacking) -> F32:
    """Float32 [R, C] from the packed bytes [R, C / values × record bytes] of R rows."""
    num_rows = len(rows)
    records = np.ascontiguousarray(rows).reshape(-1).view(packing.record)
    return packing.unpack(records).reshape(num_rows, -1)


def _fields(bits: Bits, shifts: tuple[int, ...], mask: int, run: int) -> Bits:
    """Small fields out of packed bytes, [N, B] → [N, B × len(shifts)].

    Bytes come in runs of `run`; within a run all values of the lowest shift come first.
    """
    runs = bits.reshape(len(bits), -1, 1, run)
    split = (runs >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)
    return split.reshape(len(bits), -1)


def _scale(records: Records, field: str) -> F32:
    """A half-precision field as float32 [N, 1]."""
    return records[field].astype(np.float32)[:, None]


_U4 = (0, 4)
_U2 = (0, 2, 4, 6)
_U1 = (0, 1, 2, 3, 4, 5, 6, 7)

_RAW_F32 = np.dtype([("x", "<f4")])
_RAW_F16 = np.dtype([("x", "<f2")])
_RAW_BF16 = np.dtype([("x", "<u2")])
_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
_Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("m", "<f2")])
_Q3_K = np.dtype([("qh", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
_Q4_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
_Q5_K = np.dtype(
    [("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
)
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def _unpack_float(r: Records) -> F32:
    return r["x"].astype(np.float32)[:, None]


def _unpack_bf16(r: Records) -> F32:
    return (r["x"].astype(np.uint32) << 16).view(np.float32)[:, None]


def _unpack_q4_0(r: Records) -> F32:
    q = _fields(r["qs"], _U4, 0x0F, run=16).astype(np.int8) - np.int8(8)
    return _scale(r, "d") * q.astype(np.float32)


def _unpack_q4_1(r: Records) -> F32:
    q = _fields(r["qs"], _U4, 0x0F, run=16).astype(np.float32)
    return _scale(r, "d") * q + _scale(r, "m")


def _five_bits(r: Records) -> Bits:
    """The fifth bits stand apart: bit i of the 32-bit field belongs to value i."""
    low = _fields(r["qs"], _U4, 0x0F, run=16)
    high = np.unpackbits(r["qh"], axis=1, bitorder="little")
    return low | (high << np.uint8(4))


def _unpack_q5_0(r: Records) -> F32:
    q = _five_bits(r).astype(np.int8) - np.int8(16)
    return _scale(r, "d") * q.astype(np.float32)


def _unpack_q5_1(r: Records) -> F32:
    return _scale(r, "d") * _five_bits(r).astype(np.float32) + _scale(r, "m")


def _unpack_q8_0(r: Records) -> F32:
    return r["qs"].astype(np.float32) * _scale(r, "d")


# The K packings share one shape: 256 values, a scale per group of 16 or 32 values, itself packed.


def _scale_groups(scales: F32, q: npt.NDArray[Any], mins: F32 | None = None) -> F32:
    """scale × q (− min) with one scale per group: scales [N, G], q [N, 256]."""
    grouped = q.reshape(len(q), scales.shape[1], -1).astype(np.float32)
    out = scales[:, :, None] * grouped
    if mins is not None:
        out -= mins[:, :, None]
    return out.reshape(len(q), -1)


def _unpack_q2_k(r: Records) -> F32:
    q = _fields(r["qs"], _U2, 0x03, run=32)
    scales = _scale(r, "d") * (r["scales"] & 0x0F).astype(np.float32)
    mins = _scale(r, "m") * (r["scales"] >> 4).astype(np.float32)
    return _scale_groups(scales, q, mins)


def _unpack_q3_k(r: Records) -> F32:
    # 16 scales of 6 bits: low nibbles in bytes 0–7, top two bits in bytes 8–11
    low_bits = _fields(r["scales"][:, :8], _U4, 0x0F, run=8)
    top_bits = _fields(r["scales"][:, 8:], _U2, 0x03, run=4)
    scales = (low_bits | (top_bits << np.uint8(4))).astype(np.int8) - np.int8(32)
    # a set high bit means "subtract nothing"
    missing = _fields(r["qh"], _U1, 0x01, run=32) ^ np.uint8(1)
    q = _fields(r["qs"], _U2, 0x03, run=32).astype(np.int8) - (missing << np.uint8(2)).astype(
        np.int8
    )
    return _scale_groups(_scale(r, "d") * scales.astype(np.float32), q)


def _scales_and_mins(r: Records) -> tuple[F32, F32]:
    """Q4_K and Q5_K: 8 scales and 8 mins of 6 bits each in 12 bytes."""
    s, m, mixed = r["scales"][:, 0:4], r["scales"][:, 4:8], r["scales"][:, 8:12]
    scales = np.concatenate([s & 0x3F, (mixed & 0x0F) | ((s >> 2) & 0x30)], axis=1)
    mins = np.concatenate([m & 0x3F, (mixed >> 4) | ((m >> 2) & 0x30)], axis=1)
    return _scale(r, "d") * scales.astype(np.float32), _scale(r, "m") * mins.astype(np.float32)


def _unpack_q4_k(r: Records) -> F32:
    scales, mins = _scales_and_mins(r)
    return _scale_groups(scales, _fields(r["qs"], _U4, 0x0F, run=32), mins)


def _unpack_q5_k(r: Records) -> F32:
    scales, mins = _scales_and_mins(r)
    high = _fields(r["qh"], _U1, 0x01, run=32)
    q = _fields(r["qs"], _U4, 0x0F, run=32) | (high << np.uint8(4))
    return _scale_groups(scales, q, mins)


def _unpack_q6_k(r: Records) -> F32:
    low = _fields(r["ql"], _U4, 0x0F, run=64)
    high = _fields(r["qh"], _U2, 0x03, run=32)
    q = (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)
    return _scale_groups(_scale(r, "d") * r["scales"].astype(np.float32), q)


# type number in the file → packing
PACKINGS: dict[int, GGUFPacking] = {
    0: GGUFPacking("F32", 1, _RAW_F32, _unpack_float),
    1: GGUFPacking("F16", 1, _RAW_F16, _unpack_float),
    2: GGUFPacking("Q4_0", 32, _Q4_0, _unpack_q4_0),
    3: GGUFPacking("Q4_1", 32, _Q4_1, _unpack_q4_1),
    6: GGUFPacking("Q5_0", 32, _Q5_0, _unpack_q5_0),
    7: GGUFPacking("Q5_1", 32, _Q5_1, _unpack_q5_1),
    8: GGUFPacking("Q8_0", 32, _Q8_0, _unpack_q8_0),
    10: GGUFPacking("Q2_K", 256, _Q2_K, _unpack_q2_k),
    11: GGUFPacking("Q3_K", 256, _Q3_K, _unpack_q3_k),
    12: GGUFPacking("Q4_K", 256, _Q4_K, _unpack_q4_k),
    13: GGUFPacking("Q5_K", 256, _Q5_K, _unpack_q5_k),
    14: GGUFPacking("Q6_K", 256, _Q6_K, _unpack_q6_k),
    30: GGUFPacking("BF16", 1, _RAW_BF16, _unpack_bf16),
}

# types we know by name and refuse
REFUSED: dict[int, str] = {
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
