"""Chunk KV on its way into a prompt: laid once, turned to its place, or lost by name."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from kvweave.fuse.sources import ChunkLost, StoredChunks
from kvweave.fuse.stitched import stitch
from kvweave.kernels import dispatch
from kvweave.kernels.native.loading import native_kernels
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.objects import pack_chunk
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.fuse import CHUNKS, Packed, World, assert_same, key_of
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), "llama")
    return load_decoder(folder, device="cpu", dtype="float32")


def packed(world: World) -> Packed:
    placed = {span.key: made for span, made in zip(world.request.placed, world.made, strict=True)}
    return Packed({key: pack_chunk(key, made) for key, made in placed.items()})


def compile_kernels() -> None:
    library, words = native_kernels()
    if library is None:
        pytest.skip(words)


@pytest.mark.parametrize("missing", [(), {2}])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_stored_chunks_are_laid_as_computed_ones(
    decoder: Decoder,
    missing: Collection[int],
    is_compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_compiled:
        compile_kernels()
    else:
        monkeypatch.setattr(dispatch, "loaded_library", lambda: None)
    chunks = [CHUNKS[0], CHUNKS[2], CHUNKS[3], CHUNKS[2]]
    world = World(decoder, chunks=chunks, missing=missing)
    stored = replace(world)
    stored.source = StoredChunks(decoder, world.request.placed, packed(world))  # type: ignore[assignment]
    for name in ("reuse", "epic", "prophetkv", "cacheblend", "weave", "weave-deep"):
        # turned and then moved is moved and then turned, to rounding
        tolerance = 2e-5 if name.startswith("weave") else 1e-6
        assert_same(stored.fuse(name, 0.3)[1], world.fuse(name, 0.3)[1], tolerance=tolerance)


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "bf16"])
def test_every_codec_is_laid_alike_with_and_without_compiled_kernels(
    decoder: Decoder, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernels()
    world = World(decoder, missing={2})
    placed = {span.key: made for span, made in zip(world.request.placed, world.made, strict=True)}
    stored = Packed({key: pack_chunk(key, made, codec) for key, made in placed.items()})
    world.source = StoredChunks(decoder, world.request.placed, stored)  # type: ignore[assignment]
    found = world.fuse("weave-deep", 0.3)[1]
    monkeypatch.setattr(dispatch, "loaded_library", lambda: None)
    assert_same(found, world.fuse("weave-deep", 0.3)[1], tolerance=2e-5)


def test_stored_bytes_are_never_written(decoder: Decoder) -> None:
    world = World(decoder)
    arrived = packed(world)
    before = {key: bytes(chunk.memory.view) for key, chunk in arrived.chunks.items()}
    world.source = StoredChunks(decoder, world.request.placed, arrived)  # type: ignore[assignment]
    for name in (
        "reuse",
        "epic",
        "fusionrag-code",
        "prophetkv",
        "cacheblend",
        "kvshare-like",
        "weave",
    ):
        for ratio in (0.0, 0.3, 1.0):
            world.fuse(name, ratio)
    assert {key: bytes(chunk.memory.view) for key, chunk in arrived.chunks.items()} == before


@pytest.mark.parametrize("wrong", ["absent", "fewer tokens", "more heads", "smaller heads"])
def test_a_chunk_that_does_not_come_or_does_not_fit_is_lost_by_name(
    decoder: Decoder, wrong: str
) -> None:
    world = World(decoder)
    victim, arrived = world.request.spans[2].key, packed(world)
    cut = {
        "fewer tokens": lambda x: x[1:],
        "more heads": lambda x: torch.cat([x, x], dim=1),
        "smaller heads": lambda x: x[..., ::2],
    }.get(wrong)
    if cut is None:
        del arrived.chunks[victim]
    else:
        layers = [LayerKV(cut(kv.k).contiguous(), cut(kv.v).contiguous()) for kv in world.made[2]]
        arrived.chunks[victim] = pack_chunk(victim, layers)
    source = StoredChunks(decoder, world.request.placed, arrived)
    with pytest.raises(ChunkLost) as lost:
        source.layer(1)
    assert lost.value.keys == (victim,)


def test_a_layer_is_laid_once_and_in_any_order(decoder: Decoder) -> None:
    asked: Counter[int] = Counter()

    class Counting:
        placer = None

        def __init__(self, world: World) -> None:
            self._source = world.source

        def layer(self, layer: int) -> LayerKV:
            asked[layer] += 1
            return self._source.layer(layer)

        def extras(self, name: str) -> dict[object, object]:
            return {}

    world = World(decoder)
    kv = decoder.new_kv(1)
    stitched = stitch(decoder, world.request, world.prefix, Counting(world), kv)  # type: ignore[arg-type]
    for layer in (2, 0, 1, 2, 0):
        stitched.layers.lay(layer)
    assert asked == {0: 1, 1: 1, 2: 1}
    kv.keys(1)[20] = 7.0  # what the pass has written stays
    stitched.layers.lay(1)
    assert bool((stitched.keys(1)[20] == 7.0).all())


@pytest.mark.parametrize("missing", [set(), {1}, {0, 2}, {0, 1, 2, 3}])
def test_stitched_kv_equals_kv_laid_by_hand(decoder: Decoder, missing: set[int]) -> None:
    world = World(decoder, missing=missing)
    stitched, want = world.stitched(), world.laid_by_hand()
    placed = [p for span in world.request.placed for p in range(span.start, span.end)]
    assert stitched.placed.tolist() == placed
    at = [*range(len(world.preamble)), *placed]
    for layer in range(decoder.spec.num_layers):
        torch.testing.assert_close(stitched.keys(layer)[at], want.keys(layer)[at])
        torch.testing.assert_close(stitched.values(layer)[at], want.values(layer)[at])


def test_a_preamble_of_another_length_is_our_own_bug(decoder: Decoder) -> None:
    world, other = World(decoder), World(decoder, preamble=[1, 2])
    with pytest.raises(AssertionError, match="preamble"):
        stitch(decoder, world.request, other.prefix, world.source, decoder.new_kv(1))


def test_chunks_are_named_by_their_tokens() -> None:
    assert key_of([1, 2]) == key_of((1, 2)) != key_of([1, 3])
