"""Products in C against their definition: every tile, every rest, any number of threads."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rounded import RoundedWeight, round_weight, split_dims


@pytest.fixture(scope="module")
def library() -> CompiledLibrary:
    library, words = native_kernels()
    if library is None:
        pytest.skip(words)
    return library


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_weight(
    in_dim: int, out_dim: int, *, bias: bool = False, split: bool = True
) -> RoundedWeight:
    generator = torch.Generator().manual_seed(in_dim * 1000 + out_dim)
    weight = torch.randn(out_dim, in_dim, generator=generator)
    offsets = torch.randn(out_dim, generator=generator) if bias else None
    parts = split_dims(torch.rand(in_dim, generator=generator) + 0.1, 13) if split else None
    return round_weight(weight, offsets, parts)


def make_rows(num_rows: int, in_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    size = torch.logspace(-3, 3, num_rows)[:, None]
    return torch.randn(num_rows, in_dim, generator=generator) * size


def assert_same(found: Tensor, x: Tensor, weight: RoundedWeight) -> None:
    """Equal to the definition, but for a value here and there that lies on the edge between two
    integers: torch may multiply and add in one step or in two."""
    right = weight.multiply(x)
    largest = x.abs().amax(1, keepdim=True)
    step = largest / 127 * weight.scale * 127  # one integer more, times the largest weight
    apart = (found - right).abs()
    assert (apart <= 1.01 * step + 1e-5 * right.abs()).all()
    if len(x) > 3:
        exact = apart <= 1e-5 * (right.abs() + largest * weight.scale)
        assert exact.all(1).float().mean() > 0.9


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 31, 100, 200])
@pytest.mark.parametrize(("in_dim", "out_dim"), [(64, 32), (576, 96), (190, 77), (5, 3), (33, 1)])
def test_it_is_the_definition_for_every_size(
    library: CompiledLibrary, num_rows: int, in_dim: int, out_dim: int
) -> None:
    for bias, split in ((False, False), (True, False), (False, True), (True, True)):
        weight = make_weight(in_dim, out_dim, bias=bias, split=split)
        x = make_rows(num_rows, in_dim)
        assert_same(NativeProduct(weight, library)(x), x, weight)


def test_it_is_the_same_to_the_last_bit_with_any_threads_and_beside_any_rows(
    library: CompiledLibrary, threads: int
) -> None:
    weight = make_weight(300, 260, bias=True)
    product, x = NativeProduct(weight, library), make_rows(1700, 300)  # more than one chunk of rows
    whole = product(x)
    assert_same(whole[:64], x[:64], weight)
    for start, end in ((0, 1), (5, 7), (1500, 1700), (1690, 1693), (11, 250)):
        assert torch.equal(product(x[start:end]), whole[start:end])


def test_rows_and_results_may_be_parts_of_wider_tensors(library: CompiledLibrary) -> None:
    weight = make_weight(48, 40, bias=True)
    product = NativeProduct(weight, library)
    wide = make_rows(9, 96)
    plain = product(wide[:, :48].clone())
    assert torch.equal(product(wide[:, :48]), plain)
    assert torch.equal(product(wide[:, :48].t().contiguous().t()), plain)
    room = torch.full((9, 100), torch.nan)
    product(wide[:, :48], out=room[:, 30:70])
    assert torch.equal(room[:, 30:70], plain)
    assert room[:, :30].isnan().all()
    assert room[:, 70:].isnan().all()
    total = torch.ones(9, 40)
    product.add_to(total, wide[:, :48])
    torch.testing.assert_close(total, plain + 1)


def test_no_rows_are_no_rows(library: CompiledLibrary) -> None:
    assert NativeProduct(make_weight(48, 40), library)(torch.empty(0, 48)).shape == (0, 40)


def test_zeros_stay_zeros_and_the_largest_integers_do_not_overflow(
    library: CompiledLibrary,
) -> None:
    weight = round_weight(torch.full((40, 8000), -1.0), None)
    product = NativeProduct(weight, library)
    assert torch.equal(product(torch.zeros(3, 8000)), torch.zeros(3, 40))
    for value in (3.0, -3.0):
        found = product(torch.full((13, 8000), value))
        torch.testing.assert_close(found, torch.full((13, 40), -8000 * value))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_own_row_alone(library: CompiledLibrary, bad: float) -> None:
    weight = make_weight(64, 40)
    product, x = NativeProduct(weight, library), make_rows(14, 64)
    right = product(x)
    x[6, 17] = bad
    found = product(x)
    by_torch = weight.multiply(x)
    assert not found[6].isfinite().any()
    assert not by_torch[6].isfinite().any()
    others = [i for i in range(14) if i != 6]
    assert torch.equal(found[others], right[others])


def test_what_does_not_fit_is_refused_before_memory_is_touched(library: CompiledLibrary) -> None:
    product = NativeProduct(make_weight(48, 40), library)
    with pytest.raises(ValueError, match=r"\[R, 48\]"):
        product(torch.zeros(2, 47))
    with pytest.raises(ValueError, match=r"\[R, 40\]"):
        product(torch.zeros(2, 48), out=torch.zeros(3, 40))
    with pytest.raises(ValueError, match="float32"):
        product(torch.zeros(2, 48, dtype=torch.float64))
    with pytest.raises(ValueError, match="side by side"):
        product(torch.zeros(2, 48), out=torch.zeros(40, 2).t())
    with pytest.raises(ValueError, match="overflow"):
        NativeProduct(round_weight(torch.ones(2, 70_000), None), library)


def test_several_threads_may_call_at_once(library: CompiledLibrary) -> None:
    product = NativeProduct(make_weight(200, 300, bias=True), library)
    rows = [make_rows(n, 200) for n in (1, 3, 40, 150)]
    right = [product(x) for x in rows]
    wrong: list[int] = []

    def work(nth: int) -> None:
        wrong.extend(nth for _ in range(30) if not torch.equal(product(rows[nth]), right[nth]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
