"""Group quantisation of keys and values: 8 or 4 bits, or fp8 e4m3, with fp16 parameters per group.

    integer:  x ≈ low + q · scale      q in 0..2^bits − 1, one (low, scale) per group
    fp8:      x ≈ q · scale            q is e4m3, one scale per group

A group is a run of `group` values along one axis. Keys have a few channels that are large for all
tokens, so they are grouped along tokens (axis 0), each channel by itself; values have no such
channels and are grouped along the head dimension (axis 2), each token by itself.

The parameters are rounded outwards to fp16 (low down, scale up) before they are used, so encoding
and decoding see the same numbers and nothing is clipped: the error of an integer code is at most
half a step. Plain PyTorch here is the definition, the CPU path and the oracle for kernels; it runs
on any device.

Shapes: T tokens, H kv heads, D head dim, N groups along the grouped axis (the last may be short).
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest e4m3 value
_HALF_MAX = 65504.0


class Groups(NamedTuple):
    """One quantised tensor."""

    q: Tensor  # uint8: [T, H, D] for 8 bits and fp8, [T, H, D/2] for 4 bits
    scale: Tensor  # fp16: [N, H, D] grouped along tokens, [T, H, N] along the head dimension
    low: Tensor | None  # fp16, shaped like scale; None for fp8


def quantise(x: Tensor, *, bits: int, group: int, axis: int) -> Groups:
    """Integer codes of x [T, H, D]. bits is 8 or 4; 4 packs channels d and d + D/2 in one byte."""
    _check(x, bits, axis)
    grouped = _split(x.float(), group, axis)
    low, high = grouped.amin(axis + 1), grouped.amax(axis + 1)
    low16 = _half_down(low)
    scale16 = _half_up((high - low16.float()) / (2**bits - 1))
    step = _nonzero(scale16)
    q = (grouped - low16.float().unsqueeze(axis + 1)) / step.unsqueeze(axis + 1)
    codes = q.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(axis, axis + 1)
    codes = codes.narrow(axis, 0, x.shape[axis])  # [T, H, D]
    if bits == 4:
        half = x.shape[2] // 2
        codes = codes[..., :half] | (codes[..., half:] << 4)  # [T, H, D/2]
    return Groups(codes.contiguous(), scale16, low16)


def dequantise(groups: Groups, *, bits: int, group: int, axis: int, out: Tensor) -> Tensor:
    """Write the values that `groups` stands for into out [T, H, D], in out's dtype."""
    assert groups.low is not None, "integer codes have a low"
    q = groups.q
    if bits == 4:
        q = torch.cat((q & 15, q >> 4), dim=-1)  # [T, H, D]
    # compute in fp32 and round once; converting first and scaling in place is 3× as fast on a CPU
    # as letting one operator promote the types
    work = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    work.copy_(q)
    for values, scale, low in _parts(work, group, axis, groups.scale, groups.low):
        if axis == 0:
            torch.addcmul(low, values, scale, out=values)
        else:  # two parameters, each one value for a run of them: faster one after the other
            values.mul_(scale).add_(low)
    return out if work is out else out.copy_(work)


def quantise_fp8(x: Tensor, *, group: int, axis: int) -> Groups:
    """e4m3 codes of x [T, H, D], scaled so that each group's largest magnitude is 448."""
    _check(x, 8, axis)
    grouped = _split(x.float(), group, axis)
    scale16 = _half_up(grouped.abs().amax(axis + 1) / FP8_MAX)
    step = _nonzero(scale16)
    q = (grouped / step.unsqueeze(axis + 1)).clamp_(-FP8_MAX, FP8_MAX)
    codes = q.to(torch.float8_e4m3fn).flatten(axis, axis + 1).narrow(axis, 0, x.shape[axis])
    return Groups(codes.contiguous().view(torch.uint8), scale16, None)


def dequantise_fp8(groups: Groups, *, group: int, axis: int, out: Tensor) -> Tensor:
    """Write fp8 codes as `dequantise` writes integer ones."""
    # e4m3 is an fp16 with a shorter exponent and mantissa: moved to the same bits it is the same
    # number times 2^-8. Sign-extend, shift by 7, clear the copy of the sign in the exponent.
    # Ten times as fast on a CPU as converting from float8.
    bits = groups.q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    work = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    work.copy_(bits.view(torch.float16))
    for values, scale in _parts(work, group, axis, groups.scale):
        values.mul_(scale * 256.0)
    return out if work is out else out.copy_(work)


def num_groups(length: int, group: int) -> int:
    return -(-length // group)


def _parts(x: Tensor, group: int, axis: int, *params: Tensor) -> list[list[Tensor]]:
    """Views of x with each group on an axis of its own, and fp32 parameters that broadcast.

    At most two: the whole groups together, and the short last one.
    """
    wide = [p.float() for p in params]
    if wide[0].shape[axis] == 1:
        return [[x, *wide]]  # one group: it broadcasts as it is
    whole = x.shape[axis] // group
    cuts = [(0, whole, group), (whole, whole + 1, x.shape[axis] - whole * group)]
    parts: list[list[Tensor]] = []
    for first, end, length in cuts:
        if end == first or length == 0:
            continue
        shape = list(x.shape)
        shape[axis : axis + 1] = [end - first, length]
        view = x.narrow(axis, first * group, (end - first) * length).view(shape)
        scaled = [p.narrow(axis, first, end - first).unsqueeze(axis + 1) for p in wide]
        parts.append([view, *scaled])
    return parts


def _split(x: Tensor, group: int, axis: int) -> Tensor:
    """[.., N, group, ..]: the axis cut into groups, the last one filled up by repeating its end."""
    length = x.shape[axis]
    missing = num_groups(length, group) * group - length
    if missing:
        last = x.narrow(axis, length - 1, 1)
        shape = list(x.shape)
        shape[axis] = missing
        x = torch.cat((x, last.expand(shape)), dim=axis)
    shape = list(x.shape)
    shape[axis : axis + 1] = [shape[axis] // group, group]
    return x.reshape(shape)


def _nonzero(scale: Tensor) -> Tensor:
    """fp32 to divide by: a group of equal values has scale 0 and codes 0."""
    return scale.float().masked_fill(scale == 0, 1.0)


def _half_down(x: Tensor) -> Tensor:
    """fp16 not above x."""
    half = x.to(torch.float16)
    below = torch.nextafter(half, half.new_tensor(-torch.inf))
    return torch.where(half.float() > x, below, half)


def _half_up(x: Tensor) -> Tensor:
    return -_half_down(-x)


def _check(x: Tensor, bits: int, axis: int) -> None:
    assert x.dim() == 3, f"want [T, H, D], got {tuple(x.shape)}"
    assert axis in (0, 2), f"group along tokens (0) or channels (2), not {axis}"
    if bits == 4 and x.shape[2] % 2:
        raise ValueError("4 bits pack two channels: head dim must be even; use int8")
    if x.numel() and not bool(x.abs().amax() <= _HALF_MAX):
        raise ValueError("values beyond ±65504 or not finite cannot be quantised; use raw")
