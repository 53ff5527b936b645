"""A strategy loads what it needs beside the layers, whatever others loaded before it."""

import random
from pathlib import Path

import pytest
import torch

from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.fuse.prefill import Prefilled, PromptFrame, StoredPrompt
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.kv.format.header import ALIGN
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.types import Chunk, ChunkId
from worlds.fuse import prefill_stored
from worlds.kv import make_context
from worlds.tiny_models import make_model_folder

RNG = random.Random(3)
PREAMBLE = [RNG.randrange(97) for _ in range(6)]
CHUNKS = [[RNG.randrange(97) for _ in range(n)] for n in (31, 1, 19, 27)]
QUESTION = [RNG.randrange(97) for _ in range(5)]
EXTRAS = ["anchors:kvzip", "inter"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), "llama")
    return load_decoder(folder, device="cpu", dtype="float32")


class World:
    """The chunks on disk with all extras, and a host tier that knows none of them yet."""

    def __init__(self, decoder: Decoder, root: Path) -> None:
        self.decoder = decoder
        disk = DiskTierConfig(root)
        with KVStore(StoreConfig((disk,))) as store:
            chunks = [Chunk(ChunkId(str(i)), "", "", tuple(i)) for i in CHUNKS]
            encoder = self._encoder(store)
            encoder.encode(chunks)
            assert store.flush()
            encoder.add_extras(chunks, EXTRAS)
            assert store.flush()
        self.store = KVStore(StoreConfig((HostTierConfig(8 << 20, pinned=False), disk)))
        self.encoder = self._encoder(self.store)
        self.named = [
            PromptChunk(tuple(i), self.encoder.key(i), self.encoder.exact_key(i)) for i in CHUNKS
        ]

    def _encoder(self, store: KVStore) -> ChunkEncoder:
        context = make_context(preamble_ids=tuple(PREAMBLE))
        preparation = Preparation.parse("isolated")
        return ChunkEncoder(self.decoder, store, context, preparation, Texts(repeat=(3, 4, 5)))

    def answer(self, name: str) -> Prefilled:
        frame = PromptFrame(self.encoder.preamble, QUESTION)
        return prefill_stored(self.decoder, self.store, self.named, frame, self.strategy(name), 0.3)

    def strategy(self, name: str) -> Strategy:
        return open_strategy(name, ModelFacts(self.decoder.spec.num_layers, (1, 2)))

    def plain_bytes(self, root: Path) -> int:
        """Headers, ids and layers of all chunks as they lie on disk."""
        found = 0
        for chunk in self.named:
            assert chunk.key is not None
            (path,) = root.rglob(f"{chunk.key.hex()}.kv")
            header = PackedChunk.from_bytes(chunk.key, memoryview(path.read_bytes())).header
            assert header.extras["chunk"].size_bytes <= ALIGN
            found += header.header_bytes + ALIGN + header.total_bytes - header.layers[0].offset
        return found


def test_reuse_loads_headers_and_layers_and_says_so(decoder: Decoder, tmp_path: Path) -> None:
    world = World(decoder, tmp_path)
    with world.store as store:
        record = world.answer("reuse").record
        assert record.loaded_bytes == {"disk": world.plain_bytes(tmp_path)}
        assert store.metrics.value("kv_bytes_loaded_total") == world.plain_bytes(tmp_path)


@pytest.mark.parametrize("name", ["qcfuse", "cachecraft-like"])
def test_a_strategy_gets_its_extras_where_reuse_left_none(
    decoder: Decoder, tmp_path: Path, name: str
) -> None:
    fresh, used = World(decoder, tmp_path / "fresh"), World(decoder, tmp_path / "used")
    with fresh.store, used.store as store:
        want = fresh.answer(name)
        used.answer("reuse")
        before = store.metrics.value("kv_bytes_loaded_total")
        got = used.answer(name)
        assert [chunk.why for chunk in got.record.chunks] == [None] * len(CHUNKS)
        torch.testing.assert_close(got.logits, want.logits)
        brought = store.metrics.value("kv_bytes_loaded_total") - before
        assert 0 < brought < used.plain_bytes(tmp_path / "used"), "extras alone"
        again = used.answer(name)
        assert store.metrics.value("kv_bytes_loaded_total") == before + brought, "they stay"
        torch.testing.assert_close(again.logits, want.logits)


def test_a_prompt_has_arrived_when_its_extras_have(decoder: Decoder, tmp_path: Path) -> None:
    world = World(decoder, tmp_path)
    with world.store as store:
        world.answer("reuse")
        strategy, kv = world.strategy("qcfuse"), decoder.new_kv(1)
        with StoredPrompt(decoder.spec.num_layers, world.named, store, strategy) as stored:
            stored.arrive()
            assert stored.has_arrived
            loaded = store.metrics.value("kv_bytes_loaded_total")
            stored.prefill(decoder, PromptFrame(world.encoder.preamble, QUESTION), OwnRoom(kv), 0.3)
            assert store.metrics.value("kv_bytes_loaded_total") == loaded, "nothing is awaited"
