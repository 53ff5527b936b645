"""Rotate-and-place against float64; the kernels are held to the same in tests/gpu."""

import pytest
import torch
from torch import Tensor

from kvweave.kernels.place import place


def in_float64(k: Tensor, positions: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    half = len(inv_freq)
    turn = torch.polar(torch.ones(()).double(), positions[:, None, None].double() * inv_freq)
    pairs = torch.complex(k[..., :half].double(), k[..., half : 2 * half].double()) * turn
    turned = torch.cat((pairs.real, pairs.imag), dim=-1) * factor
    return torch.cat((turned, k[..., 2 * half :].double()), dim=-1)


@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (80, 20)])
@pytest.mark.parametrize("with_slots", [False, True])
def test_tokens_are_turned_and_stand_where_they_belong(
    head_dim: int, rotary: int, with_slots: bool
) -> None:
    k, v = torch.randn(2, 5, 3, head_dim)
    positions = torch.tensor([2, 3, 11, 12, 30])
    inv_freq = 1e4 ** -(torch.arange(rotary // 2) / (rotary // 2))
    slots = torch.tensor([9, 0, 1, 31, 7]) if with_slots else None
    out_k, out_v = torch.full((2, 32, 3, head_dim), torch.nan)
    place(k, v, positions, inv_freq, 1.3, out_k, out_v, slots)
    rows = positions if slots is None else slots
    torch.testing.assert_close(
        out_k[rows].double(), in_float64(k, positions, inv_freq, 1.3), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(out_v[rows], v)
    others = [i for i in range(32) if i not in rows.tolist()]
    assert bool(out_k[others].isnan().all()), "rows of others were written"
    assert bool(out_v[others].isnan().all()), "rows of others were written"
