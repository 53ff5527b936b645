"""Whole layers in C against the decoder's own steps, one by one: any family, any road."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.kernels.linear import Linear
from kvweave.kernels.native.layers import (
    CompiledLayers,
    LayerSizes,
    PlacedRows,
    SequenceSlots,
)
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rounded import round_weight, split_dims
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import EarlyExit, Rows
from kvweave.model.sequence_kv import SequenceKV
from kvweave.model.weights import LayerWeights
from worlds.tiny_models import make_model_folder

ByTorch = Callable[[Callable[[], Tensor]], Tensor]
FAMILIES = ("llama", "llama-biases", "llama-mha", "qwen2-yarn", "qwen3", "qwen3_moe-mixed")
IDS = random.Random(7).choices(range(97), k=400)


@pytest.fixture(scope="module", params=FAMILIES)
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    return load_decoder(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def rounded(exact: Decoder, library: CompiledLibrary) -> Decoder:
    """Every product of the layers in 8 bits."""
    layers = [in_8_bits(layer, library) for layer in exact.weights.layers]
    return Decoder(exact.spec, replace(exact.weights, layers=layers))


def in_8_bits(layer: LayerWeights, library: CompiledLibrary) -> LayerWeights:
    made = {}
    for name in ("qkv", "out", "gate_up", "down"):
        linear = getattr(layer, name)
        if linear is not None:
            parts = split_dims(torch.rand(linear.weight.shape[1]) + 0.1, 5)
            weight = round_weight(linear.weight, linear.bias, parts)
            made[name] = NativeProduct(weight, library)
    return replace(layer, **made)


def assert_near(found: Tensor, right: Tensor, most: float = 0.8) -> None:
    """Alike, but for a row here and there with a value on the edge between two integers, and rows
    that look at it."""
    apart = (found - right).abs().flatten(1).amax(1)
    assert apart.isfinite().all()
    assert (apart < 1e-3).float().mean() >= most, apart
    assert apart.max() < 0.05 * right.abs().max(), apart


def compiled_layers(decoder: Decoder, library: CompiledLibrary) -> CompiledLayers:
    spec = decoder.spec
    half = decoder.angles(torch.arange(1)).cos.shape[-1]
    sizes = LayerSizes(
        spec.hidden_dim, spec.inner_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim, half,
        spec.norm_eps,
    )  # fmt: skip
    return CompiledLayers(library, sizes, decoder.weights.layers)


def plain_layer(decoder: Decoder) -> int:
    """One that has an MLP of its own."""
    return next(i for i, each in enumerate(decoder.weights.layers) if each.experts is None)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 40])
def test_the_two_ends_of_a_layer_are_the_definitions(
    rounded: Decoder, library: CompiledLibrary, by_torch: ByTorch, num_rows: int
) -> None:
    layers, spec, layer = compiled_layers(rounded, library), rounded.spec, plain_layer(rounded)
    h = torch.randn(num_rows, spec.hidden_dim)
    wide = torch.full((num_rows, 300), torch.nan)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layers.begin(layer, h, wide[:, :width])
    right = by_torch(lambda: torch.cat(rounded.qkv(layer, h), dim=1).flatten(1))
    assert_near(wide[:, :width], right)
    assert wide[:, width:].isnan().all()
    attended = torch.randn(num_rows, spec.num_heads * spec.head_dim + 3)[:, 3:]
    right = by_torch(lambda: rounded.finish(layer, h.clone(), attended))
    layers.end(layer, h, attended)
    assert_near(h, right)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 61])
def test_weights_may_be_float32(
    exact: Decoder, library: CompiledLibrary, by_torch: ByTorch, num_rows: int
) -> None:
    layers, layer = compiled_layers(exact, library), plain_layer(exact)
    assert layers.fits(layer)
    h = torch.randn(num_rows, exact.spec.hidden_dim)
    found = h.new_empty(num_rows, sum(x.shape[1] * x.shape[2] for x in exact.qkv(layer, h)))
    layers.begin(layer, h, found)
    right = by_torch(lambda: torch.cat(exact.qkv(layer, h), dim=1).flatten(1))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    attended = torch.randn(num_rows, exact.spec.num_heads * exact.spec.head_dim)
    right = by_torch(lambda: exact.finish(layer, h.clone(), attended))
    layers.end(layer, h, attended)
    torch.testing.assert_close(h, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_8_bits_too", [False, True], ids=["float32", "8 bits"])
def test_rows_that_go_through_a_wide_layer_in_stretches_are_as_those_of_one_stretch(
    library: CompiledLibrary, tmp_path: Path, in_8_bits_too: bool
) -> None:
    folder = make_model_folder(tmp_path, "llama", intermediate_size=6000)  # 192 rows of a stretch
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    if in_8_bits_too:
        made = [in_8_bits(layer, library) for layer in decoder.weights.layers]
        decoder = Decoder(decoder.spec, replace(decoder.weights, layers=made))
    layers, spec = compiled_layers(decoder, library), decoder.spec
    h = torch.randn(387, spec.hidden_dim)  # two stretches, and a few rows
    attended = torch.randn(387, spec.num_heads * spec.head_dim)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    whole, fused = h.clone(), torch.empty(387, width)
    layers.begin(0, h, fused)
    layers.end(0, whole, attended)
    for rows in (slice(0, 150), slice(150, 300), slice(300, 387)):
        part, found = h[rows].clone(), torch.empty(len(h[rows]), width)
        layers.begin(0, h[rows], found)
        layers.end(0, part, attended[rows])
        assert torch.equal(found, fused[rows])
        assert torch.equal(part, whole[rows])


def roads(decoder: Decoder, exits: bool = False) -> Tensor:
    """Logits of a prefill, of slices behind it, of scattered rows and of single ones."""
    kv = decoder.new_kv(8)
    found = [decoder.forward([Rows(IDS[:150], range(150), kv, range(140, 150))])]
    found.append(decoder.forward([Rows(IDS[150:153], range(150, 153), kv, [0, 2])]))
    found.append(decoder.forward([Rows(IDS[153:190], range(153, 190), kv, range(37))]))
    picked = [3, 17, 80, 189]
    early = EarlyExit(1, [1, 3]) if exits else None
    rows = Rows([IDS[i] for i in picked], picked, kv, [3], early_exit=early)
    found.append(decoder.forward([rows]))
    found += [decoder.forward([Rows([IDS[i]], [i], kv, [0])]) for i in range(190, 194)]
    return torch.cat(found)


def test_every_road_through_rounded_layers_is_the_definitions(
    rounded: Decoder, by_torch: ByTorch
) -> None:
    assert_near(roads(rounded), by_torch(lambda: roads(rounded)), 0.3)
    assert_near(roads(rounded, exits=True), by_torch(lambda: roads(rounded, exits=True)), 0.3)


def test_every_road_through_exact_layers_is_the_definitions(
    exact: Decoder, library: CompiledLibrary, by_torch: ByTorch
) -> None:
    right = by_torch(lambda: roads(exact))
    torch.testing.assert_close(roads(exact), right, rtol=1e-4, atol=1e-3)


def make_pool(decoder: Decoder) -> KVPool:
    pool = KVPool(decoder.spec, 60, 16, torch.float32, torch.device("cpu"))
    for part in (pool.keys, pool.values):
        part.fill_(torch.nan)  # what nobody wrote is never looked at
    return pool


def in_pages(decoder: Decoder, tables: list[list[int]]) -> Tensor:
    """Logits of two sequences in one pool: prefilled, in slices, and decoded side by side."""
    pool = make_pool(decoder)
    kvs = [PagedKV(pool, table) for table in tables]
    batch = [
        Rows(IDS[:70], range(70), kvs[0], range(70)),
        Rows(IDS[9:49], range(40), kvs[1], range(40)),
    ]
    found = [decoder.forward(batch)]
    batch = [
        Rows([IDS[70]], [70], kvs[0], [0]),
        Rows(IDS[49:99], range(40, 90), kvs[1], range(50)),
    ]
    found.append(decoder.forward(batch))
    for i in range(3):
        batch = [
            Rows([IDS[71 + i]], [71 + i], kvs[0], [0]),
            Rows([IDS[99 + i]], [90 + i], kvs[1], [0]),
        ]
        found.append(decoder.forward(batch))
    return torch.cat(found)


SCATTERED = [[40, 3, 4, 50, 11], [7, 8, 30, 31, 2, 59]]


def test_pages_anywhere_are_the_definitions(
    exact: Decoder, rounded: Decoder, by_torch: ByTorch
) -> None:
    for decoder in (exact, rounded):
        found = in_pages(decoder, SCATTERED)
        assert_near(found, by_torch(lambda: in_pages(decoder, SCATTERED)), 0.3)  # noqa: B023


def test_where_pages_lie_changes_no_bit(rounded: Decoder) -> None:
    if any(layer.experts is not None for layer in rounded.weights.layers):
        pytest.skip("layers with experts are the decoder's")
    together = in_pages(rounded, [[0, 1, 2, 3, 4], [20, 21, 22, 23, 24, 25]])
    assert torch.equal(in_pages(rounded, SCATTERED), together)


def test_it_is_the_same_to_the_last_bit_with_any_threads(rounded: Decoder) -> None:
    if any(layer.experts is not None for layer in rounded.weights.layers):
        pytest.skip("experts are torch's products")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(roads(rounded))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_does_not_fit_is_refused_before_memory_is_touched(
    rounded: Decoder, library: CompiledLibrary
) -> None:
    layers, layer = compiled_layers(rounded, library), plain_layer(rounded)
    spec, h = rounded.spec, torch.zeros(2, rounded.spec.hidden_dim)
    with pytest.raises(ValueError, match=r"\[R, 32\]"):
        layers.begin(layer, torch.zeros(2, 31), torch.zeros(2, 500))
    with pytest.raises(ValueError, match=r"\[R, 32\]"):
        layers.end(layer, h, torch.zeros(2, 7))
    wide = torch.zeros(spec.num_heads * spec.head_dim, 2)
    with pytest.raises(ValueError, match="side by side"):
        layers.end(layer, h, wide.t())
    kv = SequenceKV(spec, 8, torch.float32, torch.device("cpu"))
    at = torch.tensor([6, 7])
    held = SequenceSlots(2, *kv.memory, None)
    with pytest.raises(ValueError, match="slot 8"):
        PlacedRows(at, at + 1, [held])
    with pytest.raises(ValueError, match="looks beyond 8"):
        PlacedRows(at + 1, at, [held])
    with pytest.raises(ValueError, match="not in 8 slots"):
        PlacedRows(at, at, [held._replace(pieces=[(4, 8)])])
    with pytest.raises(ValueError, match="2 positions"):
        PlacedRows(at, at[:1], [held])
    angles, placed = rounded.angles(torch.arange(3)), PlacedRows(at, at, [held])
    with pytest.raises(ValueError, match="angles"):
        layers.run(range(layer, layer + 1), h, angles, placed)


def test_other_weights_are_left_to_the_decoder(exact: Decoder, library: CompiledLibrary) -> None:
    layer = plain_layer(exact)
    wide = replace(exact.weights.layers[layer], out=Linear(torch.zeros(4, 4).double()))
    sizes = compiled_layers(exact, library)._sizes
    assert not CompiledLayers(library, sizes, [wide]).fits(0)
    turned = Linear(exact.weights.layers[layer].out.weight.t().contiguous().t())
    wide = replace(exact.weights.layers[layer], out=turned)
    assert not CompiledLayers(library, sizes, [wide]).fits(0)
