"""Layers through a ring: whatever order they are asked for in, what is laid is what was stored."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from kvweave.fuse.needs import Needs
from kvweave.fuse.sources import ChunkLost
from kvweave.fuse.transfer.pipeline import LookAhead, PipelinedChunks, taking_order
from kvweave.fuse.transfer.ring import Ring, RingPool, depth_for
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer, pack_chunk
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.fuse import CHUNKS, SELECTING, Packed, World, assert_same
from worlds.tiny_models import make_model_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), "llama")
    return load_decoder(folder, device="cpu", dtype="float32")


@dataclass
class Arriving(Packed):
    """Chunks of which only the first `there` layers have arrived before any is waited for.

    Never whole: layers come one by one. Groups are tested in test_groups.py.
    """

    there: int = 99
    waited: list[int] = field(default_factory=list)

    def is_ready(self, layer: int) -> bool:
        return layer < self.there

    def wait_layer(self, layer: int) -> dict[ChunkKey, EncodedLayer]:
        self.waited.append(layer)
        return super().wait_layer(layer)

    def whole(self, keys: Iterable[ChunkKey]) -> None:
        """Not yet."""


def stored(world: World, codec: str = "raw", there: int = 99) -> Arriving:
    placed = {span.key: made for span, made in zip(world.request.placed, world.made, strict=True)}
    beside = world.extras or {}
    extras = {key: {name: of[key] for name, of in beside.items() if key in of} for key in placed}
    packed = {key: pack_chunk(key, made, codec, extras[key]) for key, made in placed.items()}
    return Arriving(packed, there)


def through_ring(world: World, layers: Packed, ring_bytes: int = 1 << 20) -> PipelinedChunks:
    return PipelinedChunks(world.decoder, world.request.placed, layers, Ring(CPU, ring_bytes))


@pytest.mark.parametrize("ring_bytes", [1, 1 << 20])
@pytest.mark.parametrize("name", ["reuse", *SELECTING])
def test_fusion_through_a_ring_equals_fusion_of_what_was_computed(
    decoder: Decoder, name: str, ring_bytes: int
) -> None:
    world = World(decoder, chunks=[CHUNKS[0], CHUNKS[2], CHUNKS[3], CHUNKS[2]], missing={2})
    want = world.fuse(name, 0.3)
    world.source = through_ring(world, stored(world), ring_bytes)  # type: ignore[assignment]
    got = world.fuse(name, 0.3)
    assert got[0].recomputed == want[0].recomputed
    assert_same(got[1], want[1], tolerance=1e-5)


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8"])
def test_codes_are_decoded_on_the_way(decoder: Decoder, codec: str) -> None:
    world = World(decoder)
    layers = stored(world, codec)
    source = through_ring(world, layers)
    got = source.layer(1)
    parts = [layers.wait_layer(1)[span.key].decode() for span in world.request.placed]
    torch.testing.assert_close(got.k, torch.cat([kv.k for kv in parts]))
    torch.testing.assert_close(got.v, torch.cat([kv.v for kv in parts]))


def test_layers_asked_for_out_of_order_are_brought_and_none_is_left_out(decoder: Decoder) -> None:
    world = World(decoder)
    layers = stored(world)
    source, computed = through_ring(world, layers, ring_bytes=1), world.source
    num_layers = decoder.spec.num_layers
    assert num_layers > 2, "more layers than slots"
    for layer in (num_layers - 1, 0, 0, *range(1, num_layers)):
        torch.testing.assert_close(source.layer(layer).k, computed.layer(layer).k)


def test_what_has_arrived_is_copied_ahead_and_what_has_not_is_not_waited_for(
    decoder: Decoder,
) -> None:
    world = World(decoder)
    layers = stored(world, there=2)
    source = through_ring(world, layers)
    assert layers.waited == [0, 1]
    source.layer(0)
    assert layers.waited == [0, 1], "layer 2 has not arrived"
    layers.there = 99
    source.layer(1)
    assert layers.waited[:3] == [0, 1, 2]


def test_nothing_comes_ahead_before_it_may(decoder: Decoder) -> None:
    world = World(decoder)
    layers = stored(world)
    ring = Ring(CPU)
    source = PipelinedChunks(decoder, world.request.placed, layers, ring, LookAhead(begins=False))
    source.layer(2)
    assert layers.waited == [2]
    source.begin()
    assert layers.waited[:3] == [2, 0, 1]


def test_a_ring_is_cut_anew_for_each_request() -> None:
    ring = Ring(CPU)
    for unit_bytes, count in ((100, 2), (10, 5), (100, 4)):
        ring.cut(unit_bytes, count)
        slots = [ring.slot(range(i, i + 1)) for i in range(count)]
        assert [len(slot.data) for slot in slots if slot] == [unit_bytes] * count
        starts = sorted(slot.data.data_ptr() for slot in slots if slot)
        assert [b - a for a, b in pairwise(starts)] == [unit_bytes] * (count - 1)
        assert ring.slot(range(1)) is None


def test_a_slot_is_units_side_by_side_that_no_other_has() -> None:
    ring = Ring(CPU)
    ring.cut(10, 6)
    taken = [ring.slot(range(n)) for n in (1, 2, 2)]
    first, second, third = (slot for slot in taken if slot is not None)
    assert [slot.units for slot in (first, second, third)] == [range(1), range(1, 3), range(3, 5)]
    ring.release(first)
    assert ring.slot(range(2)) is None, "units 0 and 5 are free, but apart"
    last = ring.slot(range(1))
    assert last is not None
    assert last.units == range(5, 6), "free for longest"
    ring.release(second)
    group = ring.slot(range(3))
    assert group is not None
    assert group.units == range(3)


def test_a_chunk_lost_on_the_way_is_named_whenever_that_happens(decoder: Decoder) -> None:
    world = World(decoder)
    layers = stored(world, there=1)
    source = through_ring(world, layers)
    source.layer(0)
    victim = world.request.spans[2].key
    del layers.chunks[victim]
    with pytest.raises(ChunkLost) as lost:
        source.layer(1)
    assert lost.value.keys == (victim,)


def test_a_few_slots_at_least_and_as_many_as_arrive_before_the_pass() -> None:
    def depth(start_s: float, ring_bytes: int = 100) -> int:  # a layer takes a second
        return depth_for(10, 10.0, start_s, num_layers=8, ring_bytes=ring_bytes)

    assert [depth(0.0), depth(2.5), depth(99.0), depth(math.inf)] == [3, 6, 8, 8]
    assert depth(99.0, ring_bytes=45) == 4
    assert depth(99.0, ring_bytes=1) == 2
    assert (
        depth_for(10, 10.0, 2.5, num_layers=32, ring_bytes=1000, group=4) == 1 + 2 + 4 + 4 + 4 + 3
    )


def test_layers_that_rows_are_chosen_by_come_first() -> None:
    chosen_by = Needs(probe="anchors", key_layers=(5, 3))
    assert taking_order(chosen_by, 7) == [3, 5, 0, 1, 2, 4, 6]
    everything = Needs(probe="full", key_layers=(4, 5, 6))
    assert taking_order(everything, 7) == list(range(7))
    assert taking_order(Needs(value_layers=(1,), full_width_layers=1), 3) == [0, 1, 2]


def test_a_ring_is_lent_to_one_request_at_a_time() -> None:
    pool = RingPool()
    first, second = pool.take(CPU), pool.take(CPU)
    assert first is not second
    pool.give_back(first)
    assert pool.take(CPU) is first
