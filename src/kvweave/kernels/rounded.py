"""Weights in 8 bits and what a product with them is; native/product.py computes it in C.

Weights have one scale per output channel, and every row of activations one of its own. A few input
dims carry values many times those of the others; rounded to 8 bits beside them, the rest of the row
would be left with a few steps. Such a dim is split: it becomes several columns with the same
weights, and each takes an equal share of its value.
The shares are rounded so that they add up to what the value itself would be rounded to:

    floor(y) = floor(y / n) + floor((y + 1) / n) + … + floor((y + n - 1) / n)

Dims that are large all the time can also be evened out: their values are divided by a power of two,
and their weights multiplied by it. That costs nothing where values are multiplied by shares anyway.

Shapes: I input dims, C columns (C >= I), O output dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-10  # scale of a row or channel of zeros
MOST_PARTS = 64  # of one dim
MOST_POWER = 12  # of two, up or down, that a dim is evened out by


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """One matrix in 8 bits. Read-only."""

    codes: Tensor  # [O, C] int8; column i < I is of dim i
    scale: Tensor  # [O] float32
    more: Tensor | None  # [C - I] int64: the dims of the columns behind; None: no dim is split
    share: Tensor | None  # [C] float32: of the dim's value that the column takes; None: all
    offset: Tensor  # [C] float32: is added before the integers are cut
    bias: Tensor | None  # [O]

    def columns(self, x: Tensor) -> Tensor:
        """[R, I] as [R, C]: split dims by their shares. May be x itself."""
        if self.share is None:
            return x
        if self.more is None:
            return x * self.share.to(x.dtype)
        # gathering all columns would take several times as long as multiplying most of them
        wide, dims = x.new_empty(len(x), len(self.share)), x.shape[1]
        torch.mul(x, self.share[:dims].to(x.dtype), out=wide[:, :dims])
        torch.mul(x[:, self.more], self.share[dims:].to(x.dtype), out=wide[:, dims:])
        return wide

    def multiply(self, x: Tensor, sums: torch.dtype = torch.float64) -> Tensor:
        """Return x [R, I] times the weights, [R, O]: the definition of the product, and slow.

        A row is rounded to 8 bits by its own scale, so that its result depends on no other row.
        """
        columns = self.columns(x)
        row_scale = columns.abs().amax(dim=1, keepdim=True).clamp_min_(SMALLEST).div_(127.0)
        codes = torch.addcmul(self.offset, columns, row_scale.reciprocal()).floor_()
        y = (codes.to(sums) @ self.codes.to(sums).T * self.scale).float() * row_scale
        return y if self.bias is None else y + self.bias


def extra_columns(in_dim: int) -> int:
    """Columns that dims with large values are split into: an eighth more at most, to whole 64s."""
    return max((in_dim + in_dim // 8) // 64 * 64 - in_dim, 0)


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


def even_dims(largest: Tensor, heaviest: Tensor, power: float) -> Tensor:
    """Powers of two [I] that even out dims: `largest` [I] are the largest values seen of them,
    `heaviest` [I] their largest weights. All of the values' spread for `power` 1, all of the
    weights' for 0."""
    values, weights = largest.clamp_min(1e-6).log2(), heaviest.clamp_min(SMALLEST).log2()
    powers = values * power - weights * (1 - power)
    return (powers - powers.median()).round().clamp(-MOST_POWER, MOST_POWER).to(torch.int64)


def largest_of(x: Tensor, dim: int) -> Tensor:
    """The largest absolute values along a dim. Two passes, and no copy of x as `abs` would make: a
    head has half a gigabyte."""
    return torch.maximum(x.amax(dim=dim), x.amin(dim=dim).neg_())


def round_weight(
    weight: Tensor,
    bias: Tensor | None,
    parts: Tensor | None = None,
    powers: Tensor | None = None,
) -> RoundedWeight:
    """[O, I] float32 in 8 bits, dim i as `parts[i]` columns, its values over 2^`powers[i]`."""
    even = None
    if powers is not None and bool(powers.any()):
        factor = torch.exp2(powers.float())
        weight, even = weight * factor, factor.reciprocal()
    scale = largest_of(weight, dim=1).clamp_min_(SMALLEST).div_(127.0)  # [O]
    codes = (weight / scale[:, None]).round_().to(torch.int8)
    dim_count = weight.shape[1]
    if parts is None or int(parts.sum()) == dim_count:
        offset = torch.full((dim_count,), 0.5)
        return RoundedWeight(codes, scale, None, even, offset, bias)
    every = torch.arange(dim_count)
    more = every.repeat_interleave(parts - 1)  # [C - I]
    behind = parts.cumsum(0) - parts - every  # columns of the dims before, among `more`
    nth = torch.cat([torch.zeros_like(every), torch.arange(len(more)) - behind[more] + 1])
    of = torch.cat([parts, parts[more]]).float()  # [C]
    codes = torch.cat([codes, codes[:, more]], dim=1)
    share = of.reciprocal()
    if even is not None:
        share *= torch.cat([even, even[more]])
    return RoundedWeight(codes, scale, more, share, (nth + 0.5) / of, bias)
