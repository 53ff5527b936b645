"""Attention of scattered rows on a CPU without compiled kernels, as plain matrix products.

Rows picked out of a prompt share no causal shape, so a fused kernel must be given a mask as wide as
the prompt, and it works in slices too thin for fast products. Here a block of keys of one KV head
is looked at by all rows at or behind it together, and the query heads that share it stand side by
side as rows of one product. The weights of a block stay in the cache between the two products; the
next block's part is added to it. Only the edge, keys that some of the rows do not see, is masked.
Heads go one by one: two cores share three products in a batch badly.

Logits are exponentiated as they are: looking for each row's maximum first, only to take it out
again, costs more than the exponential. That is the same softmax to rounding as long as the totals
stay well inside float32, which is checked: `attend_scattered` returns None for larger logits, and
attention.py then computes those rows with a mask.

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
RUN_KEYS = (256, 1024)


class KeyBlock(NamedTuple):
    """Some keys, and the neighbouring rows of a tile that look at them."""

    start: int  # first row that sees one of the keys; all behind it do
    first_key: int
    last_key: int  # one past it
    # [M of rows that do not see all, keys behind the first row] 1 where a row sees a key, else 0
    edge: Tensor | None


class RowTile(NamedTuple):
    """Neighbouring rows, done together, and the keys they see, block by block."""

    start: int
    end: int
    blocks: tuple[KeyBlock, ...]


def attend_scattered(
    q: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor | None:
    """Attention output [R, Hq, D] of float32 q [R, Hq, D] at `positions` [R], ascending.

    Key j of `keys` [N, Hk, D] stands at position j. None: the logits are too large to do it so.
    """
    (num_heads, head_dim), kv_heads = q.shape[1:], keys.shape[1]
    group = num_heads // kv_heads
    tiles = row_tiles(tuple(positions.tolist()), group)
    out = q.new_empty(q.shape)
    most = max(b.last_key - b.first_key for tile in tiles for b in tile.blocks)
    room = q.new_empty(most * max(tile.end - tile.start for tile in tiles) * group)
    shown = keys.permute(1, 2, 0), values.transpose(0, 1)  # [Hk, D, N], [Hk, N, D]
    for start, end, blocks in tiles:
        # [r, Hq, D] -> [Hk, r, G, D]
        rows = (x[start:end].view(-1, kv_heads, group, head_dim).transpose(0, 1) for x in (q, out))
        asking, answer = rows
        scaled = torch.mul(asking, scale, out=q.new_empty(asking.shape)).flatten(1, 2)
        attended = torch.zeros_like(scaled)
        if not _attend_tile(scaled, blocks, group, *shown, room, attended):
            return None
        answer.copy_(attended.view(asking.shape))
    return out


def _attend_tile(
    asking: Tensor,
    blocks: tuple[KeyBlock, ...],
    group: int,
    keys: Tensor,
    values: Tensor,
    room: Tensor,
    attended: Tensor,
) -> bool:
    """Add the attention output of `asking` [Hk, M, D], scaled, to `attended` [Hk, M, D]; keys
    [Hk, D, N] and values [Hk, N, D]. Weights are laid into `room`. False: the logits are too large.
    """
    kv_heads, num_rows, _ = asking.shape
    totals = asking.new_zeros(kv_heads, num_rows)
    for start, first, last, edge in blocks:
        at = start * group
        weights = room[: (num_rows - at) * (last - first)].view(-1, last - first)  # [M, n]
        # at the edge: what some rows do not see, and which do; nothing where all see all
        edges = [] if edge is None else [(weights[: len(edge), -edge.shape[1] :], edge)]
        heads = zip(  # views of all heads at once: each by itself costs as much
            asking[:, at:].unbind(),
            keys[:, :, first:last].unbind(),
            values[:, first:last].unbind(),
            attended[:, at:].unbind(),
            totals[:, at:].unbind(),
            strict=True,
        )
        for ask, key, value, answer, total in heads:
            torch.mm(ask, key, out=weights)
            weights.exp_()
            for part, is_seen in edges:
                part.mul_(is_seen)
            total += weights.sum(1)
            answer.addmm_(weights, value)
        if not first and not totals.amax() <= TOTALS[1]:  # NaN is not either
            return False
    low, high = totals.aminmax()
    if not (TOTALS[0] <= low and high <= TOTALS[1]):
        return False
    attended.div_(totals[:, :, None])
    return True


@lru_cache(maxsize=4)  # the same rows run through every layer
def row_tiles(positions: tuple[int, ...], group: int) -> tuple[RowTile, ...]:
    """The work for rows at `positions`, ascending: every row with every key it sees, once."""
    is_run = positions[-1] - positions[0] == len(positions) - 1
    fewest, most = RUN_KEYS if is_run else BLOCK_KEYS
    num_tiles = -(-len(positions) * group * fewest // BLOCK_WEIGHTS)  # as even as can be
    num_rows = -(-len(positions) // num_tiles)
    num_keys = min(most, max(fewest, BLOCK_WEIGHTS // (num_rows * group) // 64 * 64))
    tiles: list[RowTile] = []
    for start in range(0, len(positions), num_rows):
        mine = positions[start : start + num_rows]
        seen = mine[-1] + 1
        blocks = [
            _key_block(mine, first, min(first + num_keys, seen), group)
            for first in range(0, seen, num_keys)
        ]
        tiles.append(RowTile(start, start + len(mine), tuple(blocks)))
    return tuple(tiles)


def _key_block(positions: tuple[int, ...], first: int, last: int, group: int) -> KeyBlock:
    start = bisect_left(positions, first)
    behind = bisect_left(positions, last - 1)  # from here on rows see every key
    if start == behind:
        return KeyBlock(start, first, last, None)
    at = torch.tensor(positions[start:behind]).repeat_interleave(group)
    # hidden weights are set to 0 behind the exponential: that of -inf is slow on a CPU
    edge = (torch.arange(positions[start] + 1, last) <= at[:, None]).float()
    return KeyBlock(start, first, last, edge)
