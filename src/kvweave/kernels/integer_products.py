"""Products in 8 bits, for those who round weights: compiled kernels alone multiply them.

Where there are none, weights stay in float32.
"""

from torch import Tensor

from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.native.product import MOST_COLUMNS, NativeProduct
from kvweave.kernels.rounded import round_weight


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
