"""Rows of keys and values put where they belong: fresh ones between projection and attention, and
rows of one memory moved to another. Keys are turned on the way.

On a GPU one launch where rotating and writing them one by one takes four. `mean_changes` is what
stood there before against what comes, by chunk, for drift. `relocate` lays shared chunks into the
one layer that a pass works on, and keeps the rows that it computed.

Shapes: R rows, C of them chosen, M chunks, T rows of a memory, S turns, Hq query heads, Hk KV
heads, D head dim, r rotary dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled, has_kernels
from kvweave.kernels.native import stored as in_c
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Owners, RowMoves


def place(
    q: Tensor, k: Tensor, v: Tensor, turn: Angles, rows: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Write k, turned, and v, both [R, Hk, D], to `rows` [R] of keys and values [T, Hk, D].

    Returns the turned queries [R, Hq, D]. `turn` [R, 1, r/2]; no two rows alike.
    """
    if has_kernels(q) and all(x.stride(-1) == 1 for x in (q, k, v, keys, values)):
        from kvweave.kernels.gpu.place import place_rows

        return place_rows(q, k, v, turn, rows, keys, values)
    library = find_compiled(q, k, v, *turn, keys, values)
    if library is not None and in_c.has_whole_rows(keys, values):
        return in_c.place_rows(library, (q, k, v), turn, rows, keys, values)
    keys[rows] = rotate(k, turn)
    values[rows] = v
    return rotate(q, turn)


def changes(
    k: Tensor, v: Tensor, rows: Tensor, turn: Angles, at: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """What fresh rows change, [2, C, Hk, D] float32: keys before RoPE, then values.

    Row rows[c] of k, v [R, Hk, D], before RoPE, comes to position at[c] of keys (turned) and values
    [T, Hk, D]; `turn` [C, 1, r/2] is of that position. Keys in half precision are compared where
    they stand: what the angles are rounded to cancels out.
    """
    cos, sin = turn.cos.float(), turn.sin.float()
    scale = cos.square() + sin.square()  # YaRN's factor, and rounding
    back = Angles(cos / scale, -sin / scale)
    fresh, stored = k.index_select(0, rows).float(), keys.index_select(0, at).float()
    apart = fresh.new_empty(2, *fresh.shape)
    if k.dtype == torch.float32:  # angles as good as exact: one turn will do
        torch.sub(fresh, rotate(stored, back), out=apart[0])
    else:
        rotate(rotate(fresh, Angles(cos, sin)).sub_(stored), back, out=apart[0])
    stored_v = values.index_select(0, at).float()
    torch.sub(v.index_select(0, rows).float(), stored_v, out=apart[1])
    return apart


def mean_changes(
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    turn: Angles,
    at: Tensor,
    keys: Tensor,
    values: Tensor,
    owners: Owners,
) -> Tensor:
    """`changes`, weighted and summed by chunk: [2, M, Hk, D] float32."""
    if has_kernels(k) and all(x.stride(-1) == 1 for x in (k, v, keys, values)):
        from kvweave.kernels.gpu.place import mean_change_rows

        return mean_change_rows(k, v, rows, turn, at, keys, values, owners)
    library = find_compiled(k, v, keys, values, *turn, owners.weights)
    if library is not None and in_c.has_whole_rows(keys, values):
        fresh = in_c.FreshRows(k, v, rows, at)
        return in_c.sum_changes(library, fresh, turn, keys, values, owners)
    return owners.sums(changes(k, v, rows, turn, at, keys, values))


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
        from kvweave.kernels.gpu.place import relocate_rows

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
