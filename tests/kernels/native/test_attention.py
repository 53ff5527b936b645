"""Attention in C against its definition in PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvweave.kernels.attention import attend_reference
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.operators import attend_rows
from kvweave.kernels.types import Segment

HEADS = [(9, 3, 64), (4, 4, 80), (14, 2, 64), (2, 1, 7)]


ByTorch = Callable[[Callable[[], Tensor]], Tensor]


@pytest.mark.parametrize("num_keys", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_a_row_of_attention_is_the_definitions(
    library: CompiledLibrary, by_torch: ByTorch, num_keys: int, heads: int, kv_heads: int, dim: int
) -> None:
    q = torch.randn(1, heads, dim) * 3
    room = torch.randn(2, num_keys + 3, kv_heads, dim)
    room[:, num_keys:] = torch.nan  # behind the row: never looked at
    segment = Segment(0, 1, room[0], room[1])
    at = torch.tensor([num_keys - 1])
    right = by_torch(lambda: attend_reference(q, at, [segment]))
    torch.testing.assert_close(attend_reference(q, at, [segment]), right, rtol=1e-4, atol=1e-5)
    right = by_torch(lambda: attend_reference(q, at, [segment], 0.3))
    torch.testing.assert_close(attend_reference(q, at, [segment], 0.3), right, rtol=1e-4, atol=1e-5)


def test_attention_is_the_same_to_the_last_bit_with_any_threads(library: CompiledLibrary) -> None:
    q, keys, values = torch.randn(1, 9, 64), torch.randn(900, 3, 64), torch.randn(900, 3, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(attend_rows(library, q, torch.tensor([899]), keys, values, 0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_large_scores_do_not_overflow(library: CompiledLibrary, by_torch: ByTorch) -> None:
    q, keys = torch.full((1, 2, 64), 30.0), torch.randn(300, 2, 64) * 30
    segment, at = Segment(0, 1, keys, torch.randn(300, 2, 64)), torch.tensor([299])
    right = by_torch(lambda: attend_reference(q, at, [segment]))
    torch.testing.assert_close(attend_reference(q, at, [segment]), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "places",
    [range(2), range(65), range(200), range(100, 180), [0, 1, 63, 64, 65, 150], [3, 199]],
    ids=str,
)
def test_rows_of_attention_are_the_definitions(
    library: CompiledLibrary, by_torch: ByTorch, heads: tuple[int, int, int], places: list[int]
) -> None:
    num_heads, kv_heads, dim = heads
    q = torch.randn(len(places), num_heads, dim) * 3
    room = torch.randn(2, max(places) + 4, kv_heads, dim)
    room[:, max(places) + 1 :] = torch.nan  # behind the last row: never looked at
    segment, at = Segment(0, len(places), room[0], room[1]), torch.tensor(places)
    right = by_torch(lambda: attend_reference(q, at, [segment]))
    factor = dim**-0.5
    found = attend_rows(library, q, at, *room, factor)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend_reference(q, at, [segment]), right, rtol=1e-4, atol=1e-5)


def test_a_row_of_many_does_not_depend_on_the_others_or_on_threads(
    library: CompiledLibrary,
) -> None:
    q, (keys, values) = torch.randn(300, 6, 32), torch.randn(2, 300, 2, 32)
    at = torch.arange(300)
    before, whole = torch.get_num_threads(), attend_rows(library, q, at, keys, values, 0.2)
    try:
        for threads, part in ((1, slice(0, 300)), (2, slice(17, 219)), (5, slice(250, 252))):
            torch.set_num_threads(threads)
            found = attend_rows(library, q[part], at[part], keys, values, 0.2)
            assert torch.equal(found, whole[part])
    finally:
        torch.set_num_threads(before)
    later = values.clone()
    later[200:] = 1e30  # what comes behind changes nothing
    assert torch.equal(attend_rows(library, q, at, keys, later, 0.2)[:200], whole[:200])


@pytest.mark.parametrize("heads", [*HEADS, (40, 2, 16)])
def test_a_row_finds_the_same_alone_among_others_and_in_pages(
    library: CompiledLibrary, heads: tuple[int, int, int]
) -> None:
    num_heads, kv_heads, dim = heads
    q, room = torch.randn(700, num_heads, dim) * 3, torch.randn(2, 700, kv_heads, dim)
    at = torch.arange(700)
    whole = attend_rows(library, q, at, *room, 0.2)
    for row in (0, 1, 63, 64, 255, 256, 300, 511, 512, 699):
        alone = attend_rows(library, q[row : row + 1], at[row : row + 1], *room, 0.2)
        assert torch.equal(alone[0], whole[row]), row
    pages = torch.full((2, 1500, kv_heads, dim), torch.nan)
    pages[:, 900:1300], pages[:, 40:140], pages[:, 300:500] = room.split((400, 100, 200), dim=1)
    pieces = [(900, 1300), (40, 140), (300, 500)]
    assert torch.equal(attend_rows(library, q, at, *pages, 0.2, pieces), whole)
    last = attend_rows(library, q[-1:], at[-1:], *pages, 0.2, pieces)
    assert torch.equal(last[0], whole[-1])


def test_many_sequences_of_a_batch_look_at_their_own_keys(
    library: CompiledLibrary, by_torch: ByTorch
) -> None:
    q, kv = torch.randn(60, 6, 32), torch.randn(2, 2, 40, 2, 32)
    at = torch.cat([torch.arange(40), torch.arange(5, 25)])
    segments = [Segment(0, 40, *kv[0]), Segment(40, 60, *kv[1])]
    right = by_torch(lambda: attend_reference(q, at, segments))
    torch.testing.assert_close(attend_reference(q, at, segments), right, rtol=1e-4, atol=1e-5)


def test_a_row_that_is_no_number_spoils_no_other(library: CompiledLibrary) -> None:
    q, (keys, values) = torch.randn(40, 6, 32), torch.randn(2, 40, 2, 32)
    at = torch.arange(40)
    right = attend_rows(library, q, at, keys, values, 0.2)
    q[11] = torch.nan
    found = attend_rows(library, q, at, keys, values, 0.2)
    assert found[11].isnan().all()
    others = [i for i in range(40) if i != 11]
    assert torch.equal(found[others], right[others])


def test_what_does_not_fit_is_refused_before_memory_is_touched(library: CompiledLibrary) -> None:
    keys = torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="are not in 5 slots"):
        attend_rows(library, torch.zeros(1, 4, 8), torch.tensor([0]), keys, keys, 1.0, [(3, 6)])
    with pytest.raises(ValueError, match="no rows"):
        attend_rows(library, torch.zeros(2, 3, 8), torch.arange(2), keys, keys, 1.0)
    with pytest.raises(ValueError, match="do not fit 5 keys"):
        attend_rows(library, torch.zeros(2, 4, 8), torch.tensor([0, 5]), keys, keys, 1.0)
