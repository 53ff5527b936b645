"""What a trace of requests has in common."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from common.overlap import overlap
from kvweave.types import ChunkId


def test_overlap_of_the_papers_example() -> None:
    requests = [[ChunkId(str(i)) for i in r] for r in ([1, 4, 5, 6, 7], [1, 2, 3, 4, 5])]
    assert overlap(requests) == (0.2, 0.6, 0.6)
    assert overlap(requests[:1]) == (0.0, 0.0, 0.0)


def test_overlap_parts_one_earlier_request_from_all_of_them() -> None:
    requests = [[ChunkId(c) for c in r] for r in ("ab", "cd", "ac")]
    assert overlap(requests) == (pytest.approx(0.25), pytest.approx(0.25), pytest.approx(0.5))
