"""Products with weights in 8 bits, by their definition and compiled, against float32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvweave.kernels.linear import Linear
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rounded import RoundedWeight, even_dims, round_weight, split_dims

IN, OUT = 192, 64
Product = Callable[[Tensor], Tensor]
WAYS = ("definition", "compiled")


def make_weight() -> Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))


def make_rows(num_rows: int) -> Tensor:
    """Rows of very different size, with two dims far larger than the others."""
    x = torch.randn(num_rows, IN, generator=torch.Generator().manual_seed(1))
    x[:, 7] *= 20.0
    x[:, 50] *= 9.0
    return x * torch.logspace(-2, 2, num_rows)[:, None]


def make_product(name: str, bias: Tensor | None = None, *, split: bool = True) -> Product:
    parts = split_dims(make_rows(8).abs().amax(0), 64) if split else None
    return make_way(name, round_weight(make_weight(), bias, parts))


def make_way(name: str, weight: RoundedWeight) -> Product:
    if name == "definition":
        return weight.multiply
    library, words = native_kernels()
    if library is None:
        pytest.skip(words)
    return NativeProduct(weight, library)


@pytest.mark.parametrize("num_rows", [1, 3, 300])
@pytest.mark.parametrize("name", WAYS)
def test_a_way_stays_within_its_rounding_steps(name: str, num_rows: int) -> None:
    bias = torch.randn(OUT, generator=torch.Generator().manual_seed(2))
    product, x = make_product(name, bias), make_rows(num_rows)
    weight = make_weight()
    exact = Linear(weight, bias)(x)
    # Half a step of each weight times its input, half a step of each input times its weight. A
    # row's step is 1/127 of its largest share: at most of its largest value.
    weight_step = weight.abs().amax(1)[:, None] / 254
    row_step = x.abs().amax(1)[:, None] / 254
    worst = x.abs().sum(1)[:, None] * weight_step.T + row_step * weight.abs().sum(1)[None]
    worst += row_step * weight_step.T * IN
    assert ((product(x) - exact).abs() <= worst + 1e-4).all()


@pytest.mark.parametrize("name", WAYS)
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    product, x = make_product(name), make_rows(12)
    together = product(x)
    other = x.flip(0).clone()
    other[11] = x[0]  # the same row behind others
    torch.testing.assert_close(product(other)[11], together[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(x[:5]), together[:5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(x[3:4]), together[3:4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_a_row_of_zeros_stays_zero(name: str) -> None:
    assert torch.equal(make_product(name)(torch.zeros(2, IN)), torch.zeros(2, OUT))


@pytest.mark.parametrize("name", WAYS)
def test_splitting_large_dims_makes_the_others_finer(name: str) -> None:
    x, exact = make_rows(40), Linear(make_weight())(make_rows(40))
    plain, split = (make_product(name, split=s)(x) for s in (False, True))
    assert (split - exact).square().mean() < 0.25 * (plain - exact).square().mean()


@pytest.mark.parametrize("name", WAYS)
def test_a_split_value_is_rounded_as_one(name: str) -> None:
    """Equal weights and a row whose values are whole steps: nothing may be lost."""
    weight = torch.ones(OUT, IN)
    parts = torch.ones(IN, dtype=torch.int64)
    parts[3] = 5
    product = make_way(name, round_weight(weight, None, parts))
    x = torch.zeros(2, IN)
    x[:, 0], x[:, 3], x[:, 9] = 127.0, 333.0, -55.0  # the scale of the row is 1
    found = product(x)
    torch.testing.assert_close(found, torch.full((2, OUT), 127.0 + 333.0 - 55.0))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("split", [False, True])
def test_dims_that_are_evened_out_make_the_others_finer(name: str, split: bool) -> None:
    x, weight = make_rows(40), make_weight()
    largest = x.abs().amax(0)
    powers = even_dims(largest, weight.abs().amax(0), 0.5)
    parts = split_dims(largest / torch.exp2(powers.float()), 64) if split else None
    exact, plain = Linear(weight)(x), make_product(name, split=split)(x)
    evened = make_way(name, round_weight(weight, None, parts, powers))(x)
    better = (evened - exact).square().mean() / (plain - exact).square().mean()
    assert better < (1.1 if split else 0.5)


def test_nothing_is_evened_out_where_nobody_asks() -> None:
    weight, largest = make_weight(), make_rows(8).abs().amax(0)
    powers = even_dims(largest, weight.abs().amax(0), 0.5)
    assert powers[7] > powers.median() == 0, "a dim with large values"
    flat = round_weight(weight, None, None, torch.zeros(IN, dtype=torch.int64))
    assert flat.share is None
    assert torch.equal(flat.codes, round_weight(weight, None).codes)


def test_as_many_columns_as_allowed_and_the_largest_dims_get_them() -> None:
    largest = torch.tensor([1.0, 8.0, 1.0, 4.0, 0.0])
    parts = split_dims(largest, 4)
    assert int(parts.sum()) == len(largest) + 4
    assert parts.argmax() == 1
    assert parts.min() == 1
    assert float((largest / parts).max()) <= 2.7
    assert split_dims(torch.ones(3), 0).tolist() == [1, 1, 1]
    assert int(split_dims(torch.zeros(3), 4).sum()) == 7
