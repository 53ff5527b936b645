"""Matrix products with weights, plain and in 8-bit integers.

`Linear` keeps the weight as the checkpoint has it. `Int8Linear` is for CPUs: weights are rounded to
int8 with one scale per output channel, activations row by row when they arrive, and the product
runs in integers through oneDNN. It is about twice as fast for prefill and not exact; bench/
prefill.py prints both.

Shapes: R rows, I input dims, O output dims.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.errors import ConfigError

Projection = Callable[[Tensor], Tensor]  # [R, I] -> [R, O]


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b."""

    weight: Tensor  # [O, I]
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """The same product in integers: y ≈ (x_int8 W_int8ᵀ) · row scale · channel scale + b."""

    packed: Tensor  # W_int8 in oneDNN's own blocked layout
    channel_scale: Tensor  # [O] float32
    zero_points: Tensor  # [O] int64, all zero: rounding is symmetric
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        row_scale = x.abs().amax(dim=1, keepdim=True).clamp_min_(1e-10).div_(127.0)  # [R, 1]
        x_int8 = (x / row_scale).round_().to(torch.int8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            x_int8, 1.0, 0, self.packed, self.channel_scale, self.zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y.mul_(row_scale)
        return y if self.bias is None else y.add_(self.bias)


def to_int8(linear: Linear) -> Int8Linear:
    """Round the weight of `linear` to int8. Raises ConfigError where torch cannot multiply them."""
    if not hasattr(torch.ops.onednn, "qlinear_prepack"):
        raise ConfigError("quant='int8' needs a torch build with oneDNN; use quant='none'")
    weight = linear.weight.float()
    scale = weight.abs().amax(dim=1).clamp_min_(1e-10).div_(127.0)  # [O]
    w_int8 = (weight / scale[:, None]).round_().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(w_int8, None)
    return Int8Linear(packed, scale, torch.zeros(len(scale), dtype=torch.int64), linear.bias)
