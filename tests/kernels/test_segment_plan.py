"""Plans of attention over segments: every row sees each of its keys once, whoever does the work."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kernels.gpu.segment_plan import (
    NO_MASK,
    WINDOW,
    ChunkArrays,
    ChunkTiling,
    Room,
    Sharing,
)
from kvweave.kernels.types import SharedChunk

PAGE = 16


def make_chunks(rng: random.Random, bank: list[SharedChunk]) -> tuple[SharedChunk, ...]:
    """Some of the bank, each at its place and with its mask in this prompt."""
    found = []
    for chunk in rng.sample(bank, rng.randint(0, len(bank))):
        gone = torch.rand(chunk.num_tokens) < rng.choice([0.0, 0.3, 0.9, 1.0])
        mask = gone if rng.random() < 0.7 else None
        found.append(chunk._replace(start=rng.randint(0, 999), replaced=mask))
    return tuple(found)


def is_set(sharing: Sharing, bit: int) -> bool:
    """Behind the last word anything may stand: what a window has there is beyond its count."""
    return bit // 32 < len(sharing.words) and bool(sharing.words[bit // 32] >> (bit % 32) & 1)


def seen_by_rows(
    sharing: Sharing, own_keys: np.ndarray, num_pieces: int, own_page0: int
) -> list[dict[tuple[int, int], int]]:
    """How often each row looks at each (pair, key), by following the tables as the kernels do."""
    slots = np.full(sharing.num_rows, own_page0 * PAGE)
    blocks, pieces, row_pieces = sharing.by_row(own_keys, slots, num_pieces)
    assert len(blocks) == sharing.count_blocks(own_keys)
    tiling = sharing.tiling
    seen: list[dict[tuple[int, int], int]] = [{} for _ in range(sharing.num_rows)]

    def look(row: int, pair: int, slot: int, mask: int) -> None:
        if mask != NO_MASK and is_set(sharing, mask):
            return
        seen[row][pair, slot] = seen[row].get((pair, slot), 0) + 1

    for row, (first, count) in enumerate(row_pieces.tolist()):
        for b0, b1, cell, has_codes in pieces[first : first + count].tolist():
            assert first <= cell < first + count
            for slot, num, pair, bit in blocks[b0:b1].tolist():
                if tiling.coded:  # a piece has own pages or chunks
                    assert has_codes == (pair >= sharing.num_rows)
                assert sharing.pairs[pair, 0] == row
                assert 0 < num <= tiling.row_keys
                if bit == NO_MASK:
                    kept = list(range(num))
                else:  # the first rows of the window that are not replaced
                    there = [j for j in range(WINDOW) if not is_set(sharing, bit + j)]
                    kept = there[:num]
                assert len(kept) == num
                for j in kept:
                    look(row, pair, slot + j, NO_MASK if bit == NO_MASK else bit + j)
    cells: set[int] = set()
    for slot, num, word0, pair0, members, cut, masked, _ in sharing.tiles.tolist():
        assert 0 < members <= tiling.tile_rows
        for pair in range(pair0, pair0 + members):
            row, _, mask = sharing.pairs[pair].tolist()
            cell = int(sharing.pair_cells[pair]) + cut
            assert cell not in cells
            cells.add(cell)
            first, count = sharing.row_cells[row].tolist()
            assert first <= cell < first + count
            assert masked or mask == NO_MASK
            for j in range(num):
                bit = NO_MASK if mask == NO_MASK else (mask + word0) * 32 + j
                look(row, pair, slot + j, bit)
    assert cells == set(range(sharing.num_cells))
    return seen


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 40, 300]), st.booleans(),
)  # fmt: skip
def test_every_row_sees_each_of_its_keys_once(
    seed: int, num_rows: int, tile_rows: int, at_once: int, coded: bool
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    bank, page = [], 0
    for _ in range(6):
        num = rng.choice([rng.randint(1, 200), 900])
        pages = list(range(page, page + -(-num // PAGE)))
        page += len(pages)
        bank.append(SharedChunk(pages, num, 0))
    held = [make_chunks(rng, bank) for _ in range(num_rows)]
    tiling = ChunkTiling(PAGE, 64, 32, tile_rows, 2, at_once, coded)
    sharing = Sharing([ChunkArrays(each, 64) if each else None for each in held], tiling)
    own_keys = np.array([rng.choice([0, 1, 64, rng.randint(0, 400)]) for _ in held])
    num_pieces = tiling.lists * num_rows + rng.randint(1, 40)
    seen = seen_by_rows(sharing, own_keys, num_pieces, 10_000)
    for row, (chunks, keys) in enumerate(zip(held, own_keys.tolist(), strict=True)):
        assert set(seen[row].values()) <= {1}
        wanted = keys
        by_start: dict[int, set[int]] = {}
        for chunk in chunks:
            kept = list(range(chunk.num_tokens))
            if chunk.replaced is not None:
                kept = [j for j in kept if not chunk.replaced[j]]
            wanted += len(kept)
            places = {chunk.pages[j // PAGE] * PAGE + j % PAGE for j in kept}
            by_start.setdefault(chunk.start, set()).update(places)
        assert len(seen[row]) == wanted
        for pair, slot in seen[row]:
            if pair < num_rows:
                assert pair == row
                assert 0 <= slot - 10_000 * PAGE < keys
            else:  # slots count along the table of pages, which names the pool's
                start = int(sharing.pairs[pair, 1])
                place = int(sharing.pages[slot // PAGE]) * PAGE + slot % PAGE
                assert place in by_start[start]
    room = Room(len(sharing.pairs), len(sharing.pages), len(sharing.words), 0, 0)
    assert len(sharing.tiles) <= room.most_cuts(tiling)
    assert sharing.num_cells <= room.most_cells(tiling)
    assert sharing.fits(room)
    assert not sharing.fits(room._replace(pairs=room.pairs - 1))


def test_a_chunk_of_several_rows_is_read_once_and_one_of_a_single_row_by_that_row() -> None:
    shared = SharedChunk([0, 1], 32, 5)
    mine = SharedChunk([2], 16, 40)
    tiling = ChunkTiling(PAGE, 128, 64, 16, 8, 264)
    rows = [ChunkArrays((shared, mine), 128), ChunkArrays((shared._replace(start=77),), 128), None]
    sharing = Sharing(rows, tiling)
    assert sharing.tiles[:, [1, 4]].tolist() == [[32, 2]], "32 keys for two rows"
    assert sharing.pages.tolist() == [0, 1, 2], "the pages of a chunk stand once in the table"
    blocks, _, _ = sharing.by_row(np.array([3, 3, 3]), np.zeros(3, dtype=np.int64), 10)
    assert blocks[:, 1].tolist() == [3, 16, 3, 3]


def test_few_long_chunks_are_cut_so_that_the_whole_chip_works() -> None:
    long = SharedChunk(list(range(512)), 8192, 0)
    tiling = ChunkTiling(PAGE, 128, 64, 16, 8, 264)
    rows = [ChunkArrays((long._replace(start=i),), 128) for i in range(8)]
    assert 264 * 0.8 <= len(Sharing(rows, tiling).tiles) * 8 <= 264 * 1.1


@pytest.mark.parametrize("num", [1, 31, 32, 33, 100])
def test_masks_are_packed_by_token(num: int) -> None:
    gone = torch.rand(num) < 0.5
    gone[0] = True
    arrays = ChunkArrays((SharedChunk([1], 3, 0), SharedChunk([0] * 9, num, 0, gone)), 64)
    assert arrays.word_at.tolist() == [NO_MASK, 0]
    words = arrays.words
    bits = [bool(words[j // 32] >> (j % 32) & 1) for j in range(num)]
    assert bits == gone.tolist()


def test_a_mask_of_another_length_is_a_bug_that_shows() -> None:
    with pytest.raises(AssertionError, match="3 mask bits for 4 rows"):
        ChunkArrays((SharedChunk([0], 4, 0, torch.zeros(3, dtype=torch.bool)),), 64)


@pytest.mark.parametrize(
    ("chunks", "at_once", "walkers"), [(9, 264, 72), (54, 264, 216), (0, 8, 1)]
)
def test_walkers_have_as_many_tiles_each(chunks: int, at_once: int, walkers: int) -> None:
    held = tuple(SharedChunk([i], PAGE, 16 * i) for i in range(chunks))
    tiling = ChunkTiling(PAGE, 128, 64, 16, 8, at_once)
    arrays = ChunkArrays(held, 128) if held else None
    assert Sharing([arrays, arrays], tiling).num_walkers == walkers
