"""Rows of keys and values from one memory to another, keys turned on the way.

What lays shared chunks into the one layer that a pass works on, and what keeps the rows that it
computed: a few thousand rows, each from its own place to its own place. On a GPU one launch.

Shapes: N rows, S turns, T rows of a memory, Hk KV heads, D head dim, r rotary dims.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.dispatch import has_kernels
from kvweave.kernels.rope import Angles, rotate


class RowMoves(NamedTuple):
    """Which rows go where. On the device of the memory."""

    source: Tensor  # [N] int64
    target: Tensor  # [N] int64; no two alike
    turn: Angles | None = None  # [S, 1, r/2] float32; None: keys stay as they are
    which: Tensor | None = None  # [N] int64: the turn of each row


def relocate(
    keys: Tensor, values: Tensor, moves: RowMoves, out_keys: Tensor, out_values: Tensor
) -> None:
    """Write rows of keys and values [T, Hk, D] to rows of out_keys and out_values, of one dtype.
    Keys are turned in float32 and rounded once."""
    if not len(moves.source):
        return
    if has_kernels(keys) and all(x.stride(-1) == 1 for x in (keys, values, out_keys, out_values)):
        from kvweave.kernels.gpu.relocate import relocate_rows

        relocate_rows(keys, values, moves, out_keys, out_values)
        return
    relocate_reference(keys, values, moves, out_keys, out_values)


def relocate_reference(
    keys: Tensor, values: Tensor, moves: RowMoves, out_keys: Tensor, out_values: Tensor
) -> None:
    """The definition of `relocate`."""
    source, target, turn, which = moves
    k = keys.index_select(0, source)
    if turn is not None:
        assert which is not None, "each row has a turn"
        wide = k.dtype if k.dtype in (torch.float32, torch.float64) else torch.float32
        angles = Angles(*(x.index_select(0, which).to(wide) for x in turn))
        k = rotate(k.to(wide), angles).to(out_keys.dtype)
    out_keys[target] = k
    out_values[target] = values.index_select(0, source)
