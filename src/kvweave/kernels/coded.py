"""Chunk KV in 8 bits in the pages of a pool: written once, laid out turned, read by attention.

    x ≈ code · scale      code in -127..127, one fp16 scale per token and KV head

Attention takes such codes as they are: a scale belongs to a whole key or value, so it is multiplied
into a score or a weight, and integers up to 127 are exact in every precision. That is why scales
are not finer than this, as those of stored chunk KV are (`quantise.py`).

One scale for all channels of a key is too coarse where a few of them are large for all tokens, as
a projection with a bias makes them. Such channels are divided by a fixed `lift`, which is alike for
the two channels that RoPE turns together and so stays outside of it; queries that look at codes are
multiplied by it instead (`model/paged_kv.py`).

Shapes: N rows, S turns, T rows of a memory, Hk KV heads, D head dim, r rotary dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.dispatch import has_kernels
from kvweave.kernels.place import relocate_reference
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import CodedPages, RowMoves

MOST = 127.0  # the largest code


def encode_rows(keys: Tensor, values: Tensor, slots: Tensor, coded: CodedPages) -> None:
    """Write keys and values [N, Hk, D], keys turned to their places, to `slots` [N] of pages."""
    if has_kernels(keys) and keys.is_contiguous() and values.is_contiguous():
        from kvweave.kernels.gpu.coded import encode_rows as on_gpu

        on_gpu(keys, values, slots, coded)
        return
    encode_rows_reference(keys, values, slots, coded)


def encode_rows_reference(keys: Tensor, values: Tensor, slots: Tensor, coded: CodedPages) -> None:
    """The definition of `encode_rows`."""
    lifted = keys.float() if coded.lift is None else keys.float() / coded.lift
    page, nth = slots // coded.keys.shape[1], slots % coded.keys.shape[1]
    for which, x, codes in ((0, lifted, coded.keys), (1, values.float(), coded.values)):
        scale = (x.abs().amax(-1) / MOST).to(torch.float16)  # [N, Hk]
        step = scale.float().masked_fill(scale == 0, 1.0)[..., None]
        found = (x / step + 0.5).floor().clamp_(-MOST, MOST).to(torch.int16)
        low, high = found.chunk(2, dim=-1)
        codes.flatten(0, 1)[slots] = (low & 255) | (high << 8)
        coded.scales[page, :, nth, which] = scale


def codes_of(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes [.., D] of numbers [.., D/2]."""
    return torch.cat(((pairs << 8) >> 8, pairs >> 8), dim=-1).to(dtype)


def scales_between(coded: CodedPages, start: int, end: int) -> Tensor:
    """[n, Hk, 2] of slots [start, end)."""
    size = coded.keys.shape[1]
    first = start // size
    some = coded.scales[first : -(-end // size)].transpose(1, 2).flatten(0, 1)
    return some[start - first * size : end - first * size]


def decode_rows(coded: CodedPages, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [N, Hk, D] of `slots` [N]."""
    size = coded.keys.shape[1]
    scales = coded.scales[slots // size, :, slots % size].float()  # [N, Hk, 2]
    keys, values = (
        codes_of(pairs.flatten(0, 1).index_select(0, slots), torch.float32) * scale[..., None]
        for pairs, scale in zip((coded.keys, coded.values), scales.unbind(-1), strict=True)
    )
    if coded.lift is not None:
        keys = keys * coded.lift
    return keys.to(dtype), values.to(dtype)


def relocate_coded(
    keys: Tensor,
    values: Tensor,
    coded: CodedPages,
    moves: RowMoves,
    turn: Angles,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Do what `place.relocate` does with rows of which those with turn 0 come from keys and values
    [T, Hk, D] as they are, and all others from slots of coded pages."""
    if not moves.source.shape[0]:
        return
    memory = (keys, values, out_keys, out_values)
    if has_kernels(keys) and all(x.is_contiguous() for x in memory):
        from kvweave.kernels.gpu.coded import relocate_coded as on_gpu

        on_gpu(keys, values, coded, moves, turn, out_keys, out_values)
        return
    relocate_coded_reference(keys, values, coded, moves, turn, out_keys, out_values)


def relocate_coded_reference(
    keys: Tensor,
    values: Tensor,
    coded: CodedPages,
    moves: RowMoves,
    turn: Angles,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """The definition of `relocate_coded`."""
    source, target, which = moves
    assert which is not None, "each row has a turn"
    is_raw = which == 0
    raw = RowMoves(source[is_raw], target[is_raw])
    relocate_reference(keys, values, raw, None, out_keys, out_values)
    k, v = decode_rows(coded, source[~is_raw], torch.float32)
    angles = Angles(*(x.index_select(0, which[~is_raw]).float() for x in turn))
    out_keys[target[~is_raw]] = rotate(k, angles).to(out_keys.dtype)
    out_values[target[~is_raw]] = v.to(out_values.dtype)
