"""A product with rounded weights in one call: rows are rounded, multiplied and scaled in C.

The integers are those of the definition (rounded.py), and a row's sums are the same in whatever
tile it is computed: its result does not depend on the rows beside it to the last bit.

Shapes: R rows, I input dims, C columns, O output dims.
"""

import ctypes

import torch
from torch import Tensor

from kvweave.kernels.native.build import BuildError
from kvweave.kernels.native.fields import ProductFields
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.operators import multiply_floats
from kvweave.kernels.rounded import RoundedWeight, round_weight

MOST_COLUMNS = 65_000  # whose products cannot overflow a sum of 32 bits: 255 · 127 each
_GROUP = 4  # columns that are multiplied at a time: GROUP of integers.h


class NativeProduct:
    """y = (x₈ W₈ᵀ) · row scale · channel scale + b. Any thread."""

    def __init__(self, weight: RoundedWeight, library: CompiledLibrary) -> None:
        """Copies the weights. Raises ValueError where a sum might overflow."""
        out_dim, columns = weight.codes.shape
        if columns > MOST_COLUMNS:
            raise ValueError(f"{columns} columns: sums of more than {MOST_COLUMNS} may overflow")
        padded = library.padded_channels(out_dim)
        width = -(-columns // _GROUP) * _GROUP
        packed = torch.empty(padded * width, dtype=torch.int8)
        start = torch.empty(padded, dtype=torch.int32)
        codes = weight.codes.contiguous()
        library.pack(codes.data_ptr(), out_dim, columns, packed.data_ptr(), start.data_ptr())
        scale = _pad(weight.scale, padded)
        bias = None if weight.bias is None else _pad(weight.bias, padded)
        share = None if weight.share is None else weight.share.float().contiguous()
        more = None if weight.more is None else weight.more.to(torch.int32)
        offset = weight.offset.float().contiguous()
        # the fields hold addresses; these tensors must live as long as they do
        self._kept = (packed, start, scale, bias, share, more, offset)
        addresses = [0 if each is None else each.data_ptr() for each in self._kept]
        self.in_dim = columns if weight.more is None else columns - len(weight.more)
        self.out_dim = out_dim
        self._fields = ProductFields(*addresses, self.in_dim, columns, out_dim)
        self.address = ctypes.addressof(self._fields)  # of what C takes it for, as long as it lives
        self._multiply = library.multiply

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(x), self.out_dim)
        self._run(x, out, False)
        return out

    def add_to(self, h: Tensor, x: Tensor) -> None:
        self._run(x, h, True)

    def _run(self, x: Tensor, y: Tensor, add: bool) -> None:
        num_rows = len(x)
        # an address says nothing of what lies there: what C is given is checked here
        if x.shape[1] != self.in_dim or y.shape != (num_rows, self.out_dim):
            raise ValueError(f"[R, {self.in_dim}] to [R, {self.out_dim}], not {x.shape}, {y.shape}")
        if x.dtype != torch.float32 or y.dtype != torch.float32 or y.stride(1) != 1:
            raise ValueError("rows are float32, and results lie side by side")
        if x.stride(1) != 1:
            x = x.contiguous()
        failed = self._multiply(
            self.address, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), num_rows, add,
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {num_rows} rows of {self.in_dim} in 8 bits")


def check(library: CompiledLibrary) -> None:
    """Raises BuildError where products come out wrong, in 8 bits or in float32: every kind of tile,
    split dims, a bias, more channels than a panel. Rows hold whole numbers up to 127, so that
    results are known exactly."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (53, 90), generator=generator)
    codes[:, 0] = 127  # makes every channel's scale 1
    parts = torch.ones(90, dtype=torch.int64)
    parts[[3, 40]] = torch.tensor([4, 2])
    bias = torch.arange(53, dtype=torch.float32)
    x = torch.randint(-127, 128, (31, 90), generator=generator)
    x[:, 5] = 127  # makes every row's scale 1
    x[:, [3, 40]] *= 2  # their shares stay below
    right = (x @ codes.T).float() + bias
    product = NativeProduct(round_weight(codes.float(), bias, parts), library)
    for num_rows in (1, 2, 3, 7, 31):
        found = product(x[:num_rows].float())
        floats = torch.empty(found.shape)
        multiply_floats(library, x[:num_rows].float(), codes.float(), bias, floats, add=False)
        is_right = torch.allclose(found, right[:num_rows], rtol=1e-5, atol=1e-3)
        if not (is_right and torch.equal(floats, right[:num_rows])):
            raise BuildError(f"what was compiled multiplies {num_rows} rows wrongly; report this")


def _pad(values: Tensor, length: int) -> Tensor:
    padded = torch.zeros(length)
    padded[: len(values)] = values
    return padded
