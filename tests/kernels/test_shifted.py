"""What the shift of a chunk becomes on the mean over its places."""

import pytest
import torch

from kvweave.kernels.rope import make_angles, rotate
from kvweave.kernels.shift import mean_turned


@pytest.mark.parametrize("still", [0, 6])
def test_it_is_the_mean_of_what_each_key_would_be_shifted_by(still: int) -> None:
    half, sizes = 8, [1, 2, 57, 400]
    inv_freq = 10_000.0 ** -(torch.arange(half) / half)
    inv_freq[-1] = 0.0  # a channel that does not turn
    by = torch.randn(3, len(sizes), 2, 2 * half + still)
    found = mean_turned(by, sizes, lambda at: make_angles(at, inv_freq, 1.0, torch.float32))
    assert found.shape == by.shape
    for nth, size in enumerate(sizes):
        angles = make_angles(torch.arange(size), inv_freq, 1.0, torch.float32)
        for layer in range(3):
            each = rotate(by[layer, nth].expand(size, -1, -1).contiguous(), angles)
            torch.testing.assert_close(found[layer, nth], each.mean(0), atol=1e-5, rtol=1e-4)


def test_a_slow_channel_keeps_its_shift_and_a_fast_one_loses_it() -> None:
    inv_freq = torch.tensor([1.0, 1e-5])
    by = torch.ones(1, 1, 1, 4)
    found = mean_turned(by, [300], lambda at: make_angles(at, inv_freq, 1.0, torch.float32))
    fast, slow = found[0, 0, 0].view(2, 2).norm(dim=0) / 2**0.5
    assert fast < 0.01
    assert slow > 0.99
