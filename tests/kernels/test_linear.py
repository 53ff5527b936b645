"""Exact products: results land where they were asked for."""

import pytest
import torch

from kvweave.kernels.linear import Linear


@pytest.mark.parametrize("bias", [True, False])
def test_products_can_be_added_in_place_or_written_into_given_memory(bias: bool) -> None:
    torch.manual_seed(0)
    linear = Linear(torch.randn(48, 32), torch.randn(48) if bias else None)
    x, h = torch.randn(5, 32), torch.randn(5, 48)
    plain = linear(x)
    out = torch.full((5, 48), torch.nan)
    assert linear(x, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, plain)
    total = h.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total, h + plain)
