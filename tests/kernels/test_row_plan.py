"""Plans of sparse-row attention: every row sees each of its keys once, whoever does the work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kernels.gpu.row_plan import Limits, Tiling, even_pieces, pieces

lengths = st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=40), min_size=1, max_size=4)


def blocks_seen(items: Limits, num_rows: int, most: int) -> Limits:
    """How often each row's piece covers each block [rows, blocks]."""
    seen = np.zeros((num_rows, most), dtype=np.int32)
    for row0, rows, b0, b1, *_ in items.tolist():
        seen[row0 : row0 + rows, b0:b1] += 1
    return seen


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 5, 32]), st.sampled_from([1, 16, 500]))
def test_every_row_sees_each_block_of_its_keys_once(
    sequences: list[list[int]], rows: int, at_once: int
) -> None:
    limits = np.array([n for each in sequences for n in sorted(each)], dtype=np.int32)
    ends = np.cumsum([len(each) for each in sequences]).tolist()
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    items, merges = pieces(limits, bounds, Tiling(rows, 64, 2, at_once))
    seen = blocks_seen(items, len(limits), 12)
    for row, limit in enumerate(limits):
        assert (seen[row, : -(-limit // 64)] == 1).all()
    assert seen.max() == 1
    widths = items[:, 3] - items[:, 2]
    assert (np.diff(widths) <= 0).all(), "the heaviest come first"
    for row0, count, b0, b1, hi, free, seq, _ in items.tolist():
        start, end = bounds[seq]
        assert start <= row0 < row0 + count <= end
        assert b0 < b1
        assert hi == limits[row0 + count - 1], "a tile ends with its last row's keys"
        assert free * 64 <= limits[row0], "what needs no mask is seen by its first row"
    slots = items[items[:, 7] >= 0, 7]
    assert sorted(slots.tolist()) == list(range(int(merges[:, 3].sum())))


def test_few_rows_are_cut_so_that_the_whole_chip_works() -> None:
    alone = np.array([32768], dtype=np.int32)
    items, merges = pieces(alone, ((0, 1),), Tiling(32, 128, 8, 264, evenness=1))
    assert 264 * 0.9 <= len(items) * 8 <= 264
    assert len(merges) == 1
    many = np.arange(1, 8193, dtype=np.int32)
    items, merges = pieces(many, ((0, 8192),), Tiling(32, 128, 8, 132))
    assert len(items) == 256, "many rows need no cut"
    assert not len(merges)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 60))
def test_tables_of_a_fixed_size_cover_every_sequence_once(given: list[int], spare: int) -> None:
    limits = np.array(given, dtype=np.int32)
    items, merges = even_pieces(limits, 128, len(limits) + spare)
    assert items.shape == (len(limits) + spare, 8)
    seen = blocks_seen(items, len(limits), 24)
    for row, limit in enumerate(limits):
        assert (seen[row, : -(-limit // 128)] == 1).all()
    assert seen.max() <= 1
    for row, (row0, rows, slot0, slots) in enumerate(merges.tolist()):
        assert (row0, rows) == (row, 1)
        mine = items[slot0 : slot0 + slots]
        assert (mine[:, 0] == row).all()
        assert (mine[:, 7] == np.arange(slot0, slot0 + slots)).all()


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(AssertionError, match="need more than 2 pieces"):
        even_pieces(np.array([1, 1], dtype=np.int32), 128, 2)
