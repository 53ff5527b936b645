"""Rows of chunks moved by one vector each, by index or run by run."""

import pytest
import torch

from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.shift import ChunkRuns, shift, shift_runs

BOUNDS = [(4, 7), (11, 13)]
ROW, CHUNK = torch.tensor([4, 5, 6, 11, 12]), torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize("by_runs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotary", "scale"), [(16, 1.0), (8, 1.0), (16, 1.3)])
def test_rows_move_by_their_chunks_vector_and_no_others(
    rotary: int, scale: float, dtype: torch.dtype, by_runs: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 20, 3, 16, generator=g).to(dtype)
    by_k, by_v = torch.randn(2, 2, 3, 16, generator=g)
    turn = make_angles(ROW, torch.rand(rotary // 2, generator=g), scale, dtype)
    want_k, want_v = keys.clone(), values.clone()
    for n, (row, c) in enumerate(zip(ROW.tolist(), CHUNK.tolist(), strict=True)):
        own = Angles(turn.cos[n : n + 1].float(), turn.sin[n : n + 1].float())
        want_k[row] = (keys[row].float() + rotate(by_k[c : c + 1], own)[0]).to(dtype)
        want_v[row] = (values[row].float() + by_v[c]).to(dtype)
    if by_runs:
        of_chunk = [Angles(turn.cos[:3], turn.sin[:3]), Angles(turn.cos[3:], turn.sin[3:])]
        starts = [start for start, _ in BOUNDS]
        runs = ChunkRuns.from_chunks(list(zip(starts, of_chunk, strict=True)), 16)
        shift_runs(keys, values, by_k, by_v, runs)
    else:
        shift(keys, values, by_k, by_v, CHUNK, ROW, turn)
    torch.testing.assert_close(keys, want_k)
    torch.testing.assert_close(values, want_v)


def test_no_rows_are_no_work() -> None:
    keys = torch.ones(3, 2, 4)
    none = torch.zeros(0, dtype=torch.int64)
    angles = make_angles(none, torch.ones(2), 1.0, torch.float32)
    shift(keys, keys, torch.ones(1, 2, 4), torch.ones(1, 2, 4), none, none, angles)
    assert bool((keys == 1).all())
