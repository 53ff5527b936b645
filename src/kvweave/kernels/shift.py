"""Move the rows of chunks by one vector each, keys in the frame before RoPE.

Shapes: N rows, C chunks, T rows of the request's KV, Hk KV heads, D head dim, r rotary dims.
"""

from torch import Tensor

from kvweave.kernels.dispatch import has_kernels
from kvweave.kernels.rope import Angles, rotate


def shift(
    keys: Tensor,
    values: Tensor,
    by_k: Tensor,
    by_v: Tensor,
    chunk: Tensor,
    row: Tensor,
    turn: Angles,
) -> None:
    """Add by_k[chunk[n]], turned, to keys[row[n]] and by_v[chunk[n]] to values[row[n]].

    keys, values [T, Hk, D]; by_k, by_v [C, Hk, D] float32; chunk, row [N]; turn [N, 1, r/2]. No two
    rows alike.
    """
    if not len(row):
        return
    if has_kernels(keys):
        from kvweave.kernels.gpu.shift import shift_rows

        shift_rows(keys, values, by_k, by_v, chunk, row, turn)
        return
    turned = rotate(by_k[chunk], Angles(turn.cos.float(), turn.sin.float()))
    keys[row] = (keys[row].float() + turned).to(keys.dtype)
    values[row] = (values[row].float() + by_v[chunk]).to(values.dtype)
