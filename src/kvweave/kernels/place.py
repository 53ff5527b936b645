"""Fresh rows between projection and attention: turned, and keys and values laid in place.

On a GPU one launch where rotating and writing them one by one takes four; `mean_changes` is what
stood there before against what comes, by chunk, for drift.

Shapes: R rows, C of them chosen, M chunks, T rows of the request's KV, Hq query heads, Hk KV heads,
D head dim, r rotary dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.dispatch import compiled, has_kernels
from kvweave.kernels.native import stored as in_c
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Owners


def place(
    q: Tensor, k: Tensor, v: Tensor, turn: Angles, rows: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Write k, turned, and v, both [R, Hk, D], to `rows` [R] of keys and values [T, Hk, D].

    Returns the turned queries [R, Hq, D]. `turn` [R, 1, r/2]; no two rows alike.
    """
    if has_kernels(q) and all(x.stride(-1) == 1 for x in (q, k, v, keys, values)):
        from kvweave.kernels.gpu.place import place_rows

        return place_rows(q, k, v, turn, rows, keys, values)
    library = compiled(q, k, v, *turn, keys, values)
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
    library = compiled(k, v, keys, values, *turn, owners.weights)
    if library is not None and in_c.has_whole_rows(keys, values):
        fresh = in_c.FreshRows(k, v, rows, at)
        return in_c.sum_changes(library, fresh, turn, keys, values, owners)
    return owners.sums(changes(k, v, rows, turn, at, keys, values))
