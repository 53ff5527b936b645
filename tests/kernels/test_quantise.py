"""Group quantisation: error bounds, odd sizes, outliers, and what is refused."""

import pytest
import torch
from torch import Tensor

from kvweave.kernels.quantise import dequantise, dequantise_fp8, quantise, quantise_fp8


def make_values(num_tokens: int = 130, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, 2, 64, generator=torch.Generator().manual_seed(seed))


def there_and_back(x: Tensor, bits: int, axis: int, group: int = 64) -> Tensor:
    groups = quantise(x, bits=bits, group=group, axis=axis)
    return dequantise(groups, bits=bits, group=group, axis=axis, out=torch.empty_like(x))


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("bits", [8, 4])
def test_integer_error_is_at_most_half_a_step(bits: int, axis: int, num_tokens: int) -> None:
    x = make_values(num_tokens)
    groups = quantise(x, bits=bits, group=64, axis=axis)
    error = (there_and_back(x, bits, axis) - x).abs()
    steps = groups.scale.float().repeat_interleave(64, axis).narrow(axis, 0, x.shape[axis])
    assert (error <= steps * 0.5 + 1e-6).all()
    spread = x.amax() - x.amin()
    assert steps.max() <= spread / (2**bits - 1) * 1.01 + 1e-3


@pytest.mark.parametrize("axis", [0, 2])
def test_fp8_error_is_within_its_mantissa(axis: int) -> None:
    x = make_values()
    groups = quantise_fp8(x, group=64, axis=axis)
    back = dequantise_fp8(groups, group=64, axis=axis, out=torch.empty_like(x))
    scale = groups.scale.float().repeat_interleave(64, axis).narrow(axis, 0, x.shape[axis])
    # 3 mantissa bits: half a unit in the last place is 1/16 of the value, or of the smallest normal
    assert ((back - x).abs() <= x.abs() / 16 + scale * 2**-6 / 16 + 1e-7).all()


def test_fp8_bits_decode_like_torch_float8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    codes = codes[..., [i for i in range(256) if i & 0x7F != 0x7F]]  # without the two NaNs
    one = torch.ones(1, 1, 1, dtype=torch.float16)
    groups = quantise_fp8(torch.zeros_like(codes, dtype=torch.float32), group=256, axis=2)
    groups = groups._replace(q=codes, scale=one)
    got = dequantise_fp8(groups, group=256, axis=2, out=torch.empty(codes.shape))
    assert torch.equal(got, codes.view(torch.float8_e4m3fn).float())


def test_one_large_key_channel_does_not_harm_the_others() -> None:
    x = make_values()
    x[:, :, 3] += 300.0
    error = (there_and_back(x, bits=8, axis=0) - x).abs()
    assert error[..., 4:].max() < 0.02


def test_constant_and_zero_groups_survive() -> None:
    for value in (0.0, 1.5, -7.0, 300.25):
        x = torch.full((70, 2, 64), value)
        torch.testing.assert_close(there_and_back(x, bits=4, axis=0), x, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(there_and_back(x, bits=8, axis=2), x, rtol=1e-3, atol=1e-3)


def test_other_dtypes_are_rounded_once() -> None:
    x = make_values()
    groups = quantise(x, bits=8, group=64, axis=0)
    exact = dequantise(groups, bits=8, group=64, axis=0, out=torch.empty_like(x))
    half = dequantise(
        groups, bits=8, group=64, axis=0, out=torch.empty_like(x, dtype=torch.bfloat16)
    )
    assert torch.equal(half, exact.bfloat16())


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e6])
def test_values_that_do_not_fit_are_refused(bad: float) -> None:
    x = make_values()
    x[0, 0, 0] = bad
    with pytest.raises(ValueError, match="use raw"):
        quantise(x, bits=8, group=64, axis=0)
    with pytest.raises(ValueError, match="use raw"):
        quantise_fp8(x, group=64, axis=2)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_the_gpu_gives_the_codes_of_the_cpu(bits: int) -> None:
    x = make_values()
    here = quantise(x, bits=bits, group=64, axis=0)
    there = quantise(x.cuda(), bits=bits, group=64, axis=0)
    assert torch.equal(here.q, there.q.cpu())
    assert torch.equal(here.scale, there.scale.cpu())
