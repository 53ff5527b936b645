"""How rows and the chunks they share are cut into work. Plain numbers, made on the host.

A *pair* is a row and something it looks at: its own pages, or a chunk. Each pair has its own turned
query. Chunks that at least two rows hold are answered *by chunk*: a tile has the queries of several
rows and reads the chunk's pages once for all of them. What one row alone looks at is answered *by
row*: its own pages and its chunks are one list of blocks, without replaced rows, cut into even
pieces. Every piece and every row of a tile leaves its answer in a *cell*; those of one row lie side
by side in both halves, and are merged. A pair may see its chunk shifted (`kernels/shift.py`): by
row, the row of the shift is read as the last one of each block.

    cells   | pieces of row 0 | of row 1 | ... || chunks of row 0 | of row 1 | ...
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.kernels.types import SharedChunk

Numbers = NDArray[np.int32]

NO_MASK = -1
NO_SHIFT = -1
WINDOW = 256  # rows of a chunk among which those of a block lie
# of a tile that is cut: below, leaving and merging cells costs more than it saves
FEWEST_BLOCKS = 2


class ChunkTiling(NamedTuple):
    """What the kernels do at a time."""

    page: int  # tokens of a chunk's page
    row_keys: int  # keys of a block, by row
    chunk_keys: int  # keys of a block, by chunk: a multiple of 32
    tile_rows: int  # rows of a tile
    kv_heads: int  # programs per tile
    at_once: int  # programs by chunk that run at the same time
    coded: bool = False  # chunks lie in 8 bits: no piece has own pages and chunks

    @property
    def lists(self) -> int:
        """Lists of blocks for each row: a piece is cut from one of them."""
        return 2 if self.coded else 1


class Room(NamedTuple):
    """What tables have room for."""

    pairs: int
    chunk_pages: int
    words: int  # of masks
    blocks: int
    own_pages: int

    def most_cuts(self, tiling: ChunkTiling) -> int:
        """Pieces of tiles, at most: a tile has two rows or more, and there are about as many cuts
        as programs run at the same time."""
        return self.pairs + -(-tiling.at_once // tiling.kv_heads)

    def most_cells(self, tiling: ChunkTiling) -> int:
        """Cells of chunks, at most; by row there are as many as pieces."""
        return self.pairs + tiling.tile_rows * -(-tiling.at_once // tiling.kv_heads)


class ChunkArrays:
    """The chunks of one sequence as arrays, made once."""

    def __init__(self, chunks: Sequence[SharedChunk], size: int) -> None:
        """`size` is the most keys of a block by row."""
        self.chunks = chunks  # kept: tables are found again by which object this is
        self.names = [(tuple(chunk.pages), chunk.num_tokens) for chunk in chunks]
        self.starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        shifts = [NO_SHIFT if chunk.shift is None else chunk.shift for chunk in chunks]
        self.shifts = np.array(shifts, dtype=np.int64)
        masks = [_words(chunk) for chunk in chunks]
        self.words = _join(masks, np.int32)
        sizes = np.array([len(mask) for mask in masks], dtype=np.int64)
        self.word_at = np.cumsum(sizes) - sizes  # [chunks] first word of each
        self.word_at[sizes == 0] = NO_MASK
        # rows that are not replaced, in even blocks of at most `size`: whose chunk's each block is,
        # where it begins, how many such rows it has. It ends within WINDOW rows of its first
        cuts = [_blocks(chunk, size) for chunk in chunks]
        self.block_chunk = np.repeat(np.arange(len(cuts)), [len(first) for first, _ in cuts])
        self.block_first = np.concatenate([first for first, _ in cuts])
        self.block_keys = np.concatenate([num for _, num in cuts])


def _blocks(chunk: SharedChunk, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if chunk.replaced is None:
        return _even(chunk.num_tokens, size)
    return _cut(np.flatnonzero(~chunk.replaced.numpy()), size)


@lru_cache(maxsize=4096)
def _even(num_tokens: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks of a chunk of which nothing is replaced: chunks of one length have the same. Callers
    only read them."""
    return _cut(np.arange(num_tokens), size)


def _join(parts: Sequence[NDArray[Any]], dtype: type = np.int64) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _cut(live: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    count = -(-len(live) // size)
    at = len(live) * np.arange(count) // max(1, count)
    num = np.diff(at, append=len(live))
    if count and (live[at + num - 1] - live[at]).max() >= WINDOW:  # most rows are replaced
        cuts, i = [], 0
        while i < len(live):
            cuts.append(i)
            i = min(i + size, int(np.searchsorted(live, live[i] + WINDOW)))
        at = np.array(cuts)
        num = np.diff(at, append=len(live))
    return live[at], num


def _words(chunk: SharedChunk) -> Numbers:
    """Replaced rows as bits, 32 to a number; nothing if there are none."""
    if chunk.replaced is None:
        return np.zeros(0, dtype=np.int32)
    gone = chunk.replaced.numpy()
    assert len(gone) == chunk.num_tokens, f"{len(gone)} mask bits for {chunk.num_tokens} rows"
    if not gone.any():
        return np.zeros(0, dtype=np.int32)
    packed = np.zeros(-(-len(gone) // 32) * 4, dtype=np.uint8)
    packed[: -(-len(gone) // 8)] = np.packbits(gone, bitorder="little")
    return packed.view("<i4").astype(np.int32, copy=False)


def _number_chunks(
    held: Sequence[ChunkArrays],
) -> tuple[NDArray[np.int64], list[tuple[tuple[int, ...], int]]]:
    """Number the distinct chunks: the number of each held one, behind each other, and the pages and
    the keys of each number."""
    names: dict[tuple[tuple[int, ...], int], int] = {}
    numbers = {  # rows of one prompt hold the same object: each is looked into once
        id(each): np.array([names.setdefault(n, len(names)) for n in each.names], dtype=np.int64)
        for each in dict.fromkeys(held)
    }
    return _join([numbers[id(each)] for each in held]), list(names)


class Sharing:
    """Who looks at which chunk, of a batch whose sequences stay the same: made when one comes or
    goes, so no loop in here is over more than the chunks of a batch. Pair r is row r and its own
    pages; the pairs of a chunk lie behind each other."""

    def __init__(self, rows: Sequence[ChunkArrays | None], tiling: ChunkTiling) -> None:
        num = self.num_rows = len(rows)
        self.tiling = tiling
        there = [(row, arrays) for row, arrays in enumerate(rows) if arrays is not None]
        chunk, names = _number_chunks([each for _, each in there])
        order = np.argsort(chunk, kind="stable")
        chunk = chunk[order]
        pages = [own for own, _ in names]
        self.pages = np.array([page for own in pages for page in own], dtype=np.int32)
        sizes = np.array([len(own) for own in pages], dtype=np.int64)
        slot = (np.cumsum(sizes) - sizes) * tiling.page  # [distinct chunks]
        keys = np.array([num_keys for _, num_keys in names], dtype=np.int64)
        self.words = _join([each.words for _, each in there], np.int32)
        # by held chunk, in the order of pairs
        counts = [len(each.names) for _, each in there]
        holder = np.repeat([row for row, _ in there], counts).astype(np.int64)[order]
        start = _join([each.starts for _, each in there])[order]
        mask = _join([each.word_at for _, each in there])
        words_before = np.cumsum([0, *(len(each.words) for _, each in there)])[:-1]
        mask = np.where(mask == NO_MASK, NO_MASK, mask + np.repeat(words_before, counts))[order]
        own = np.stack([np.arange(num), np.zeros(num), np.full(num, NO_MASK)], 1)
        held = np.stack([holder, start, mask], 1)
        self.pairs = np.concatenate([own, held]).astype(np.int32)  # row, start, mask
        shift = _join([each.shifts for _, each in there])[order]
        self.shifts = np.full(len(self.pairs), NO_SHIFT, dtype=np.int32)  # slots
        self.shifts[num:] = shift
        holders = np.bincount(chunk, minlength=len(names))
        nth = np.arange(len(chunk)) - (np.cumsum(holders) - holders)[chunk]
        # tiles: first slot, keys, pair, rows, masked
        heads = np.flatnonzero((nth % tiling.tile_rows == 0) & (holders[chunk] > 1))
        members = np.minimum(tiling.tile_rows, holders[chunk[heads]] - nth[heads])
        is_masked = np.cumsum(np.concatenate([[0], mask != NO_MASK]))
        masked = is_masked[heads + members] > is_masked[heads]
        columns = [slot[chunk[heads]], keys[chunk[heads]], num + heads, members, masked]
        self._tiles = np.stack(columns, 1).astype(np.int64)
        # what one row alone holds, by its place in the arrays: its pair, or none
        pair = np.empty(len(order), dtype=np.int64)
        pair[order] = np.where(holders[chunk] == 1, num + np.arange(len(order)), -1)
        slots, bits = np.empty_like(pair), np.empty_like(pair)
        slots[order], bits[order] = slot[chunk], np.where(mask == NO_MASK, NO_MASK, 32 * mask)
        self._line_up(there, pair, slots, bits)
        self._spread()

    def _line_up(
        self,
        there: Sequence[tuple[int, ChunkArrays]],
        pair: NDArray[np.int64],
        slots: NDArray[np.int64],
        bits: NDArray[np.int64],
    ) -> None:
        """Blocks of chunks that one row alone holds: row, first slot, keys, pair, mask bit."""
        if not (pair >= 0).any():  # as of one prompt: its rows share all it has
            self._alone = np.zeros((0, 5), dtype=np.int64)
            self._alone_of = np.zeros(self.num_rows, dtype=np.int64)
            return
        before = np.cumsum([0, *(len(each.names) for _, each in there)])[:-1]
        num_blocks = [len(each.block_chunk) for _, each in there]
        place = _join([each.block_chunk for _, each in there]) + np.repeat(before, num_blocks)
        first = _join([each.block_first for _, each in there])
        row = np.repeat([row for row, _ in there], num_blocks).astype(np.int64)
        bit = np.where(bits[place] == NO_MASK, NO_MASK, bits[place] + first)
        keys = _join([each.block_keys for _, each in there])
        columns = [row, slots[place] + first, keys, pair[place], bit]
        self._alone = np.stack(columns, 1)[pair[place] >= 0]
        self._alone_of = np.bincount(self._alone[:, 0], minlength=self.num_rows)

    def _spread(self) -> None:
        """Tiles cut along their keys where there are few of them, and cells for their rows."""
        tiling = self.tiling
        first, keys, pair0, members, masked = self._tiles.T
        blocks = -(-keys // tiling.chunk_keys)
        fair = math.ceil(blocks.sum() * tiling.kv_heads / tiling.at_once) if len(blocks) else 1
        most = max(FEWEST_BLOCKS, fair)
        cuts = np.maximum(1, -(-blocks // most))
        # cells of a row lie side by side: one for each cut of each of its chunks
        is_held = np.zeros(len(self.pairs), dtype=np.int64)
        tile = np.repeat(np.arange(len(cuts)), members)
        nth = np.arange(len(tile)) - np.repeat(np.cumsum(members) - members, members)
        is_held[pair0[tile] + nth] = cuts[tile]
        order = np.argsort(self.pairs[:, 0], kind="stable")
        taken = np.cumsum(is_held[order]) - is_held[order]
        self.pair_cells = np.zeros(len(self.pairs), dtype=np.int32)
        self.pair_cells[order] = taken
        counts = np.bincount(self.pairs[:, 0], is_held, self.num_rows).astype(np.int32)
        self.row_cells = np.stack([np.cumsum(counts) - counts, counts], 1).astype(np.int32)
        self.num_cells = int(counts.sum())
        # pieces of a tile, all pieces of a chunk's tiles near each other
        piece = np.repeat(np.arange(len(cuts)), cuts)
        cut = np.arange(len(piece)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        b0 = blocks[piece] * cut // cuts[piece]
        b1 = blocks[piece] * (cut + 1) // cuts[piece]
        key0 = b0 * tiling.chunk_keys
        num = np.minimum(b1 * tiling.chunk_keys, keys[piece]) - key0
        columns = [
            *(first[piece] + key0, num, key0 // 32, pair0[piece], members[piece]),
            *(cut, masked[piece], np.zeros_like(cut)),
        ]
        self.tiles = np.stack(columns, 1).astype(np.int32)

    @property
    def num_walkers(self) -> int:
        """Programs that walk over tiles, so that each has as many to do: the others have time for
        what is answered by row."""
        units = len(self.tiles) * self.tiling.kv_heads
        rounds = max(1, -(-units // self.tiling.at_once))
        return max(1, -(-units // rounds))

    def count_blocks(self, own_keys: NDArray[np.int64]) -> int:
        """Blocks of a step in which row r sees the first own_keys[r] own keys."""
        return int((-(-own_keys // self.tiling.row_keys)).sum()) + len(self._alone)

    def by_row(
        self, own_keys: NDArray[np.int64], own_slots: NDArray[np.int64], num_pieces: int
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Tables [blocks, 4], [num_pieces, 4] and [rows, 2] of a step in which row r sees the first
        own_keys[r] own keys, whose pages begin at slot own_slots[r] of the pages' table.

        A block: first slot, keys, pair, first mask bit. A piece: first block, end, cell, whether it
        has codes. A row: first piece, pieces; there is at least one, and pieces left over look at
        nothing.
        """
        size, num_rows = self.tiling.row_keys, self.num_rows
        own = -(-own_keys // size)
        of_row = own + self._alone_of
        before = np.cumsum(of_row) - of_row
        table = np.empty((int(of_row.sum()), 4), dtype=np.int32)
        row = np.repeat(np.arange(num_rows), own)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(own) - own, own)
        blocks = (own_slots[row] + nth * size, np.minimum(own_keys[row] - nth * size, size), row)
        at = before[row] + nth
        table[at, 0], table[at, 1], table[at, 2] = blocks
        table[at, 3] = NO_MASK
        row = self._alone[:, 0]
        first = np.cumsum(self._alone_of) - self._alone_of
        table[(before + own - first)[row] + np.arange(len(row))] = self._alone[:, 1:]
        lists = self.tiling.lists
        of_list = np.stack([own, self._alone_of], 1).reshape(-1) if lists == 2 else of_row
        least = lists * num_rows
        assert num_pieces > least, f"{num_rows} rows need more pieces than {num_pieces}"
        most = max(1, math.ceil(len(table) / (num_pieces - least)))
        count = -(-of_list // most)
        count[::lists] = np.maximum(1, count[::lists])
        first = np.cumsum(count) - count
        before = np.cumsum(of_list) - of_list
        nth = np.repeat(np.arange(least), count)  # the list of each piece
        part = np.arange(len(nth)) - first[nth]
        pieces = np.zeros((num_pieces, 4), dtype=np.int32)
        pieces[:, 2] = np.arange(num_pieces)
        pieces[: len(nth), 0] = before[nth] + of_list[nth] * part // count[nth]
        pieces[: len(nth), 1] = before[nth] + of_list[nth] * (part + 1) // count[nth]
        pieces[: len(nth), 3] = nth % lists
        row_pieces = [first[::lists], count.reshape(num_rows, lists).sum(1)]
        return table, pieces, np.stack(row_pieces, 1).astype(np.int32)

    def fits(self, room: Room) -> bool:
        """Whether tables with that room hold this, whatever the rows' own keys."""
        return (
            len(self.pairs) <= room.pairs
            and len(self.pages) <= room.chunk_pages
            and len(self.words) <= room.words
        )


def cut_chunks(
    chunks: Sequence[SharedChunk], first_page: int, page: int, block: int, num_parts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut the keys of a prompt's chunks into even parts: tables [num_parts, 2] and [runs, 4].

    A part: first run and end. A run is what one part has of one chunk: first slot, keys, which
    chunk, 0. Slots count tokens of the pages of all chunks, which have `page` each and come behind
    `first_page` others. Parts are cut between blocks of `block` keys, as even as these allow.
    """
    keys = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    pages = np.array([len(chunk.pages) for chunk in chunks], dtype=np.int64)
    slot = (first_page + np.cumsum(pages) - pages) * page  # first of each chunk
    blocks = -(-keys // block)
    first = np.cumsum(blocks) - blocks
    num_blocks = int(blocks.sum())
    edges = num_blocks * np.arange(num_parts + 1) // num_parts
    # runs begin where a chunk or a part does, and end where the next one begins
    cuts = np.union1d(first, edges[edges < num_blocks])
    chunk = np.searchsorted(first + blocks, cuts, "right")
    key0 = (cuts - first[chunk]) * block
    ends = (np.append(cuts[1:], num_blocks) - first[chunk]) * block
    key1 = np.minimum(ends, keys[chunk])
    runs = np.stack([slot[chunk] + key0, key1 - key0, chunk, np.zeros_like(chunk)], 1)
    at = np.searchsorted(cuts, edges)
    return np.stack([at[:-1], at[1:]], 1), runs
