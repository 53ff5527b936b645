"""Rows of keys and values from one memory to another, keys turned on the way.

What lays shared chunks into the one layer that a pass works on, and what keeps the rows that it
computed: a few thousand rows, each from its own place to its own place. On a GPU one launch.

Shapes: N rows, S turns, T rows of a memory, Hk KV heads, D head dim, r rotary dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.dispatch import has_kernels
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import RowMoves


def relocate(
    keys: Tensor,
    values: Tensor,
    moves: RowMoves,
    turn: Angles | None,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Write rows of keys and values [T, Hk, D] to rows of out_keys and out_values, of one dtype.

    `turn` [S, 1, r/2] in float32 turns keys, which are rounded once; None leaves them alone.
    """
    if not moves.source.shape[0]:
        return
    memory = (keys, values, out_keys, out_values)
    if has_kernels(keys) and all(x.is_contiguous() for x in memory):
        from kvweave.kernels.gpu.relocate import relocate_rows

        relocate_rows(keys, values, moves, turn, out_keys, out_values)
        return
    relocate_reference(keys, values, moves, turn, out_keys, out_values)


def relocate_reference(
    keys: Tensor,
    values: Tensor,
    moves: RowMoves,
    turn: Angles | None,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """The definition of `relocate`."""
    source, target, which = moves
    k = keys.index_select(0, source)
    if turn is not None:
        assert which is not None, "each row has a turn"
        wide = k.dtype if k.dtype in (torch.float32, torch.float64) else torch.float32
        angles = Angles(*(x.index_select(0, which).to(wide) for x in turn))
        k = rotate(k.to(wide), angles).to(out_keys.dtype)
    out_keys[target] = k
    out_values[target] = values.index_select(0, source)
