"""Weights in few bits: what they are, apart from how they are multiplied (products.py).

int8 has one scale per output channel. A few input dims carry values many times those of the others;
rounded to 8 bits beside them, the rest of the row would be left with a few steps. Such a dim is
split: it becomes several columns with the same weights, and each takes an equal share of its value.
The shares are rounded so that they add up to what the value itself would be rounded to:

    floor(y) = floor(y / n) + floor((y + 1) / n) + … + floor((y + n - 1) / n)

Four bits are taken where they lose nothing: the weights of a 4-bit GGUF lie on a grid of 16 values
per group of 32, and the grid can be read off the float32 weights that the file was converted to.

Shapes: I input dims, C columns (C >= I), O output dims, G groups of an output channel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # weights that share a grid, in every 4-bit GGUF type
STEPS = 15  # of a grid of 16 values
OFF_GRID = 0.02  # of a step, which a weight may lie beside its grid: float32 and half scales round
SMALLEST = 1e-10  # scale of a row or channel of zeros
MOST_PARTS = 64  # of one dim


@dataclass(frozen=True, slots=True)
class FourBitGroups:
    """Weights on a grid: w = low + step · code."""

    codes: Tensor  # [O, I] int32, 0 to 15
    low: Tensor  # [O, G] float32
    step: Tensor  # [O, G] float32


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """One matrix in 8 bits, and in 4 if it has such a grid. Read-only."""

    codes: Tensor  # [O, C] int8; column i < I is of dim i
    scale: Tensor  # [O] float32
    more: Tensor | None  # [C - I] int64: the dims of the columns behind; None: no dim is split
    share: Tensor | None  # [C] float32: of the dim's value that the column takes
    offset: Tensor  # [C] float32: is added before the integers are cut
    bias: Tensor | None  # [O]
    groups: FourBitGroups | None = None

    def columns(self, x: Tensor) -> Tensor:
        """[R, I] as [R, C]: split dims by their shares. May be x itself."""
        if self.more is None or self.share is None:
            return x
        # gathering all columns takes longer than the product itself
        wide, dims = x.new_empty(len(x), len(self.share)), x.shape[1]
        torch.mul(x, self.share[:dims].to(x.dtype), out=wide[:, :dims])
        torch.mul(x[:, self.more], self.share[dims:].to(x.dtype), out=wide[:, dims:])
        return wide


def split_dims(largest: Tensor, extra: int) -> Tensor:
    """How many columns each dim becomes [I], `extra` more than dims in all, so that the largest
    share is as small as can be. `largest` [I]: the largest value seen of each dim."""
    top = float(largest.max())
    if extra <= 0:
        return torch.ones(len(largest), dtype=torch.int64)
    if top <= 0.0:  # nothing to go by
        return split_dims(torch.ones_like(largest), extra)
    low, high = top / MOST_PARTS, top  # of the largest share
    for _ in range(40):
        tried = (low + high) / 2
        if int((largest / tried).ceil().clamp_min(1).sum()) - len(largest) <= extra:
            high = tried
        else:
            low = tried
    parts = (largest / high).ceil().clamp(1, MOST_PARTS).to(torch.int64)
    while (left := len(largest) + extra - int(parts.sum())) > 0:  # ties: a few are left over
        parts[(largest / parts).topk(min(left, len(largest))).indices] += 1
    return parts


def round_weight(
    weight: Tensor, bias: Tensor | None, parts: Tensor | None = None, *, four_bits: bool = False
) -> RoundedWeight:
    """[O, I] float32 in 8 bits, dim i as `parts[i]` columns; with `four_bits` its grid too, if it
    has one."""
    scale = weight.abs().amax(dim=1).clamp_min_(SMALLEST).div_(127.0)  # [O]
    codes = (weight / scale[:, None]).round_().to(torch.int8)
    groups = find_groups(weight) if four_bits else None
    dim_count = weight.shape[1]
    if parts is None or int(parts.sum()) == dim_count:
        offset = torch.full((dim_count,), 0.5)
        return RoundedWeight(codes, scale, None, None, offset, bias, groups)
    every = torch.arange(dim_count)
    more = every.repeat_interleave(parts - 1)  # [C - I]
    behind = parts.cumsum(0) - parts - every  # columns of the dims before, among `more`
    nth = torch.cat([torch.zeros_like(every), torch.arange(len(more)) - behind[more] + 1])
    of = torch.cat([parts, parts[more]]).float()  # [C]
    codes = torch.cat([codes, codes[:, more]], dim=1)
    return RoundedWeight(codes, scale, more, of.reciprocal(), (nth + 0.5) / of, bias, groups)


def find_groups(weight: Tensor) -> FourBitGroups | None:
    """The 4-bit grid that [O, I] lies on. None: it has none."""
    if weight.shape[1] % GROUP or _grid(weight[:4]) is None:  # a few rows tell at once
        return None
    return _grid(weight)


def _grid(weight: Tensor) -> FourBitGroups | None:
    """Every group spans some whole number of steps: the largest step that all its values fit."""
    grouped = weight.reshape(len(weight), -1, GROUP)  # [O, G, 32]
    low, high = grouped.aminmax(dim=-1)
    span = high - low
    step = torch.zeros_like(span)
    left = (span > 0).nonzero(as_tuple=True)  # groups whose step is not found yet
    for steps in (STEPS, *range(1, STEPS)):  # nearly all span all of it
        if not len(left[0]):
            break
        tried = span[left] / steps
        at = (grouped[left] - low[left][:, None]) / tried[:, None]
        fits = (at - at.round()).abs().amax(dim=-1) < OFF_GRID
        found = tuple(index[fits] for index in left)
        step[found] = tried[fits]
        left = tuple(index[~fits] for index in left)
    if len(left[0]):
        return None
    codes = ((grouped - low[..., None]) / step.clamp_min(SMALLEST)[..., None]).round_()
    return FourBitGroups(codes.to(torch.int32).view_as(weight), low, step)
