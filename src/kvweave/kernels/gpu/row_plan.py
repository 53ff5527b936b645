"""Who does what in one launch of sparse-row attention: tiles of rows, pieces of keys.

A tile is some neighbouring rows of one sequence; it looks at the keys before its last row. The last
tiles of a prompt look at the most, so heavy ones start first and light ones fill the gaps. Where
the heaviest tile alone would outlast the rest of the chip (few rows, decode), tiles are cut along
the keys into pieces whose answers are merged afterwards.

All of this depends on positions alone, which are the same for every layer: plans are kept and
found again by their contents.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.kernels.host import on_device, together_on_device

KEPT = 8  # plans: a prefill and a decode batch per engine, and some room
MIN_BLOCKS = 4  # of keys in a piece: below, starting and merging cost more than they save

Limits = NDArray[np.int32]
Bounds = tuple[tuple[int, int], ...]


class Tiling(NamedTuple):
    """What a kernel does at a time."""

    rows: int  # of a tile
    block_n: int  # keys of a block
    kv_heads: int  # programs per piece
    at_once: int  # programs that run at the same time
    evenness: int = 2  # pieces per program where tiles are cut: more even out unequal tiles


class RowPlan(NamedTuple):
    """Tables on the device; see `_COLUMNS`."""

    limits: Tensor  # [R] int32: how many keys a row sees
    items: Tensor  # [pieces, 8] int32, heaviest first
    merges: Tensor | None  # [cut tiles, 4] int32: first row, rows, first slot, slots
    num_slots: int  # pieces whose answers are merged


_COLUMNS = ("row0", "rows", "b0", "b1", "hi", "free", "seq", "slot")


def pieces(limits: Limits, bounds: Bounds, tiling: Tiling) -> tuple[Limits, Limits]:
    """The tables `items` and `merges` of a plan, in numpy.

    `limits` ascend within a sequence; `bounds` are the rows [start, end) of each.
    """
    tiles = []
    for seq, (start, end) in enumerate(bounds):
        row0 = np.arange(start, end, tiling.rows, dtype=np.int64)
        stop = np.minimum(row0 + tiling.rows, end)
        hi, lo = limits[stop - 1], limits[row0]
        steps, bare = -(-hi // tiling.block_n), lo // tiling.block_n
        tiles.append(np.stack([row0, stop - row0, steps, hi, bare, np.full_like(row0, seq)], 1))
    table = np.concatenate(tiles) if tiles else np.empty((0, 6), dtype=np.int64)
    if not len(table):
        return np.empty((0, 8), dtype=np.int32), np.empty((0, 4), dtype=np.int32)
    first, rows, blocks, ends, free, owner = table.T
    fair = blocks.sum() * tiling.kv_heads / tiling.at_once  # blocks per program if all were busy
    count = np.ones_like(blocks)
    if blocks.max() > fair:
        most = max(MIN_BLOCKS, math.ceil(fair / tiling.evenness))
        count = -(-blocks // most)
    cut = count > 1
    first_slot = np.cumsum(np.where(cut, count, 0)) - np.where(cut, count, 0)
    tile = np.repeat(np.arange(len(table)), count)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
    b0 = blocks[tile] * nth // count[tile]
    b1 = blocks[tile] * (nth + 1) // count[tile]
    slot = np.where(cut[tile], first_slot[tile] + nth, -1)
    columns = [first[tile], rows[tile], b0, b1, ends[tile], free[tile], owner[tile], slot]
    items = np.stack(columns, 1)[np.argsort(b0 - b1, kind="stable")]
    merges = np.stack([first, rows, first_slot, count], 1)[cut]
    return items.astype(np.int32), merges.astype(np.int32)


def even_pieces(limits: Limits, block_n: int, num_items: int) -> tuple[Limits, Limits]:
    """The tables of a fixed size for one row per sequence: [num_items, 8] and [sequences, 4].

    Long sequences get more pieces; what is left over looks at nothing. There must be more items
    than sequences. A limit of 0 is a sequence that is not there.
    """
    num = len(limits)
    assert num_items > num, f"{num} sequences need more than {num_items} pieces"
    blocks = -(-limits.astype(np.int64) // block_n)
    most = max(1, math.ceil(blocks.sum() / (num_items - num)))
    count = np.maximum(1, -(-blocks // most))
    first_slot = np.cumsum(count) - count
    seq = np.repeat(np.arange(num), count)
    nth = np.arange(len(seq)) - first_slot[seq]
    items = np.zeros((num_items, 8), dtype=np.int32)
    items[:, 7] = np.arange(num_items)  # every piece has its own slot
    used = items[: len(seq)]
    used[:, 0], used[:, 1], used[:, 6] = seq, 1, seq
    used[:, 2], used[:, 3] = blocks[seq] * nth // count[seq], blocks[seq] * (nth + 1) // count[seq]
    used[:, 4], used[:, 5] = limits[seq], limits[seq] // block_n
    merges = np.stack([np.arange(num), np.ones(num), first_slot, count], 1)
    return items, merges.astype(np.int32)


class PlanCache:
    """Plans of recent launches, by stream: a table is ready on the stream that it was sent on.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Bounds, Tiling, int], tuple[Limits, RowPlan]] = OrderedDict()

    def find(self, limits: Limits, bounds: Bounds, tiling: Tiling, device: torch.device) -> RowPlan:
        """The plan for rows that see `limits` keys; made if it is not among the recent ones."""
        key = (bounds, tiling, stream_of(device))
        known = self._kept.get(key)
        if known is not None and np.array_equal(known[0], limits):
            self._kept.move_to_end(key)
            return known[1]
        items, merges = pieces(limits, bounds, tiling)
        parts = [torch.from_numpy(part) for part in (limits, items, merges)]
        there = together_on_device(parts, device)
        cut = there[2] if len(merges) else None
        plan = RowPlan(there[0], there[1], cut, int(merges[:, 3].sum()))
        self._kept[key] = (limits.copy(), plan)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return plan


def stream_of(device: torch.device) -> int:
    """Names the stream that launches go to."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def to_device(table: NDArray[np.generic], device: torch.device) -> Tensor:
    """A small table on the device, without waiting for it."""
    return on_device(torch.from_numpy(np.ascontiguousarray(table)), device)
