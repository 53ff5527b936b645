"""Attention over pages = attention over the same keys side by side."""

import random

import pytest
import torch

from kvweave.kernels.attention import attend
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.types import PagedSegment, Segment

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 24, 6, 2, 8


def case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(PAGES, PAGE, KV_HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    return keys, values


@pytest.mark.parametrize("seed", range(12))
def test_pages_anywhere_give_what_a_dense_buffer_gives(seed: int) -> None:
    rng = random.Random(seed)
    keys, values = case(seed)
    free = list(range(PAGES))
    rng.shuffle(free)
    paged, dense, positions, start = [], [], [], 0
    for _ in range(rng.randint(1, 4)):
        num_keys = rng.randint(1, 6 * PAGE)
        table = [free.pop() for _ in range(-(-num_keys // PAGE))] if len(free) >= 6 else [free[0]]
        if rng.random() < 0.4:
            table = sorted(table)
        num_keys = min(num_keys, len(table) * PAGE)
        rows = sorted(rng.sample(range(num_keys), rng.randint(1, num_keys)))
        paged.append(PagedSegment(start, start + len(rows), table))
        k, v = (pages[table].flatten(0, 1)[:num_keys] for pages in (keys, values))
        dense.append(Segment(start, start + len(rows), k, v))
        positions += rows
        start += len(rows)
    at = torch.tensor(positions)
    q = torch.randn(start, HEADS, DIM, dtype=torch.float64)
    ours = attend_paged(q, at, paged, keys, values)
    torch.testing.assert_close(ours, attend(q, at, dense))
    scaled = attend_paged(q, at, paged, keys, values, scale=0.3)
    torch.testing.assert_close(scaled, attend(q, at, dense, scale=0.3))


def test_what_lies_behind_a_row_is_never_read() -> None:
    keys, values = case(1)
    table = [7, 3, 11]
    q = torch.randn(2, HEADS, DIM, dtype=torch.float64)
    at = torch.tensor([2, 5])
    clean = attend_paged(q, at, [PagedSegment(0, 2, table)], keys, values)
    keys[3, 2:], values[3, 2:], keys[11], values[11] = (float("nan"),) * 4
    torch.testing.assert_close(
        attend_paged(q, at, [PagedSegment(0, 2, table)], keys, values), clean
    )


def test_decoding_over_several_pieces_in_half_precision_stays_close() -> None:
    keys, values = case(2, torch.bfloat16)
    table = [9, 2, 3, 17]
    q = torch.randn(1, HEADS, DIM)
    at = torch.tensor([14])
    half = attend_paged(q.bfloat16(), at, [PagedSegment(0, 1, table)], keys, values)
    k, v = (pages[table].flatten(0, 1).float() for pages in (keys, values))
    want = attend(q.bfloat16().float(), at, [Segment(0, 1, k, v)])
    torch.testing.assert_close(half.float(), want, atol=2e-2, rtol=2e-2)


def test_a_row_beyond_its_pages_is_a_bug_that_shows() -> None:
    keys, values = case(3)
    q = torch.randn(1, HEADS, DIM, dtype=torch.float64)
    with pytest.raises(AssertionError, match="beyond the pages"):
        attend_paged(q, torch.tensor([4]), [PagedSegment(0, 1, [0])], keys, values)
