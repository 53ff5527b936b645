"""Attention of scattered rows on a CPU, as plain matrix products.

Rows picked out of a prompt share no causal shape, so a fused kernel must be given a mask as wide as
the prompt, and it works in slices too thin for fast products. Here the rows of a block and the
query heads that share a KV head stand side by side as columns of one product over all keys at or
before the last of them; only the edge, keys that some of the rows do not see, is masked.

Logits are exponentiated as they are: looking for each row's maximum first, only to take it out
again, costs more than the exponential. That is the same softmax to rounding as long as the totals
stay well inside float32, which is checked block by block; a model whose logits are too large for it
gets None and takes another road.

Shapes: R rows, N keys, Hq query heads, Hk KV heads, G = Hq / Hk, D head dim; a block has r rows
and n keys, and M = r G columns.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# A row's total of exponentials. Above the floor, what underflowed is less than 1e-14 of it; below
# the ceiling, no product with a value overflows.
TOTALS = (1e-20, 1e30)
# A block ends with this many rows, or when its rows would look at this many keys too many together.
# 32-128 rows are within 10 % of each other: x86-64, 389 rows over 2,800 keys, 9/3 heads of 64.
BLOCK_ROWS = 64
BLOCK_WASTE = 8000


class _Block(NamedTuple):
    """Neighbouring rows, done together."""

    start: int
    end: int
    num_keys: int  # at or before the last row
    edge: Tensor  # [keys behind the first row, M] 1 where a row sees the key, else 0


def attend_scattered(
    q: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor | None:
    """Attention output [R, Hq, D] of float32 q [R, Hq, D] at `positions` [R], ascending.

    Key j of `keys` [N, Hk, D] stands at position j. None: the logits are too large to do it so.
    """
    (num_rows, num_heads, head_dim), kv_heads = q.shape, keys.shape[1]
    group = num_heads // kv_heads
    by_kv_head = q.view(num_rows, kv_heads, group, head_dim).transpose(0, 1)
    asking = torch.mul(by_kv_head, scale, out=q.new_empty(by_kv_head.shape))  # [Hk, R, G, D]
    attended = q.new_empty(kv_heads, head_dim, num_rows * group)
    totals = q.new_empty(kv_heads, 1, num_rows * group)
    blocks = _blocks(tuple(positions.tolist()), group)
    room = q.new_empty(max(block.num_keys * (block.end - block.start) for block in blocks) * group)
    for start, end, num_keys, edge in blocks:
        columns = slice(start * group, end * group)
        weights = room[: num_keys * (end - start) * group].view(num_keys, -1)  # [n, M]
        for head in range(kv_heads):
            rows = asking[head, start:end].flatten(0, 1)  # [M, D]
            torch.mm(keys[:num_keys, head], rows.t(), out=weights)
            weights.exp_()
            weights[num_keys - len(edge) :].mul_(edge)
            torch.sum(weights, 0, out=totals[head, 0, columns])
            torch.mm(values[:num_keys, head].t(), weights, out=attended[head, :, columns])
        low, high = totals[..., columns].aminmax()
        if not (TOTALS[0] <= low and high <= TOTALS[1]):  # NaN is not either
            return None
    attended.div_(totals)
    # [Hk, D, R, G] -> [R, Hk, G, D]
    attended = attended.view(kv_heads, head_dim, num_rows, group).permute(2, 0, 3, 1)
    return attended.reshape(num_rows, num_heads, head_dim)


@lru_cache(maxsize=4)  # the same rows run through every layer
def _blocks(positions: tuple[int, ...], group: int) -> tuple[_Block, ...]:
    """Rows cut where a block would be too long or too wide."""
    blocks: list[_Block] = []
    start, waste = 0, 0
    for i in range(1, len(positions) + 1):
        if i < len(positions) and i - start < BLOCK_ROWS:
            waste += (positions[i] - positions[i - 1]) * (i - start)
            if waste <= BLOCK_WASTE:
                continue
        blocks.append(_block(positions, start, i, group))
        start, waste = i, 0
    return tuple(blocks)


def _block(positions: tuple[int, ...], start: int, end: int, group: int) -> _Block:
    at = torch.tensor(positions[start:end])
    behind_first = torch.arange(positions[start] + 1, positions[end - 1] + 1)
    # hidden weights are set to 0 behind the exponential: that of -inf is slow on a CPU
    edge = (behind_first[:, None] <= at.repeat_interleave(group)).float()
    return _Block(start, end, positions[end - 1] + 1, edge)
