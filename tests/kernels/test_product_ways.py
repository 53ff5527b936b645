"""Times of products are kept for this machine, and a product takes the fastest of them."""

from pathlib import Path

import torch

from kvweave.kernels.linear import Linear
from kvweave.kernels.product_probe import ROWS, Shape, Times
from kvweave.kernels.product_ways import ProductWays, machine_words
from kvweave.kernels.products import FLOAT32

INT_MM = "int8 rows, int_mm"
SHAPE = Shape(128, 64)


def make_times(**by_way: float) -> Times:
    names = {"float32": FLOAT32, "int_mm": INT_MM}
    return {names[way]: dict.fromkeys(ROWS, seconds) for way, seconds in by_way.items()}


class Measured:
    """Stands in the place of the clock: says what it is told, and how often it was asked."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.asked: list[Shape] = []

    def __call__(self, shape: Shape) -> Times:
        self.asked.append(shape)
        return self.times


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    first, second = (Measured(make_times(float32=1.0, int_mm=0.5)) for _ in range(2))
    path = tmp_path / "profiles" / "products.json"
    ProductWays(path, machine="a", measure=first).times(SHAPE)
    again = ProductWays(path, machine="a", measure=second)
    assert again.times(SHAPE) == first.times
    assert (first.asked, second.asked) == ([SHAPE], [])


def test_times_of_another_machine_or_a_broken_file_are_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    times = make_times(float32=1.0)
    ProductWays(path, machine="a", measure=Measured(times)).times(SHAPE)
    other = Measured(times)
    ProductWays(path, machine="another torch", measure=other).times(SHAPE)
    assert other.asked == [SHAPE]
    for broken in ('{"format": 1', "[]", '{"format": 1, "machine": "a", "shapes": {"8x8": {}}}'):
        path.write_text(broken)
        renewed = Measured(times)
        ProductWays(path, machine="a", measure=renewed).times(SHAPE)
        assert renewed.asked == [SHAPE], broken


def test_times_that_a_busy_machine_explains_are_taken_again_and_not_kept(tmp_path: Path) -> None:
    """Integers that win with many rows and lose with one, at a quarter of the bytes."""
    large = Shape(512, 512)
    crowded = make_times(float32=1.0, int_mm=0.5)
    crowded[INT_MM][1] = 4.0
    path = tmp_path / "products.json"
    first = Measured(crowded)
    ways = ProductWays(path, machine="a", measure=first)
    _, names = ways.product(Linear(torch.randn(512, 512)), None)
    assert set(names) == {INT_MM}, "what one row lost by says nothing"
    assert first.asked == [large, large]
    second = Measured(make_times(float32=1.0, int_mm=0.5))
    for _ in range(2):
        ProductWays(path, machine="a", measure=second).times(large)
    assert second.asked == [large], "measured at the next start, and kept"


def test_a_small_product_may_lose_with_one_row(tmp_path: Path) -> None:
    """There it is the call that takes the time, and float32 is the right answer."""
    times = make_times(float32=1.0, int_mm=0.5)
    times[INT_MM][1] = 4.0
    measured = Measured(times)
    small = Linear(torch.randn(64, 128))
    kept, _ = ProductWays(tmp_path / "p.json", machine="a", measure=measured).product(small, None)
    assert kept is small
    assert measured.asked == [SHAPE]


def test_a_machine_is_its_cpu_torch_and_threads() -> None:
    words = machine_words()
    assert torch.__version__ in words
    assert f"{torch.get_num_threads()} threads" in words


def test_a_large_matrix_is_measured_by_a_part_of_it(tmp_path: Path) -> None:
    measured = Measured(make_times(float32=1.0))
    ways = ProductWays(tmp_path / "products.json", measure=measured)
    ways.times(Shape(128, 151_936))
    ways.times(Shape(128, 49_152))
    assert measured.asked == [Shape(128, 4096)]


def test_a_product_that_float32_does_fastest_stays_as_it_is(tmp_path: Path) -> None:
    linear = Linear(torch.randn(64, 128))
    slow = Measured(make_times(float32=1.0, int_mm=2.0))
    product, names = ProductWays(tmp_path / "p.json", measure=slow).product(linear, None)
    assert product is linear
    assert set(names) == {FLOAT32}


def test_a_product_that_integers_do_faster_is_rounded(tmp_path: Path) -> None:
    times = Measured(make_times(float32=1.0, int_mm=0.5))
    product, names = ProductWays(tmp_path / "p.json", measure=times).product(
        Linear(torch.randn(64, 128)), None
    )
    assert set(names) == {INT_MM}
    assert product(torch.randn(3, 128)).shape == (3, 64)
