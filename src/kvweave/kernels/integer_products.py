"""Products in 8 bits, for those who round weights: compiled kernels alone multiply them. Where
there are none, weights stay in float32.

Which dims are split and how far they are evened out (rounded.py) is tried on rows that went through
the exact product: what changes its result least.

Shapes: R rows, I input dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.native.product import MOST_COLUMNS, NativeProduct
from kvweave.kernels.rounded import (
    SMALLEST,
    even_dims,
    largest_of,
    round_weight,
    split_dims,
)


def integer_kernels() -> CompiledLibrary | None:
    """Return the compiled kernels, if this CPU has instructions for integers. Compiles them, once
    per machine."""
    library = native_kernels().library
    return library if library is not None and library.has_integers else None


def round_linear(
    linear: Linear, library: CompiledLibrary, parts: Tensor, powers: Tensor | None = None
) -> Projection:
    """Return `linear` in 8 bits, dims split into `parts` and evened out by `powers`; `linear`
    itself where a sum of so many columns might overflow."""
    if int(parts.sum()) > MOST_COLUMNS:
        return linear
    return NativeProduct(round_weight(linear.weight, linear.bias, parts, powers), library)


# Prose, dialogue, figures and code: what a prompt is made of.
TEXT = """The ferry leaves the harbour at 6:40 and reaches the island before eight, unless the wind
comes from the north. "You could wait for the noon boat," said the woman behind the counter, "but
then the museum will be closed." We took the early one. Of the 212 seats only nineteen were taken.
The lighthouse, built in 1874 by a father and his two daughters, is 31 metres high; its lamp was
turned by hand until electricity came. To compute the average height of all towers on the coast:

def mean(values: list[float]) -> float:
    total = sum(values)
    return total / len(values) if values else 0.0

Question: who built the lighthouse? Answer: a father and his two daughters built it in 1874.
Water boils at a lower temperature on a mountain because the pressure of the air is lower there.
"""
# How far values of dims are evened out, at their weights' cost: these are tried; None: not at all
EVENINGS = (None, 0.2, 0.35, 0.5, 0.65)
TRIED_ROWS, TRIED_CHANNELS = 64, 256  # of a product, for that


def best_dims(linear: Linear, rows: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    """Columns and powers of two [I] of every dim, `extra` columns more than dims: of EVENINGS the
    one that changes results least. `rows` [R, I] went through the exact product."""
    largest = rows.abs().amax(dim=0)
    tried = rows[:: -(-len(rows) // TRIED_ROWS)]
    weight = linear.weight[:: -(-len(linear.weight) // TRIED_CHANNELS)]
    heaviest = largest_of(linear.weight, dim=0)
    exact = tried @ weight.T
    size = exact.square().mean(dim=1).clamp_min(SMALLEST)  # rows count alike
    found: list[tuple[float, Tensor, Tensor]] = []
    for evening in EVENINGS:
        powers = torch.zeros(len(largest), dtype=torch.int64)
        if evening is not None:
            powers = even_dims(largest, heaviest, evening)
        parts = split_dims(largest / torch.exp2(powers.float()), extra)
        # sums in float32: near enough to tell what rounding changes
        found_rows = round_weight(weight, None, parts, powers).multiply(tried, torch.float32)
        apart = found_rows - exact
        found.append((float((apart.square().mean(dim=1) / size).mean()), parts, powers))
    return min(found, key=lambda each: each[0])[1:]


class Tap:
    """A product that keeps what went into it."""

    def __init__(self, product: Projection) -> None:
        self._product = product
        self.rows = torch.zeros(0)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.rows = x.clone()
        return self._product(x, out)

    def add_to(self, h: Tensor, x: Tensor) -> None:
        self.rows = x.clone()
        self._product.add_to(h, x)
