"""The way of stored chunk KV to a GPU: what arrives is what was stored, in time and in place.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu`.
"""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvweave.fuse.prefill import PromptFrame
from kvweave.fuse.probe import FrontView, probe
from kvweave.fuse.recorded_probe import ProbeRecordings
from kvweave.fuse.recordings import Recordings
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.transfer.pipeline import PipelinedChunks, open_source
from kvweave.fuse.transfer.ring import Ring
from kvweave.kv.format import memory as memory_module
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import KeyContext, make_chunk_key
from kvweave.kv.format.memory import new_memory
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.transfers import Lease, Transfer
from kvweave.model.load import load_decoder
from worlds.fuse import SELECTING, World, make_ids, prefill_stored
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

CHUNKS = make_ids(2, 40, 1, 130, 25, 64)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = make_model_folder(tmp_path_factory.mktemp("models"), "qwen3")
    return World(load_decoder(folder, device="cuda", dtype="float32"), chunks=CHUNKS, missing={3})


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    tier = HostTierConfig(64 << 20) if request.param == "host" else DiskTierConfig(tmp_path / "kv")
    with KVStore(StoreConfig((tier,))) as store:
        yield store


def leased(store: KVStore, world: World) -> Lease:
    lease = store.acquire([span.key for span in world.request.placed])
    assert not lease.missing, "what was saved is there"
    return lease


@pytest.fixture(autouse=True)
def nothing_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A load that failed says why here; ChunkLost alone does not."""
    with caplog.at_level(logging.INFO, logger="kvweave.kv"):
        yield
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("kvweave.kv")]
    assert not [line for line in lines if "did not come" in line or "which is a bug" in line]


def fill(store: KVStore, world: World, codec: str = "raw") -> None:
    placed = zip(world.request.placed, world.made, strict=True)
    for span, made in placed:
        extras = {name: of[span.key] for name, of in (world.extras or {}).items()}
        store.save(pack_chunk(span.key, made, codec, extras), wait_s=10)
    store.flush()


@pytest.mark.parametrize("name", ["reuse", *SELECTING])
def test_fusion_from_the_store_equals_fusion_of_what_was_computed(
    world: World, store: KVStore, name: str
) -> None:
    fill(store, world)
    computed, want = world.fuse(name, 0.2)
    source = world.source
    needs = world.strategy(name).needs(world.decoder.spec.num_layers)
    try:
        with leased(store, world) as lease:
            layers = store.load(lease, extras=world.extras or ())
            with open_source(world.decoder, world.request.placed, layers, needs) as pipelined:
                assert isinstance(pipelined, PipelinedChunks)
                world.source = pipelined  # type: ignore[assignment]
                stored, got = world.fuse(name, 0.2)
    finally:
        world.source = source
    assert stored.recomputed == computed.recomputed
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", ["raw", "int8", "int4", "fp8", "bf16"])
def test_a_ring_of_two_slots_brings_every_layer_decoded(
    world: World, store: KVStore, codec: str
) -> None:
    fill(store, world, codec)
    decoder = world.decoder
    with leased(store, world) as lease:
        layers = store.load(lease)
        ring = Ring(decoder.device, ring_bytes=1)
        source = PipelinedChunks(decoder, world.request.placed, layers, ring)
        for layer in (*range(decoder.spec.num_layers), 0):
            got = source.layer(layer)
            arrived = layers.wait_layer(layer)
            parts = [arrived[span.key].decode() for span in world.request.placed]
            torch.testing.assert_close(got.k.cpu(), torch.cat([kv.k for kv in parts]))
            torch.testing.assert_close(got.v.cpu(), torch.cat([kv.v for kv in parts]))
        ring.finish()
    assert ring.bytes_per_s > 0


def test_a_chunk_lost_in_the_middle_is_computed_instead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = world.decoder
    context = KeyContext("test", "float32", "raw", "any", tuple(world.preamble), "any")
    keys = {i: make_chunk_key(context, ids) for i, ids in enumerate(CHUNKS)}
    chunks = [PromptChunk(tuple(ids), keys[i], keys[i]) for i, ids in enumerate(CHUNKS) if i != 3]
    wait_layer = Transfer.wait_layer

    def loses(self: Transfer, layer: int) -> dict:
        found = wait_layer(self, layer)
        if layer >= 2:
            found.pop(keys[2], None)
        return found

    with KVStore(StoreConfig((HostTierConfig(64 << 20),))) as store:
        for chunk, made in zip(chunks, world.made, strict=True):
            store.save(pack_chunk(chunk.key, made))

        def ask() -> torch.Tensor:
            frame = PromptFrame(world.prefix, world.question)
            return prefill_stored(decoder, store, chunks, frame, world.strategy("epic"), 0.2)

        whole = ask()
        monkeypatch.setattr(Transfer, "whole", lambda self, keys: None)  # what is whole stays
        monkeypatch.setattr(Transfer, "wait_layer", loses)
        lost = ask()
        assert [c.why for c in lost.record.chunks] == [None, None, "corrupt", None]
        monkeypatch.undo()
        again = ask()
    torch.testing.assert_close(again.logits, whole.logits)
    assert bool(lost.logits.isfinite().all())


def test_landing_memory_is_page_locked(world: World) -> None:
    memory = new_memory(5 << 20, pinned=True)
    assert memory.tensor.is_pinned()
    memory.view[:4] = b"kvw!"
    assert bytes(memory.tensor[:4].cuda().cpu().numpy()) == b"kvw!"


def test_locking_that_is_refused_fails_no_kernel_of_this_thread(world: World) -> None:
    """CUDA remembers a thread's last error, and torch asks for it after its next kernel."""
    before = new_memory(1 << 20, pinned=True)
    assert not memory_module._LOCKER.register(before.tensor.data_ptr(), 1 << 20), "locked already"
    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_memory_locked_and_let_go_many_times_is_copied_from_its_own_pages(world: World) -> None:
    for i in range(50):
        memory = new_memory((1 + i % 3) << 20, pinned=True)
        memory.tensor.fill_(i)
        assert int(memory.tensor.cuda(non_blocking=True).max()) == i
        del memory


@pytest.mark.parametrize(("name", "allowed"), [("reuse", 0), ("fusionrag", 1), ("weave", 1)])
def test_a_pass_makes_the_host_wait_once_at_most(
    world: World, store: KVStore, name: str, allowed: int
) -> None:
    """Besides the end: rows that a probe chose come to the host once."""
    fill(store, world)
    strategy, own_source = world.strategy(name), world.source
    needs = strategy.needs(world.decoder.spec.num_layers)
    for _ in range(3):  # plans, kernels and recordings are made once
        world.fuse(name, 0.2)
    with leased(store, world) as lease:
        layers = store.load(lease, extras=world.extras or ())
        layers.wait_layer(world.decoder.spec.num_layers - 1)
        with open_source(world.decoder, world.request.placed, layers, needs) as source:
            world.source = source  # type: ignore[assignment]
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    world.fuse(strategy, 0.2)
                    torch.cuda.set_sync_debug_mode("default")
            finally:
                world.source = own_source
    waits = [f"{w.filename}:{w.lineno}" for w in seen if "called a synchron" in str(w.message)]
    assert len(waits) <= allowed, f"{name}: {waits}"


@pytest.mark.parametrize("in_front", [0, 1, 7])
def test_a_recorded_question_is_probed_as_an_unrecorded_one(
    world: World, monkeypatch: pytest.MonkeyPatch, in_front: int
) -> None:
    """Alone, or behind a preamble, which may be another one the next time."""
    decoder, request = world.decoder, world.request
    layers = (1, decoder.spec.num_layers - 1)
    heads, dim = decoder.spec.num_kv_heads, decoder.spec.head_dim
    shape = (decoder.spec.num_layers, 2, in_front, heads, dim)
    fronts = [torch.randn(shape, device=decoder.device).to(decoder.dtype) for _ in range(2)]
    views = [FrontView([LayerKV(k, v) for k, v in front] if in_front else ()) for front in fronts]
    recordings = Recordings(probes=ProbeRecordings())
    monkeypatch.setattr("kvweave.fuse.probe.recordings_of", lambda _: recordings)
    probe(decoder, request, views[1], layers)  # warms up
    for view in (views[0], views[1], views[1], views[0]):
        recorded = probe(decoder, request, view, layers)
        unrecorded = probe(decoder, request, _Unrecorded(view), layers)
        for layer in layers:
            for ours, want in zip(recorded[layer], unrecorded[layer], strict=True):
                torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)
    assert all(recordings.probes.kept.values()), "it was recorded"


class _Unrecorded:
    """The same view, as the plain calls are given it."""

    front = None

    def __init__(self, view: FrontView) -> None:
        self.context = view.context
        self.with_question = view.with_question
