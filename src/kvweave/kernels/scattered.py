"""Attention of scattered rows on a CPU, as plain matrix products.

Rows picked out of a prompt share no causal shape, so a fused kernel must be given a mask as wide as
the prompt, and it works in slices too thin for fast products. Here a block of keys is looked at by
all rows at or behind it together, and the query heads that share a KV head stand side by side as
rows of one product. The weights of a block stay in the cache between the two products; the next
block's part is added to it. Only the edge, keys that some of the rows do not see, is masked.

Logits are exponentiated as they are: looking for each row's maximum first, only to take it out
again, costs more than the exponential. That is the same softmax to rounding as long as the totals
stay well inside float32, which is checked; a model whose logits are too large for it gets None and
takes another road.

Shapes: R rows, N keys, Hq query heads, Hk KV heads, G = Hq / Hk, D head dim; a block has r rows
and n keys, and M = r G rows of each KV head.
"""

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# A row's total of exponentials. Above the floor, what underflowed is less than 1e-14 of it; below
# the ceiling, no product with a value overflows.
TOTALS = (1e-20, 1e30)
# Weights of a block: 2 MB of float32, what two cores keep close at hand.
BLOCK_WEIGHTS = 1 << 19
# Keys of a block: fewer waste less at the edge, more make longer products. Rows of one run have one
# edge, at the end.
BLOCK_KEYS = (128, 256)
RUN_KEYS = (128, 1024)


class _Block(NamedTuple):
    """Some keys, and neighbouring rows that look at them."""

    start: int  # first row that sees one of the keys
    end: int
    first_key: int
    last_key: int  # one past it
    edge: (
        Tensor | None
    )  # [M of rows that do not see all, keys behind the first row] 1: seen, 0: not


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
    asking = asking.view(kv_heads, -1, head_dim)  # [Hk, R G, D]
    attended = torch.zeros_like(asking)
    totals = q.new_zeros(kv_heads, num_rows * group)
    looked_at, taken = keys.permute(1, 2, 0), values.transpose(0, 1)  # [Hk, D, N], [Hk, N, D]
    blocks = _blocks(tuple(positions.tolist()), kv_heads, group)
    most = max((b.end - b.start) * (b.last_key - b.first_key) for b in blocks)
    room = q.new_empty(most * num_heads)
    for start, end, first, last, edge in blocks:
        rows = slice(start * group, end * group)
        weights = room[: num_heads * (end - start) * (last - first)]
        weights = weights.view(kv_heads, (end - start) * group, last - first)  # [Hk, M, n]
        torch.bmm(asking[:, rows], looked_at[:, :, first:last], out=weights)
        weights.exp_()
        if edge is not None:
            weights[:, : len(edge), last - first - edge.shape[1] :].mul_(edge)
        totals[:, rows] += weights.sum(2)
        if not first and not totals[:, rows].amax() <= TOTALS[1]:  # NaN is not either
            return None
        attended[:, rows].baddbmm_(weights, taken[:, first:last])
    low, high = totals.aminmax()
    if not (TOTALS[0] <= low and high <= TOTALS[1]):
        return None
    attended.div_(totals[..., None])
    # [Hk, R, G, D] -> [R, Hk, G, D]
    attended = attended.view(kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return attended.reshape(num_rows, num_heads, head_dim)


@lru_cache(maxsize=4)  # the same rows run through every layer
def _blocks(positions: tuple[int, ...], kv_heads: int, group: int) -> tuple[_Block, ...]:
    """Every row with every key it sees, once."""
    is_run = positions[-1] - positions[0] == len(positions) - 1
    fewest, most = RUN_KEYS if is_run else BLOCK_KEYS
    heads = kv_heads * group
    parts = -(-len(positions) * heads * fewest // BLOCK_WEIGHTS)  # of the rows, as even as can be
    num_rows = -(-len(positions) // parts)
    num_keys = min(most, max(fewest, BLOCK_WEIGHTS // (num_rows * heads) // 64 * 64))
    blocks: list[_Block] = []
    for start in range(0, len(positions), num_rows):
        end = min(start + num_rows, len(positions))
        seen = positions[end - 1] + 1
        blocks += [
            _block(positions, start, end, first, min(first + num_keys, seen), group)
            for first in range(0, seen, num_keys)
        ]
    return tuple(blocks)


def _block(
    positions: tuple[int, ...], start: int, end: int, first: int, last: int, group: int
) -> _Block:
    start = bisect_left(positions, first, start, end)
    behind = bisect_left(positions, last - 1, start, end)  # from here on rows see every key
    if start == behind:
        return _Block(start, end, first, last, None)
    at = torch.tensor(positions[start:behind]).repeat_interleave(group)
    # hidden weights are set to 0 behind the exponential: that of -inf is slow on a CPU
    edge = (torch.arange(positions[start] + 1, last) <= at[:, None]).float()
    return _Block(start, end, first, last, edge)
