"""Sums in one order on a GPU: no row changes another, as on a CPU with compiled kernels.

A library of products chooses its kernel by how many rows there are, and attention is cut over the
chip by rows and keys. With a fixed order a product takes BLOCK_ROWS rows at a time, filled up where
fewer are left, and attention one tile, never cut along the keys (`gpu/attention.py`). Norms, gates
and rotation look at one row anyhow.

It holds for a process: `engine.exact` switches it on before anything is computed, for good.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 128  # of a product: a decoding sequence pays little, because it waits for weights

_fixed: list[bool] = []  # not empty: switched on


def fix_order() -> None:
    """Switch it on. Any thread, before the first pass."""
    _fixed.append(True)


def is_fixed(x: Tensor) -> bool:
    """Whether sums over a tensor like x are taken in one order by what is here."""
    return bool(_fixed) and x.is_cuda


def multiply_in_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """x [R, I] times weight [O, I] transposed, plus bias, a block of rows at a time; into `out`
    [R, O] if given. Every block lies alike in memory of its own: where it lies changes the kernel,
    too."""
    y = x.new_empty(len(x), len(weight)) if out is None else out
    block = torch.zeros(BLOCK_ROWS, x.shape[1], dtype=x.dtype, device=x.device)
    for start in range(0, len(x), BLOCK_ROWS):
        rows = x[start : start + BLOCK_ROWS]
        block[: len(rows)] = rows
        y[start : start + BLOCK_ROWS] = F.linear(block, weight, bias)[: len(rows)]
    return y
