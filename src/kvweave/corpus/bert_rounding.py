"""An encoder's products in 8 bits, where this CPU multiplies these faster than float32.

As a decoder's are (model/rounding.py): weights and rows are rounded, large dims are split, and the
way to multiply is the one that was fastest here (kernels/product_ways.py). Dims are told by a short
text that goes through the exact products first, which takes as long as embedding a few passages; so
nothing is kept on disk, and the same weights are rounded alike at every start. Dims are not evened
out: how far is best for so short a text was seen to be worse than nothing for others (MiniLM).

Products may stay in float32, one by one: where nothing is faster, and all of a model that is small.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvweave.kernels.dim_choice import Tap
from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.product_probe import extra_columns
from kvweave.kernels.product_ways import ProductWays
from kvweave.kernels.products import FLOAT32
from kvweave.kernels.rounded import split_dims

LEAST_WEIGHTS = 4_000_000  # of all products: fewer are fast enough, and not worth measuring
LEAST_EXTRA = 64  # columns that the large dims of a product are split into, or as a decoder's are
LEAST_ROWS = 8  # tokens that a text has, about: what takes longer with fewer does not matter


class RoundedProducts(NamedTuple):
    """What an encoder multiplies with."""

    products: Mapping[str, Projection]  # by name, as they were given
    ways: Mapping[str, tuple[str, ...]]  # of those that are rounded, by ROWS of the probe


def round_products(
    exact: Mapping[str, Linear],
    run: Callable[[Mapping[str, Projection]], None],
    ways: ProductWays | None = None,
) -> RoundedProducts:
    """`run` carries a text through the products that it is given. `ways` None: this machine's."""
    if sum(linear.weight.numel() for linear in exact.values()) < LEAST_WEIGHTS:
        return RoundedProducts(exact, {})
    ways = ways or ProductWays()
    taps = {name: Tap(linear) for name, linear in exact.items()}
    run(taps)
    found: dict[str, Projection] = {}
    taken: dict[str, tuple[str, ...]] = {}
    for name, linear in exact.items():
        largest = taps[name].rows.abs().amax(dim=0)
        parts = split_dims(largest, max(LEAST_EXTRA, extra_columns(len(largest))))
        found[name], names = ways.product(linear, parts, least_rows=LEAST_ROWS)
        if set(names) != {FLOAT32}:
            taken[name] = names
    return RoundedProducts(found, taken)
