"""Matrix products with weights, as the checkpoint has them.

Results can go into memory the caller already has: on a CPU, touching fresh pages for every large
output costs about a third of the product itself (2-core x86-64, bench/prefill.py, 2026-11-15).

Where compiled kernels are loaded they multiply float32 on a CPU: what a row gets is the same beside
any others, to the last bit. The sums of a library depend on how many rows there are.

Weights in 8 bits are in rounded.py; native/product.py multiplies them.

Shapes: R rows, I input dims, O output dims.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled
from kvweave.kernels.fixed_order import is_fixed, multiply_in_blocks
from kvweave.kernels.native import operators as in_c
from kvweave.kernels.native.library import CompiledLibrary


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
        if (library := self._find_compiled(x, out)) is not None:
            y = x.new_empty(len(x), len(self.weight)) if out is None else out
            return in_c.multiply_floats(library, x, self.weight, self.bias, y, add=False)
        if is_fixed(x):
            return multiply_in_blocks(x, self.weight, self.bias, out)
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_to(self, h: Tensor, x: Tensor) -> None:
        if (library := self._find_compiled(x, h)) is not None:
            in_c.multiply_floats(library, x, self.weight, self.bias, h, add=True)
            return
        if is_fixed(x):
            h.add_(multiply_in_blocks(x, self.weight, self.bias, None))
            return
        h.addmm_(x, self.weight.t())
        if self.bias is not None:
            h.add_(self.bias)

    def _find_compiled(self, x: Tensor, y: Tensor | None) -> CompiledLibrary | None:
        """The compiled kernels, where they take this product."""
        given = (x, self.weight) if y is None else (x, self.weight, y)
        return find_compiled(*given) if self.weight.is_contiguous() else None
