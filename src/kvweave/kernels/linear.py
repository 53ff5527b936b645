"""Matrix products with weights, plain and in 8-bit integers.

Results can go into memory the caller already has: on a CPU, touching fresh pages for every large
output costs about a third of the product itself (2-core x86-64, bench/prefill.py, 2026-11-15).

`Linear` keeps the weight as the checkpoint has it. `Int8Linear` is for CPUs: weights are rounded to
int8 with one scale per output channel, activations row by row when they arrive, and the product
runs in integers through oneDNN. It is about twice as fast for prefill and not exact; bench/
prefill.py prints both.

Shapes: R rows, I input dims, O output dims.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.errors import ConfigError

# Rows that are quantised and multiplied at a time: what lies between the two stays in the cache.
BLOCK_ROWS = 512


class Projection(Protocol):
    """A product with a fixed matrix. Any thread may use it."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, I] to [R, O], written into `out` [R, O] if given."""
        ...

    def add_to(self, h: Tensor, x: Tensor) -> None:
        """h [R, O] += the product of x [R, I], in place."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b."""

    weight: Tensor  # [O, I]
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_to(self, h: Tensor, x: Tensor) -> None:
        h.addmm_(x, self.weight.t())
        if self.bias is not None:
            h.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """The same product in integers: y ≈ (x_int8 W_int8ᵀ) · row scale · channel scale + b."""

    packed: Tensor  # W_int8 in oneDNN's own blocked layout
    channel_scale: Tensor  # [O] float32
    zero_points: Tensor  # [O] int64, all zero: rounding is symmetric
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), len(self.channel_scale))
        for part, place in _blocks(x, out):
            self._block(part, place)
        return out

    def _block(self, x: Tensor, out: Tensor) -> None:
        row_scale = x.abs().amax(dim=1, keepdim=True).clamp_min_(1e-10).div_(127.0)  # [rows, 1]
        x_int8 = (x / row_scale).round_().to(torch.int8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            x_int8, 1.0, 0, self.packed, self.channel_scale, self.zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        torch.mul(y, row_scale, out=out)
        if self.bias is not None:
            out.add_(self.bias)

    def add_to(self, h: Tensor, x: Tensor) -> None:
        for part, place in _blocks(x, h):
            place.add_(self(part))


def _blocks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows of x and y, BLOCK_ROWS at a time."""
    for start in range(0, len(x), BLOCK_ROWS):
        yield x[start : start + BLOCK_ROWS], y[start : start + BLOCK_ROWS]


def to_int8(linear: Linear) -> Int8Linear:
    """Round the weight of `linear` to int8. Raises ConfigError where torch cannot multiply them."""
    if not hasattr(torch.ops.onednn, "qlinear_prepack"):
        raise ConfigError("quant='int8' needs a torch build with oneDNN; use quant='none'")
    weight = linear.weight.float()
    scale = weight.abs().amax(dim=1).clamp_min_(1e-10).div_(127.0)  # [O]
    w_int8 = (weight / scale[:, None]).round_().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(w_int8, None)
    return Int8Linear(packed, scale, torch.zeros(len(scale), dtype=torch.int64), linear.bias)
