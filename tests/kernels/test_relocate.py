"""Rows that change their place: keys turned on the way, values as they are."""

import pytest
import torch

from kvweave.kernels.place import relocate
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.types import RowMoves


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_key_turned_on_is_the_key_turned_once(dtype: torch.dtype) -> None:
    """To its place in the chunk, then by the chunk's start: as if it had been turned to both."""
    torch.manual_seed(0)
    inv_freq = 10_000.0 ** -(torch.arange(0, 8, dtype=torch.float32) / 8)
    raw, values = torch.randn(2, 12, 2, 20).to(dtype)  # four dims are never turned
    wide = torch.float32 if dtype is torch.bfloat16 else dtype

    def turned(positions: torch.Tensor) -> torch.Tensor:
        return rotate(raw.to(wide), make_angles(positions, inv_freq, 1.0, wide))

    local = torch.arange(12) % 6  # two chunks of six
    starts = torch.tensor([3, 900])
    moves = RowMoves(torch.arange(12), torch.arange(12).flip(0) + 5, torch.arange(12) // 6)
    keys = turned(local).to(dtype)
    out_k, out_v = torch.zeros(2, 20, 2, 20, dtype=dtype)
    by = make_angles(starts, inv_freq, 1.0, torch.float32)
    relocate(keys, values, moves, by, out_k, out_v)
    want = turned(local + starts.repeat_interleave(6)).to(dtype)
    close = 0.05 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(out_k[moves.target], want, atol=close, rtol=close)
    torch.testing.assert_close(out_v[moves.target], values)
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[moves.target] = False
    assert not out_k[untouched].any()
    assert not out_v[untouched].any()


def test_without_a_turn_keys_stay_as_they_are() -> None:
    keys, values = torch.randn(2, 6, 2, 8)
    out_k, out_v = torch.zeros(2, 9, 2, 8)
    moves = RowMoves(torch.tensor([5, 0, 3]), torch.tensor([1, 8, 0]))
    relocate(keys, values, moves, None, out_k, out_v)
    assert torch.equal(out_k[moves.target], keys[moves.source])
    assert torch.equal(out_v[moves.target], values[moves.source])
    empty = torch.empty(0, dtype=torch.int64)
    relocate(keys, values, RowMoves(empty, empty), Angles(keys, keys), out_k, out_v)
