"""Rows of chunks moved by one vector each: what drift's loop over chunks does."""

import pytest
import torch

from kvweave.fuse.drift import add_rotated
from kvweave.kernels.rope import Angles, make_angles
from kvweave.kernels.shift import shift


@pytest.mark.parametrize("rotary", [16, 8])
def test_rows_move_by_their_chunks_vector_and_no_others(rotary: int) -> None:
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 20, 3, 16, generator=g)
    by_k, by_v = torch.randn(2, 2, 3, 16, generator=g)
    row = torch.tensor([4, 5, 6, 11, 12])
    chunk = torch.tensor([0, 0, 0, 1, 1])
    turn = make_angles(row, torch.rand(rotary // 2, generator=g), 1.0, torch.float32)
    want_k, want_v = keys.clone(), values.clone()
    for nth, (first, last) in enumerate([(4, 7), (11, 13)]):
        own = chunk == nth
        angles = Angles(turn.cos[own], turn.sin[own])
        add_rotated(want_k[first:last], by_k[nth : nth + 1], angles)
        want_v[first:last] += by_v[nth]
    shift(keys, values, by_k, by_v, chunk, row, turn)
    torch.testing.assert_close(keys, want_k)
    torch.testing.assert_close(values, want_v)


def test_no_rows_are_no_work() -> None:
    keys = torch.ones(3, 2, 4)
    none = torch.zeros(0, dtype=torch.int64)
    angles = make_angles(none, torch.ones(2), 1.0, torch.float32)
    shift(keys, keys, torch.ones(1, 2, 4), torch.ones(1, 2, 4), none, none, angles)
    assert bool((keys == 1).all())
