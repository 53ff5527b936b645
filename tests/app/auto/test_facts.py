"""What the planner is told of chunks that lie on the device."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from kvweave.app.auto.facts import StoredChunkPeek, strategy_info
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.load import load_decoder
from kvweave.types import ChunkId
from worlds.fused import CHUNKS, World
from worlds.tiny_models import make_model_folder

NAMES = [ChunkId(f"c{i}") for i in range(len(CHUNKS))]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    folder = make_model_folder(tmp_path, "llama", max_position_embeddings=512)
    world = World(load_decoder(folder, device="cpu"), tmp_path / "kv")
    yield world
    world.store.close()


def test_a_chunk_on_the_device_is_offered_in_front_of_its_stored_copy(world: World) -> None:
    there = {world.encoder.key(CHUNKS[0])}

    def resident(keys: Collection[ChunkKey]) -> set[ChunkKey]:
        return there.intersection(keys)

    peek = StoredChunkPeek(world.encoder, world.store, resident)
    peek.look_at(dict(zip(NAMES, CHUNKS, strict=True)))
    found = peek(NAMES)
    assert [copy.tier for copy in found[NAMES[0]]] == ["device", "host"]
    assert [copy.tier for copy in found[NAMES[1]]] == ["host"]
    on_device, in_host = found[NAMES[0]]
    assert on_device.size_bytes == 0
    assert in_host.size_bytes > 0
    assert on_device.link == "device"
    assert (on_device.has, on_device.exact_when_first) == (frozenset(), in_host.exact_when_first)
    # also one that the store has lost
    lost = tuple(range(1, 9))
    there.add(world.encoder.key(lost))
    peek.look_at({ChunkId("lost"): lost})
    assert peek.has_copy(ChunkId("lost"))
    assert [copy.tier for copy in peek([ChunkId("lost")])[ChunkId("lost")]] == ["device"]


@pytest.mark.parametrize(
    ("name", "can"),
    [("weave", True), ("reuse", True), ("epic", True), ("cacheblend", False), ("qcfuse", False)],
)
def test_strategies_say_whether_they_read_chunks_where_they_lie(
    world: World, name: str, can: bool
) -> None:
    strategy = open_strategy(name, ModelFacts(world.decoder.spec.num_layers, (1, 2)))
    assert strategy_info(strategy, world.encoder, shares=True).shares is can
    assert not strategy_info(strategy, world.encoder).shares
