"""Transfers: layers in any order, and what an object carries beside them."""

import time
from pathlib import Path

import pytest

from kvweave.kv.format.header import ALIGN
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import Tier, open_tier
from kvweave.kv.tiers.base import Reader
from kvweave.kv.tiers.config import RedisTierConfig, StoreConfig
from kvweave.reasons import Reason
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import is_layer_of, make_chunk, make_config, make_key, read_extras
from worlds.servers import running_redis

LAYERS = 8
KEY = make_key(0)


class Witness:
    """Passes reads on and notes which layers they were for, in order."""

    def __init__(self, inner: Tier, starts: list[int]) -> None:
        self.inner = inner
        self.starts = starts  # where the layers begin
        self.layers: list[int] = []
        self.writes_at_once = 1
        self.best_read_bytes = 1  # one layer, one read

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def open(self, key: bytes) -> "WitnessReader | None":
        reader = self.inner.open(key)  # type: ignore[arg-type]
        return None if reader is None else WitnessReader(reader, self)


class WitnessReader:
    def __init__(self, inner: Reader, witness: Witness) -> None:
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._witness = witness

    def read(self, offset: int, out: memoryview) -> None:
        if offset in self._witness.starts:
            self._witness.layers.append(self._witness.starts.index(offset))
        self._inner.read(offset, out)

    def close(self) -> None:
        self._inner.close()


def open_store(
    cfg: StoreConfig, delay_s: float = 0.0, extras: dict[str, bytes] | None = None
) -> tuple[KVStore, Witness]:
    """One slow tier that holds chunk 0 and is read by one thread."""
    faulty = FaultyTier(open_tier(cfg.tiers[0]), FaultPlan())
    chunk = make_chunk(0, num_layers=LAYERS, extras=extras)
    witness = Witness(faulty, [layer.offset for layer in chunk.header.layers])
    opened = OpenTier(witness, None if faulty.remote else 1 << 30)  # type: ignore[arg-type]
    store = KVStore(cfg, tiers=[opened])
    assert store.save(chunk, wait_s=5).wait(5)
    faulty.plan = FaultPlan(delay=1.0, delay_s=delay_s)
    return store, witness


def slow_disk(root: Path, **changes: object) -> StoreConfig:
    fields = {"host_chunks": None, "io_threads": 1, **changes}
    return make_config(root, **fields)  # type: ignore[arg-type]


def test_a_layer_that_no_chunk_has_is_as_ready_as_it_will_ever_be(tmp_path: Path) -> None:
    store, _ = open_store(slow_disk(tmp_path))
    with store, store.acquire([KEY]) as lease:
        transfer = store.load(lease)
        transfer.headers()
        assert transfer.is_ready(LAYERS)
        assert transfer.wait_layer(LAYERS) == {}


def test_wanted_layers_are_there_before_the_earlier_ones(tmp_path: Path) -> None:
    store, witness = open_store(slow_disk(tmp_path), delay_s=0.05)
    with store, store.acquire([KEY]) as lease:
        transfer = store.load(lease, first_layers=(7, 4))
        assert is_layer_of(0, 7, transfer.wait_layer(7)[KEY], LAYERS)
        assert is_layer_of(0, 4, transfer.wait_layer(4)[KEY], LAYERS)
        assert len(witness.layers) <= 4  # the rest has hardly begun
        assert witness.layers[:2] == [7, 4]
        for layer in range(LAYERS):
            assert is_layer_of(0, layer, transfer.wait_layer(layer)[KEY], LAYERS)
        assert witness.layers == [7, 4, 0, 1, 2, 3, 5, 6]  # each once
        assert not transfer.lost


def test_a_layer_nobody_announced_is_read_next_when_it_is_waited_for(tmp_path: Path) -> None:
    store, witness = open_store(slow_disk(tmp_path, lookahead_layers=1), delay_s=0.02)
    with store, store.acquire([KEY]) as lease:
        transfer = store.load(lease)
        assert is_layer_of(0, 6, transfer.wait_layer(6)[KEY], LAYERS)
        assert witness.layers.index(6) <= 2  # behind what was under way, not behind 2, 3, 4, 5


def test_waiting_for_an_announced_layer_does_not_ask_for_all_before_it(tmp_path: Path) -> None:
    store, witness = open_store(slow_disk(tmp_path, lookahead_layers=1))
    with store, store.acquire([KEY]) as lease:
        transfer = store.load(lease, first_layers=[7])
        transfer.wait_layer(7)
        transfer.wait_layer(1)
        transfer.wait_layer(0)
        time.sleep(0.05)
        assert sorted(witness.layers) == [0, 1, 2, 7]


def test_a_request_that_joins_a_load_gets_its_layers_first_too(tmp_path: Path) -> None:
    store, witness = open_store(slow_disk(tmp_path), delay_s=0.05)
    with store, store.acquire([KEY]) as early, store.acquire([KEY]) as late:
        first = store.load(early)
        first.wait_layer(0)
        joined = store.load(late, first_layers=[7])
        assert is_layer_of(0, 7, joined.wait_layer(7)[KEY], LAYERS)
        assert witness.layers.index(7) <= 3
        for layer in range(LAYERS):
            assert first.wait_layer(layer).keys() == joined.wait_layer(layer).keys() == {KEY}
    assert store.metrics.value("kv_loads_total") == 1


def test_a_remote_tier_brings_wanted_layers_first(tmp_path: Path) -> None:
    with running_redis(tmp_path) as port:
        cfg = StoreConfig((RedisTierConfig(f"redis://127.0.0.1:{port}/0"),), io_threads=1)
        store, witness = open_store(cfg, delay_s=0.02, extras={"anchors": b"abc"})
        with store, store.acquire([KEY]) as lease:
            transfer = store.load(lease, first_layers=[5], extras=["anchors"])
            assert read_extras(transfer, "anchors") == {KEY: b"abc"}
            assert is_layer_of(0, 5, transfer.wait_layer(5)[KEY], LAYERS)
            assert witness.layers[0] == 5


def test_host_memory_gives_any_layer_and_extra_at_once() -> None:
    with KVStore(make_config(None, host_chunks=16)) as store:
        store.save(make_chunk(0, num_layers=LAYERS, extras={"anchors": b"abc"}))
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease, first_layers=(7, 3), extras=["anchors"])
            assert is_layer_of(0, 7, transfer.wait_layer(7)[KEY], LAYERS)
            assert read_extras(transfer, "anchors") == {KEY: b"abc"}


@pytest.mark.parametrize("size", [0, 3, 5000, 100_000])
def test_extras_come_with_the_header_and_before_any_layer(tmp_path: Path, size: int) -> None:
    store, witness = open_store(
        slow_disk(tmp_path, lookahead_layers=0), 0.02, {"anchors": b"x" * size}
    )
    store.save(make_chunk(1, num_layers=LAYERS), wait_s=5).wait(5)
    with store, store.acquire([make_key(1), KEY]) as lease:
        transfer = store.load(lease, extras=["anchors", "unheard of"])
        (found,) = read_extras(transfer, "anchors").items()  # chunk 1 has none
        assert found == (KEY, b"x" * size)
        assert len(witness.layers) <= 2
        assert read_extras(transfer, "unheard of") == {}


def test_a_damaged_extra_is_a_miss(tmp_path: Path) -> None:
    store, _ = open_store(slow_disk(tmp_path), extras={"anchors": b"abc"})
    (path,) = (tmp_path / "objects").rglob("*.kv")
    raw = bytearray(path.read_bytes())
    raw[4096] ^= 1
    path.write_bytes(raw)
    with store, store.acquire([KEY]) as lease:
        transfer = store.load(lease, extras=["anchors"])
        assert read_extras(transfer, "anchors") == {}
        assert transfer.lost == {KEY: Reason.CORRUPT}


@pytest.mark.parametrize("host_chunks", [None, 16])
def test_a_layer_past_the_last_is_a_chunk_that_is_not_of_this_model(
    tmp_path: Path, host_chunks: int | None
) -> None:
    with KVStore(make_config(tmp_path, host_chunks=host_chunks)) as store:
        assert store.save(make_chunk(0, num_layers=LAYERS)).wait(5)
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease, first_layers=[LAYERS + 3])
            assert transfer.wait_layer(LAYERS - 1).keys() == {KEY}
            assert transfer.wait_layer(LAYERS) == {}
            assert transfer.lost == {KEY: Reason.CORRUPT}


def test_chunks_are_whole_when_the_last_layer_is_there_and_lie_one_layer_behind_the_other(
    tmp_path: Path,
) -> None:
    store, _ = open_store(slow_disk(tmp_path), delay_s=0.02)
    with store, store.acquire([KEY]) as lease:
        transfer = store.load(lease)
        transfer.wait_layer(0)
        assert transfer.whole([KEY]) is None, "the others are on their way"
        arrived = [transfer.wait_layer(layer)[KEY] for layer in range(LAYERS)]
        (data,) = transfer.whole([KEY]) or ()
        stride = len(data) // LAYERS
        for layer, encoded in enumerate(arrived):
            assert data[layer * stride :].data_ptr() == encoded.data.data_ptr()
        assert stride - ALIGN < len(encoded.data) <= stride
        assert transfer.whole([KEY, make_key(1)]) is None, "nobody asked for that one"
        transfer.lost[KEY] = Reason.CORRUPT
        assert transfer.whole([KEY]) is None


def test_a_chunk_in_host_memory_is_whole_at_once(tmp_path: Path) -> None:
    with KVStore(make_config(tmp_path)) as store:
        chunk = make_chunk(0)
        store.save(chunk)
        with store.acquire([KEY]) as lease:
            (data,) = store.load(lease).whole([KEY]) or ()
            assert bytes(data.numpy()) == bytes(chunk.view[chunk.header.layers[0].offset :])
