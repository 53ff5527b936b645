"""Matrix products with weights, as the checkpoint has them.

Results can go into memory the caller already has: on a CPU, touching fresh pages for every large
output costs about a third of the product itself (2-core x86-64, bench/prefill.py, 2026-11-15).

Weights in 8 bits are in rounded.py; native/product.py multiplies them.

Shapes: R rows, I input dims, O output dims.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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
