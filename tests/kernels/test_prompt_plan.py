"""Chunks of one prompt are cut into even parts that leave out nothing."""

import random

import numpy as np
import pytest

from kvweave.kernels.gpu.segment_plan import cut_chunks
from kvweave.kernels.types import SharedChunk

PAGE, BLOCK = 16, 8


def make_chunks(sizes: list[int]) -> list[SharedChunk]:
    starts = np.cumsum([5, *sizes])
    return [
        SharedChunk(list(range(-(-size // PAGE))), size, int(start))
        for size, start in zip(sizes, starts, strict=False)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_key_is_in_one_run_of_one_part(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 60) for _ in range(rng.randint(1, 12))]
    num_parts, first_page = rng.randint(1, 20), rng.randint(0, 3)
    parts, runs = cut_chunks(make_chunks(sizes), first_page, PAGE, BLOCK, num_parts)
    assert parts[0, 0] == 0
    assert parts[-1, 1] == len(runs)
    assert (parts[1:, 0] == parts[:-1, 1]).all(), "parts follow each other"
    seen = [np.zeros(size, np.int64) for size in sizes]
    pages = [-(-size // PAGE) for size in sizes]
    for slot, keys, chunk, _ in runs.tolist():
        first = slot - PAGE * (first_page + sum(pages[:chunk]))
        assert keys > 0
        assert first % BLOCK == 0, "runs begin with a block"
        seen[chunk][first : first + keys] += 1
    assert all((each == 1).all() for each in seen)
    blocks = [int((-(-runs[a:b, 1] // BLOCK)).sum()) for a, b in parts.tolist()]
    assert max(blocks) - min(blocks) <= 1, "parts are even"


def test_a_prompt_without_chunks_has_parts_without_runs() -> None:
    parts, runs = cut_chunks([], 2, PAGE, BLOCK, 4)
    assert parts.tolist() == [[0, 0]] * 4
    assert len(runs) == 0
