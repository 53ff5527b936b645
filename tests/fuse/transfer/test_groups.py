"""Layers that travel together: which ones, and that each comes out as it was stored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvweave.fuse.sources import ChunkLost
from kvweave.fuse.transfer import pipeline
from kvweave.fuse.transfer.pipeline import (
    GROUP_BYTES,
    LayerQueue,
    LookAhead,
    PipelinedChunks,
    group_for,
)
from kvweave.fuse.transfer.ring import Ring, Slot
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer, pack_chunk
from kvweave.model.load import load_decoder
from worlds.fuse import SELECTING, Packed, World, assert_same, make_ids
from worlds.tiny_models import make_model_folder

CPU = torch.device("cpu")
LAYERS = 13  # odd, and no whole number of groups
ALONE, PAIRS = 1, 140 << 10  # rings that hold two layers, and a little over three times two
ONE, TWO, MISSING = make_ids(4, 40, 90, 5)  # layers of two and of three pages


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("models")
    folder = make_model_folder(root, "llama", num_hidden_layers=LAYERS)
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    return World(decoder, chunks=[ONE, TWO, MISSING, TWO], missing={2})


class Watched(Ring):
    """A ring that remembers which layers travelled together, and in how many copies."""

    def __init__(self, ring_bytes: int = 1 << 20) -> None:
        super().__init__(CPU, ring_bytes)
        self.groups: list[list[int]] = []
        self.copies = 0

    def copy(self, slot: Slot, there: list[Tensor], here: list[Tensor]) -> None:
        self.groups.append(list(slot.layers))
        self.copies += len(here)
        super().copy(slot, there, here)


@dataclass
class Waited(Packed):
    waited: list[int] = field(default_factory=list)

    def wait_layer(self, layer: int) -> dict[ChunkKey, EncodedLayer]:
        self.waited.append(layer)
        return super().wait_layer(layer)


def stored(world: World, codecs: Sequence[str] = ("raw",)) -> Waited:
    keys = [span.key for span in world.request.placed]
    extras = world.extras or {}
    return Waited(
        {
            key: pack_chunk(
                key,
                made,
                codecs[i % len(codecs)],
                {name: of[key] for name, of in extras.items() if key in of},
            )
            for i, (key, made) in enumerate(zip(keys, world.made, strict=True))
        }
    )


def pipelined(
    world: World, ring: Ring, order: Sequence[int] | None = None, start_s: float = float("inf")
) -> PipelinedChunks:
    ahead = LookAhead(order, start_s)
    return PipelinedChunks(world.decoder, world.request.placed, stored(world), ring, ahead)


def drained(queue: LayerQueue) -> Iterator[list[int]]:
    while queue:
        group = queue.next_group()
        queue.take(group)
        yield list(group)


def test_groups_grow_from_one_and_shrink_towards_the_end() -> None:
    queue = LayerQueue(range(LAYERS))
    queue.most = 4
    assert list(map(len, drained(queue))) == [1, 2, 4, 3, 2, 1]


def test_layers_taken_out_of_order_come_alone_and_leave_gaps_that_no_group_spans() -> None:
    queue = LayerQueue([5, 6, 12, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11])
    queue.most = 4
    groups = [[5], [6], [12], [0], [1, 2], [3, 4], [7, 8, 9], [10], [11]]
    assert list(drained(queue)) == groups


def test_a_group_is_no_larger_than_its_bytes_and_a_third_of_the_ring() -> None:
    assert [group_for(1, 1 << 30), group_for(1, 8), group_for(1, 1)] == [4, 2, 1]
    assert group_for(GROUP_BYTES // 4, 8 * GROUP_BYTES) == 4
    assert group_for(GROUP_BYTES // 2, 8 * GROUP_BYTES) == 2
    assert group_for(GROUP_BYTES * 2, 8 * GROUP_BYTES) == 1


def test_a_chunk_takes_one_copy_per_group_and_is_waited_for_once(world: World) -> None:
    ring, layers = Watched(), stored(world)
    source = PipelinedChunks(world.decoder, world.request.placed, layers, ring)
    for layer in range(LAYERS):
        source.layer(layer)
    assert list(map(len, ring.groups)) == [1, 2, 4, 3, 2, 1]
    assert [layer for group in ring.groups for layer in group] == list(range(LAYERS))
    assert ring.copies == len(ring.groups) * len(layers.chunks), "what stands twice travels once"
    assert layers.waited == [0]


@pytest.mark.parametrize("ring_bytes", [ALONE, PAIRS, 1 << 20])
@pytest.mark.parametrize("name", ["reuse", *SELECTING])
def test_fusion_of_groups_equals_fusion_of_what_was_computed(
    world: World, name: str, ring_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = world.fuse(name, 0.3)
    ring = Watched(ring_bytes)
    monkeypatch.setattr(world, "source", pipelined(world, ring, start_s=0.0))
    got = world.fuse(name, 0.3)
    assert got[0].recomputed == want[0].recomputed
    assert_same(got[1], want[1])
    longest = max(map(len, ring.groups))
    assert longest == {ALONE: 1, PAIRS: 2}.get(ring_bytes, 4)


@pytest.mark.parametrize("ring_bytes", [ALONE, PAIRS, 1 << 20])
@pytest.mark.parametrize("codecs", [["int8", "raw"], ["int4", "fp8"], ["bf16", "int4"]])
def test_chunks_of_several_codecs_come_out_of_a_group_as_they_were_stored(
    world: World, codecs: list[str], ring_bytes: int
) -> None:
    layers, placed = stored(world, codecs), world.request.placed
    source = PipelinedChunks(
        world.decoder, placed, layers, Watched(ring_bytes), LookAhead(start_s=0.0)
    )
    backwards = range(LAYERS - 1, -1, -1)
    for layer in (*range(LAYERS), *backwards):
        got, arrived = source.layer(layer), layers.wait_layer(layer)
        parts = [arrived[span.key].decode() for span in placed]
        torch.testing.assert_close(got.k, torch.cat([kv.k for kv in parts]))
        torch.testing.assert_close(got.v, torch.cat([kv.v for kv in parts]))


@pytest.mark.parametrize("ring_bytes", [ALONE, PAIRS, 1 << 20])
@pytest.mark.parametrize(
    "asked",
    [
        [12, 0, 0, *range(1, 12)],
        [0, 5, 4, 1, 2, 3, *range(6, 13)],  # from the middle of a group, the last first
        [*range(12, -1, -1)],
        [0, 1, 12, 2, 11, 3, 10, 4, 9, 5, 8, 6, 7, 0],
    ],
)
def test_layers_asked_for_in_any_order_are_the_layers_that_were_stored(
    world: World, asked: list[int], ring_bytes: int
) -> None:
    ring = Watched(ring_bytes)
    source = pipelined(world, ring, start_s=0.0)
    for layer in asked:
        torch.testing.assert_close(source.layer(layer).k, world.source.layer(layer).k)
        torch.testing.assert_close(source.layer(layer).v, world.source.layer(layer).v)


@pytest.mark.parametrize(("taken", "again"), [([], [5, 6]), ([5], [6, 7])])
def test_a_group_that_made_room_comes_again_without_what_was_taken_of_it(
    world: World, taken: list[int], again: list[int]
) -> None:
    ring = Watched(PAIRS)
    source = pipelined(world, ring)
    first = [[0], [1, 2], [3, 4], [5, 6]]
    assert ring.groups == first[: pipeline.AT_A_TIME], "not all at once"
    for _ in range(3):
        source.begin()
    assert ring.groups == first, "as much as there is room for"
    for layer in (*taken, 12):
        source.layer(layer)
    assert ring.groups == [*first, [12], again]
    for layer in range(12):
        torch.testing.assert_close(source.layer(layer).k, world.source.layer(layer).k)
    assert sum(group.count(12) for group in ring.groups) == 1, "it had its turn"


def test_layers_that_are_still_arriving_come_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, ring = stored(world), Watched()
    monkeypatch.setattr(layers, "whole", lambda keys: None)
    source = PipelinedChunks(world.decoder, world.request.placed, layers, ring)
    for layer in range(LAYERS):
        source.layer(layer)
    assert ring.groups == [[layer] for layer in range(LAYERS)]
    assert layers.waited == list(range(LAYERS))


def test_a_chunk_of_another_shape_or_depth_is_lost_before_a_byte_is_copied(world: World) -> None:
    victim = world.request.placed[1]
    for made in ([kv._replace(k=kv.k[:1], v=kv.v[:1]) for kv in world.made[1]], None):
        layers, ring = stored(world), Watched()
        if made is None:
            del layers.chunks[victim.key]
        else:
            layers.chunks[victim.key] = pack_chunk(victim.key, made)
        with pytest.raises(ChunkLost) as lost:
            PipelinedChunks(world.decoder, world.request.placed, layers, ring)
        assert set(lost.value.keys) == {victim.key}
        assert not ring.copies


def test_a_chunk_with_fewer_layers_keeps_the_others_from_travelling_in_groups(
    world: World,
) -> None:
    layers, ring = stored(world), Watched()
    key = world.request.placed[1].key
    layers.chunks[key] = pack_chunk(key, world.made[1][:5])
    source = PipelinedChunks(world.decoder, world.request.placed, layers, ring, LookAhead(range(5)))
    for layer in range(5):
        torch.testing.assert_close(source.layer(layer).k, world.source.layer(layer).k)
    assert ring.groups == [[layer] for layer in range(5)]


def test_a_ring_follows_a_shorter_start_at_once_and_a_longer_one_slowly() -> None:
    ring = Ring(torch.device("cpu"))
    ring.record_start("question", 1.0)
    ring.record_start("question", 0.1)
    assert ring.start_s["question"] == pytest.approx(0.1)
    ring.record_start("question", 1.1)
    assert 0.1 < ring.start_s["question"] < 0.6
