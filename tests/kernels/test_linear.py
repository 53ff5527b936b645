"""Integer products stay near the exact ones, and results land where they were asked for."""

import pytest
import torch

from kvweave.kernels.linear import Int8Linear, Linear, Projection, to_int8


def make_linear(bias: bool = True) -> Linear:
    torch.manual_seed(0)
    return Linear(torch.randn(48, 32) * torch.rand(48, 1), torch.randn(48) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_within_the_rounding_of_its_inputs(bias: bool) -> None:
    linear = make_linear(bias)
    x = torch.randn(20, 32) * torch.logspace(-3, 3, 20)[:, None]  # rows of very different size
    exact = linear(x)
    error = (to_int8(linear)(x) - exact).abs().amax(dim=1) / exact.abs().amax(dim=1)
    assert error.max() < 0.03


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("quantise", [True, False])
def test_products_can_be_added_in_place_or_written_into_given_memory(
    bias: bool, quantise: bool
) -> None:
    linear: Projection = to_int8(make_linear(bias)) if quantise else make_linear(bias)
    x, h = torch.randn(5, 32), torch.randn(5, 48)
    plain = linear(x)
    out = torch.full((5, 48), torch.nan)
    assert linear(x, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, plain)
    total = h.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total, h + plain)


def test_a_row_of_zeros_stays_zero_in_int8() -> None:
    linear = to_int8(make_linear(bias=False))
    assert isinstance(linear, Int8Linear)
    assert torch.equal(linear(torch.zeros(2, 32)), torch.zeros(2, 48))
