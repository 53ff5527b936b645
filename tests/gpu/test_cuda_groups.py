"""Groups of layers on their way to a GPU: every layer comes out of its group as it was stored.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvweave.fuse.transfer.pipeline import LookAhead, PipelinedChunks, open_source
from kvweave.fuse.transfer.ring import Ring, Slot
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
from kvweave.kv.transfers import Transfer
from kvweave.model.load import load_decoder
from worlds.fuse import SELECTING, World, make_ids
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

LAYERS = 13  # odd, and no whole number of groups
ONE, TWO, MISSING = make_ids(4, 40, 90, 5)
ALONE, PAIRS, ALL = 1, 256 << 10, 1 << 24  # rings for groups of one layer, of two, of four


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = make_model_folder(tmp_path_factory.mktemp("deep"), "qwen3", num_hidden_layers=LAYERS)
    decoder = load_decoder(folder, device="cuda", dtype="float32")
    return World(decoder, chunks=[ONE, TWO, MISSING, TWO], missing={2})


class Slow(Ring):
    """The device is busy before it reads a slot: a copy that did not wait would be seen."""

    def __init__(self, device: torch.device, ring_bytes: int) -> None:
        super().__init__(device, ring_bytes)
        self.groups: list[list[int]] = []

    def copy(self, slot: Slot, there: list[Tensor], here: list[Tensor]) -> None:
        self.groups.append(list(slot.layers))
        super().copy(slot, there, here)

    def wait(self, slot: Slot) -> None:
        super().wait(slot)
        torch.cuda._sleep(2_000_000)


@pytest.fixture
def transfers(world: World) -> Iterator["Transfers"]:
    with KVStore(StoreConfig((HostTierConfig(64 << 20),))) as store:
        yield Transfers(store, world)


class Transfers:
    """Loads of the world's chunks, all whole in page-locked host memory."""

    def __init__(self, store: KVStore, world: World) -> None:
        self._store = store
        self._world = world

    def load(self, codecs: tuple[str, ...] = ("raw",)) -> Transfer:
        placed = self._world.request.placed
        for i, (span, made) in enumerate(zip(placed, self._world.made, strict=True)):
            extras = {name: of[span.key] for name, of in (self._world.extras or {}).items()}
            packed = pack_chunk(span.key, made, codecs[i % len(codecs)], extras)
            self._store.save(packed, wait_s=10)
        self._store.flush()
        self.lease = self._store.acquire([span.key for span in placed])
        return self._store.load(self.lease, extras=self._world.extras or ())


@pytest.mark.parametrize(("ring_bytes", "longest"), [(ALONE, 1), (PAIRS, 2), (ALL, 4)])
@pytest.mark.parametrize("codecs", [("raw",), ("int8", "raw"), ("int4", "fp8")])
def test_a_group_is_decoded_layer_by_layer_whatever_its_size(
    world: World, transfers: Transfers, codecs: tuple[str, ...], ring_bytes: int, longest: int
) -> None:
    decoder, placed, layers = world.decoder, world.request.placed, transfers.load(codecs)
    ring = Slow(decoder.device, ring_bytes)
    with transfers.lease:
        source = PipelinedChunks(decoder, placed, layers, ring, LookAhead(start_s=0.0))
        got = [source.layer(layer) for layer in (*range(LAYERS), 7, 0)]  # ordered without a wait
        ring.finish()
        for layer, kv in zip((*range(LAYERS), 7, 0), got, strict=True):
            arrived = layers.wait_layer(layer)
            parts = [arrived[span.key].decode() for span in placed]
            torch.testing.assert_close(kv.k.cpu(), torch.cat([kv.k for kv in parts]))
            torch.testing.assert_close(kv.v.cpu(), torch.cat([kv.v for kv in parts]))
    if codecs == ("raw",):
        assert max(map(len, ring.groups)) == longest


@pytest.mark.parametrize("name", ["reuse", *SELECTING])
def test_fusion_of_groups_equals_fusion_of_what_was_computed(
    world: World, transfers: Transfers, name: str
) -> None:
    computed, want = world.fuse(name, 0.2)
    own_source, layers = world.source, transfers.load()
    needs = world.strategy(name).needs(world.decoder.spec.num_layers)
    try:
        with (
            transfers.lease,
            open_source(world.decoder, world.request.placed, layers, needs) as source,
        ):
            assert isinstance(source, PipelinedChunks)
            world.source = source  # type: ignore[assignment]
            stored, got = world.fuse(name, 0.2)
    finally:
        world.source = own_source
    assert stored.recomputed == computed.recomputed
    assert stored.load_s >= 0
    torch.testing.assert_close(got.logits, want.logits, atol=1e-3, rtol=1e-3)
    for mine, theirs in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_a_kept_ring_fills_while_the_device_is_busy_with_something_else(world: World) -> None:
    """A probe is ordered before the first copy, which must not wait for it."""
    ring = Ring(world.decoder.device, 1 << 20)
    ring.cut(4096, 2)
    ring.finish()
    here = torch.ones(4096, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    busy = torch.cuda.Event()
    busy.record()
    ring.cut(4096, 2)
    slot = ring.slot(range(1))
    assert slot is not None
    ring.copy(slot, [slot.data], [here])
    ring.finish()
    assert not busy.query()
    ring.wait(slot)
    assert bool((slot.data == 1).all())


def test_the_next_request_does_not_write_what_the_last_one_still_reads(world: World) -> None:
    ring = Ring(world.decoder.device, 1 << 20)
    ones, twos = (torch.full((1 << 16,), i, dtype=torch.uint8).pin_memory() for i in (1, 2))
    ring.cut(1 << 16, 2)
    slot = ring.slot(range(1))
    assert slot is not None
    ring.copy(slot, [slot.data], [ones])
    ring.wait(slot)
    torch.cuda._sleep(100_000_000)
    seen = slot.data.clone()  # read late, and never released
    ring.finish()
    ring.cut(1 << 16, 2)
    again = ring.slot(range(1))
    assert again is not None
    assert again.data.data_ptr() == slot.data.data_ptr()
    ring.copy(again, [again.data], [twos])
    ring.finish()
    assert bool((seen == 1).all())
