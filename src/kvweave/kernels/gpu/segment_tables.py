"""What each row of a step looks at, in tables of a fixed place on the device.

`hold` writes who holds which chunk, when a sequence comes or goes; `update` everything else, at
every step. `segment_plan.py` says what is in them.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvweave.kernels.gpu.attention import Launch, choose, cores
from kvweave.kernels.gpu.segment_plan import (
    NO_SHIFT,
    WINDOW,
    ChunkArrays,
    ChunkTiling,
    Room,
    Sharing,
)
from kvweave.kernels.gpu.tiles import tile_width
from kvweave.kernels.types import SharedChunk

ALIGNED = 4  # numbers: tables begin at multiples of 16 bytes
PIECES = 6  # by row, per multiprocessor: small ones fill the gaps that tiles leave
SLACK = WINDOW // 32 + 1  # mask words that may be read behind the last ones


class SegmentShape(NamedTuple):
    """Heads and pages that tables are for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype
    coded: bool = False  # chunks lie in 8 bits
    shifted: bool = False  # some may be shifted

    @property
    def chunk_page(self) -> int:
        """Tokens of a chunk in a page."""
        return self.page * self.dtype.itemsize if self.coded else self.page


def by_chunk_launch(dtype: torch.dtype, head_dim: int, group: int) -> Launch:
    """The tile that reads a chunk for several rows."""
    wide, least = tile_width(head_dim), triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Launch(max(32, least), 32, 4, 1, 1)
    if wide <= 128:
        return Launch(max(64, least), 64, 4, 3, 1)
    return Launch(max(64, least), 32, 4, 2, 1)


def row_keys(shape: SegmentShape) -> int:
    """The most keys of a block by row. Where chunks are shifted its last row is the shift's."""
    launch = choose(shape.dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads, 1)
    return launch.block_n - shape.shifted


class SegmentTables:
    """What each of `num_rows` rows looks at. Owned by the thread that launches.

    Rows of absent sequences come out as zero. `num_columns` more numbers of each row travel along
    and stand in `rows` [num_columns, num_rows] afterwards.
    """

    def __init__(
        self,
        num_rows: int,
        room: Room,
        shape: SegmentShape,
        device: torch.device,
        num_columns: int = 0,
    ) -> None:
        self.num_rows, self.room, self.shape = num_rows, room, shape
        group = shape.num_heads // shape.num_kv_heads
        self.by_row = choose(shape.dtype, shape.head_dim, group, 1)
        self.by_chunk = by_chunk_launch(shape.dtype, shape.head_dim, group)
        self.at_once = self.by_chunk.per_core * cores(device)  # programs that walk over tiles
        self.tiling = ChunkTiling(
            shape.chunk_page, row_keys(shape), self.by_chunk.block_n,
            self.by_chunk.block_m // group, shape.num_kv_heads, self.at_once, shape.coded,
        )  # fmt: skip
        least = self.tiling.lists * num_rows
        self.num_pieces = least + -(-PIECES * cores(device) // shape.num_kv_heads)
        # held, written by `hold`: counts | pairs | shifts | tiles | row_cells | words | chunk pages
        # moving, written by `update`: step | rows | pieces | row_pieces | blocks, own pages at once
        held = {
            "counts": (4,), "pairs": (room.pairs, 4), "shifts": (room.pairs,),
            "tiles": (room.most_cuts(self.tiling), 8),
            "row_cells": (num_rows, 2), "words": (room.words + SLACK,),
            # own pages are found from here, and a view of nothing has no address
            "pages": (max(1, room.chunk_pages),),
        }  # fmt: skip
        moving = {
            "step": (4,), "rows": (num_columns, num_rows), "pieces": (self.num_pieces, 4),
            "row_pieces": (num_rows, 2), "blocks": (room.blocks, 4), "own": (room.own_pages,),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = held | moving
        sizes = [_round_up(math.prod(each)) for each in shapes.values()]
        self._starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.on_device = {
            name: self._all[start : start + math.prod(shapes[name])].view(shapes[name])
            for name, start in self._starts.items()
        }
        self._arrays: dict[int, ChunkArrays] = {}
        self._held: tuple[int, ...] = ()
        self._sharing: Sharing | None = None

    @property
    def rows(self) -> Tensor:
        return self.on_device["rows"]

    def take_arrays(self, other: "SegmentTables") -> None:
        """What tables of the same shape have found out about chunks need not be found again."""
        if other.shape == self.shape:
            self._arrays = other._arrays

    def hold(self, chunks: Sequence[Sequence[SharedChunk]]) -> bool:
        """Row r looks at chunks[r], whole; an object that was given before is not looked into
        again. False: there is no room, and nothing has changed. Does not wait for the device."""
        held = tuple(id(each) for each in chunks)
        if held == self._held and self._sharing is not None:
            return True
        arrays: dict[int, ChunkArrays] = {}
        for number, each in zip(held, chunks, strict=True):
            if each and number not in arrays:  # rows of one prompt hold the same object
                known = self._arrays.get(number)
                arrays[number] = known or ChunkArrays(each, self.tiling.row_keys)
        of_rows = [arrays.get(number) for number in held]
        of_rows += [None] * (self.num_rows - len(of_rows))
        self._arrays = arrays  # also of those that are refused: they come again
        sharing = Sharing(of_rows, self.tiling)
        if not sharing.fits(self.room):
            return False
        self._held, self._sharing = held, sharing
        pairs = np.full((self.room.pairs, 4), -1, dtype=np.int32)  # the rest are none
        pairs[: len(sharing.pairs), :3] = sharing.pairs
        pairs[: len(sharing.pairs), 3] = sharing.pair_cells
        counts = np.array([len(sharing.pairs), len(sharing.tiles), sharing.num_walkers, 0])
        assert self.shape.shifted or (sharing.shifts == NO_SHIFT).all(), "tables know no shifts"
        self._send("counts", [counts])
        self._send("pairs", [pairs])
        self._send("shifts", [sharing.shifts])
        self._send("tiles", [sharing.tiles])
        self._send("row_cells", [sharing.row_cells])
        self._send("words", [sharing.words])
        self._send("pages", [sharing.pages])
        return True

    def update(
        self,
        own_keys: Sequence[int],
        own_pages: Sequence[ArrayLike],
        rows: ArrayLike | None = None,
    ) -> None:
        """Row i looks at the first own_keys[i] keys of its own pages, and at what it holds. Fewer
        rows than room: the rest are absent. `rows` are the numbers of all rows, absent ones too.
        Does not wait for the device."""
        assert self._sharing is not None, "hold comes before update"
        tables = [np.asarray(table, dtype=np.int32) for table in own_pages]
        num_pages = sum(map(len, tables))
        assert num_pages <= self.room.own_pages, f"{num_pages} pages for {self.room.own_pages}"
        keys = np.zeros(self.num_rows, dtype=np.int64)
        keys[: len(own_keys)] = own_keys
        num_blocks = self._sharing.count_blocks(keys)
        assert num_blocks <= self.room.blocks, f"{num_blocks} blocks for {self.room.blocks}"
        # own pages come right behind the blocks; slots are counted from the first chunk page on
        page0 = self._starts["blocks"] + 4 * num_blocks - self._starts["pages"]
        firsts = np.zeros(self.num_rows, dtype=np.int64)
        firsts[: len(tables)] = list(accumulate(map(len, tables), initial=page0))[:-1]
        slots = firsts * self.shape.page
        blocks, pieces, row_pieces = self._sharing.by_row(keys, slots, self.num_pieces)
        shape = self.rows.shape
        numbers = np.zeros(shape) if rows is None else np.asarray(rows).reshape(shape)
        step = np.array([num_blocks, 0, 0, 0])
        self._send("step", [step, numbers, pieces, row_pieces, blocks, *tables])

    def _send(self, first: str, parts: Sequence[NDArray[np.generic]]) -> None:
        """Write tables that lie behind each other, from the one called `first` on, in one copy."""
        is_cuda, names = self._all.is_cuda, list(self._starts)
        start, at = self._starts[first], 0
        fixed = names[names.index(first) : names.index(first) + 5]  # these have their places
        size = sum(part.size for part in parts) + ALIGNED * len(parts)
        # fresh memory each time: the last step's copy may still be reading its own
        sent = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        flat = sent.numpy()
        for nth, part in enumerate(parts):
            if nth < len(fixed):
                at = self._starts[fixed[nth]] - start
            flat[at : at + part.size] = part.reshape(-1)
            at += part.size
        self._all[start : start + at].copy_(sent[:at], non_blocking=is_cuda)


def _round_up(num: int) -> int:
    return -(-num // ALIGNED) * ALIGNED


def room_for_rows(
    num_rows: int, most_tokens: int, num_chunks: int, num_pages: int, shape: SegmentShape
) -> Room:
    """Room for sequences of up to `most_tokens` that hold `num_chunks` together, over a pool of
    `num_pages`."""
    return Room(
        pairs=num_rows + num_chunks,
        chunk_pages=num_pages,
        words=-(-num_rows * most_tokens // 32) + num_chunks,
        blocks=num_rows * (-(-most_tokens // row_keys(shape)) + 1) + num_chunks,
        own_pages=num_rows * min(num_pages, -(-most_tokens // shape.page)),
    )
