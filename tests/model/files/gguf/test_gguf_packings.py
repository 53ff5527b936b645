"""Our unpacking equals the reference implementation bit for bit."""

import gguf
import numpy as np
import pytest

from kvweave.model.files.gguf.packings import PACKINGS, REFUSED, dequantise

IDS = {packing.name: number for number, packing in PACKINGS.items()}


def reference(packed: np.ndarray, name: str) -> np.ndarray:
    return gguf.dequantize(packed, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", IDS)
def test_sizes_and_numbers_are_those_of_the_format(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    packing = PACKINGS[IDS[name]]
    assert kind.value == IDS[name]
    assert (packing.values, packing.record_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", IDS)
@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NaN and inf scales
def test_random_bytes_unpack_bit_for_bit(name: str) -> None:
    packing = PACKINGS[IDS[name]]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (7, 3 * packing.record_bytes * 8), dtype=np.uint8)
    ours, theirs = dequantise(packed, packing), reference(packed, name)
    assert ours.dtype == np.float32
    assert ours.shape == (7, 3 * packing.values * 8)
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_numbers_come_back_bit_for_bit(name: str) -> None:
    weights = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType[name]).view(np.uint8)
    ours = dequantise(packed, PACKINGS[IDS[name]])
    np.testing.assert_array_equal(ours, reference(packed, name).reshape(5, 96))
    assert np.abs(ours - weights).max() < 0.35


def test_rows_cut_out_of_a_larger_array_unpack_the_same() -> None:
    packing = PACKINGS[IDS["Q6_K"]]
    packed = np.random.default_rng(2).integers(0, 100, (6, 2 * packing.record_bytes), np.uint8)
    np.testing.assert_array_equal(
        dequantise(packed[2:5], packing), dequantise(packed, packing)[2:5]
    )


def test_every_refused_type_has_the_name_the_format_gives_it() -> None:
    assert not REFUSED.keys() & PACKINGS.keys()
    assert {n: gguf.GGMLQuantizationType(n).name for n in REFUSED} == REFUSED
