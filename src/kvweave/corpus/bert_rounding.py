"""An encoder's products in 8 bits, where compiled kernels multiply integers on this CPU.

Weights and rows are rounded and large dims are split as a decoder's are (model/rounding.py). Dims
are told by a short text that goes through the exact products first, which takes as long as
embedding a few passages; so nothing is kept on disk, and the same weights are rounded alike at
every start. Dims are not evened out: how far is best for so short a text was seen to be worse than
nothing for others (MiniLM). A small model stays in float32.
"""

from collections.abc import Callable, Mapping

from kvweave.kernels.dim_choice import Tap
from kvweave.kernels.integer_products import integer_kernels, round_linear
from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.rounded import extra_columns, split_dims

LEAST_WEIGHTS = 4_000_000  # of all products: fewer are fast enough in float32
LEAST_EXTRA = 64  # columns that the large dims of a product are split into, or as a decoder's are


def round_products(
    exact: Mapping[str, Linear], run: Callable[[Mapping[str, Projection]], None]
) -> Mapping[str, Projection]:
    """Return the products by the same names, in 8 bits where this CPU has integers. `run` carries
    a text through the products that it is given."""
    if sum(linear.weight.numel() for linear in exact.values()) < LEAST_WEIGHTS:
        return exact
    library = integer_kernels()
    if library is None:
        return exact
    taps = {name: Tap(linear) for name, linear in exact.items()}
    run(taps)
    found: dict[str, Projection] = {}
    for name, linear in exact.items():
        largest = taps[name].rows.abs().amax(dim=0)
        parts = split_dims(largest, max(LEAST_EXTRA, extra_columns(len(largest))))
        found[name] = round_linear(linear, library, parts)
    return found
