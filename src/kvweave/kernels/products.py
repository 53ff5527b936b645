"""The ways to multiply rounded weights on a CPU. product_probe.py measures which one is fastest.

Each row of activations is rounded to 8 bits by a scale of its own and multiplied in integers. All
ways make the same integers of it, so that a row's result depends neither on the rows beside it nor
on how many there are, whichever way they take; but for the order of float32's sums. (torch's
`linear_dynamic` takes one scale for all rows; `dynamic_rows` says how that is kept out. Ways with
rounded weights and floating-point activations, in 8 or 4 bits, are faster for a single row by up to
a half, and would give it other values than it has beside others: they are none of these.)

A way whose operator this torch build or CPU does not have raises when it is made or first used; the
probe leaves it out.

Shapes: R rows, I input dims, C columns, O output dims.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvweave.kernels.linear import Projection
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rounded import SMALLEST, RoundedWeight

# What is rounded and multiplied at a time: what lies between the two stays in the cache.
BLOCK_VALUES = 8 << 20  # rows × the wider side of the matrix
SMALLEST_BLOCK = 512  # rows: fewer and the product itself is slower


class IntegerRows:
    """y = (x₈ W₈ᵀ) · row scale · channel scale + b."""

    def __init__(
        self, weight: RoundedWeight, multiply: "MultiplyRows", middle: float = 0.0
    ) -> None:
        """`middle`: what stands for 0 among the integers that are multiplied."""
        self._weight = weight
        self._multiply = multiply
        self._offset = weight.offset + middle
        width = max(weight.codes.shape)
        self._block = max(SMALLEST_BLOCK, BLOCK_VALUES // width // 32 * 32)  # rows

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), len(self._weight.scale))
        for part, place in self._blocks(x, out):
            y, row_scale = self._product(part)
            if self._weight.bias is None:
                torch.mul(y, row_scale, out=place)
            else:
                torch.addcmul(self._weight.bias, y, row_scale, out=place)
        return out

    def add_to(self, h: Tensor, x: Tensor) -> None:
        for part, place in self._blocks(x, h):
            y, row_scale = self._product(part)
            place.addcmul_(y, row_scale)
            if self._weight.bias is not None:
                place.add_(self._weight.bias)

    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, O] without the row scale, and the row scale [R, 1]."""
        columns = self._weight.columns(x)
        # two plain passes: torch's largest absolute value takes several times as long
        least = columns.amin(dim=1, keepdim=True).neg_()
        largest = torch.maximum(columns.amax(dim=1, keepdim=True), least)
        row_scale = largest.clamp_min_(SMALLEST).div_(127.0)
        spare = None if columns is x else columns  # what may be overwritten
        moved = torch.addcmul(self._offset, columns, row_scale.reciprocal(), out=spare)
        return self._multiply(moved), row_scale

    def _blocks(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same rows of x and y, a block at a time."""
        if len(x) <= self._block:
            yield x, y
            return
        for start in range(0, len(x), self._block):
            yield x[start : start + self._block], y[start : start + self._block]


# [R, C] of values from -127 to 127 and the offsets, its own to overwrite: cut to integers and
# multiplied → [R, O], times the channel scale
MultiplyRows = Callable[[Tensor], Tensor]


def plain_integers(weight: RoundedWeight) -> "MultiplyRows":
    """What every way must give: the definition, in float64, and slow."""

    def multiply(x: Tensor) -> Tensor:
        return (x.floor_().double() @ weight.codes.double().T * weight.scale).float()

    return multiply


def onednn_rows(weight: RoundedWeight) -> Projection:
    """oneDNN with the weights in its own blocked layout. Codes are 0 to 255 around 128: signed ones
    run in a reference loop on x86-64 CPUs without AMX (60 ms for one row, against 0.2)."""
    packed = torch.ops.onednn.qlinear_prepack(weight.codes, None)
    zero_points = torch.zeros(len(weight.scale), dtype=torch.int64)

    def multiply(x: Tensor) -> Tensor:
        codes = x.to(torch.uint8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 128, packed, weight.scale, zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y

    return IntegerRows(weight, multiply, middle=128.0)


def int_mm_rows(weight: RoundedWeight) -> Projection:
    """The plain integer product: needs no layout of its own."""
    turned = weight.codes.t()

    def multiply(x: Tensor) -> Tensor:
        codes = x.floor_().to(torch.int8)
        return torch._int_mm(codes, turned) * weight.scale

    return IntegerRows(weight, multiply)


def dynamic_rows(engine: str) -> Callable[[RoundedWeight], Projection]:
    """torch's dynamic quantised product on one of its engines: oneDNN's is the fast one on Arm.

    It takes its scale from the least and largest value of all rows. A row that holds both ends
    behind them makes that scale 1, whatever the rows are: integers stay what they are.
    """

    def make(weight: RoundedWeight) -> Projection:
        packed = _pack_dynamic(weight, engine)
        ends = torch.zeros(1, weight.codes.shape[1])
        ends[0, 0], ends[0, -1] = 127.0, -128.0

        def multiply(x: Tensor) -> Tensor:
            ranged = torch.cat([x.floor_(), ends])
            y: Tensor = torch.ops.quantized.linear_dynamic(ranged, packed)
            return y[:-1]

        return IntegerRows(weight, multiply)

    return make


def native_rows(weight: RoundedWeight) -> Projection:
    """Compiled on this machine: rounding, product and scales in one call."""
    library, words = native_kernels()
    if library is None:
        raise RuntimeError(words)
    return NativeProduct(weight, library)


def _pack_dynamic(weight: RoundedWeight, engine: str) -> object:
    """The engine is a setting of the process; it only counts while weights are packed."""
    before = torch.backends.quantized.engine
    zero_points = torch.zeros(len(weight.scale), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch says that these tensors will go; a build without them loses this way, nothing else
        warnings.simplefilter("ignore")
        try:
            torch.backends.quantized.engine = engine
            held = torch._make_per_channel_quantized_tensor(
                weight.codes, weight.scale.double(), zero_points, 0
            )
            return torch.ops.quantized.linear_prepack(held, None)
        finally:
            torch.backends.quantized.engine = before


FLOAT32 = "float32"  # the way of weights that are not rounded: the yardstick of all others
# name → how it is made of a rounded weight. The names are kept on disk with their times.
WAYS: dict[str, Callable[[RoundedWeight], Projection]] = {
    "int8 rows, native": native_rows,
    "int8 rows, onednn": onednn_rows,
    "int8 rows, int_mm": int_mm_rows,
    "int8 rows, dynamic fbgemm": dynamic_rows("fbgemm"),
    "int8 rows, dynamic onednn": dynamic_rows("onednn"),
    "int8 rows, dynamic qnnpack": dynamic_rows("qnnpack"),
}


class ByRows:
    """A product that takes another way for few rows than for many."""

    def __init__(self, ways: Sequence[tuple[int, Projection]]) -> None:
        """`ways`: up to how many rows, in ascending order; the last is for all beyond, too."""
        self._ways = ways
        self._few_rows, self._few = ways[0]
        self.bounds = tuple(most for most, _ in ways)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.way_for(len(x))(x, out)

    def add_to(self, h: Tensor, x: Tensor) -> None:
        self.way_for(len(x)).add_to(h, x)

    def way_for(self, num_rows: int) -> Projection:
        """What multiplies so many rows."""
        if num_rows <= self._few_rows:
            return self._few
        return next((way for most, way in self._ways if num_rows <= most), self._ways[-1][1])
