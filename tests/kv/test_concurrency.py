"""32 threads at once under a small budget: budgets hold, leased bytes stay, books balance."""

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvweave.kv.format.header import Buffer
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import verify_object
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.tiers.disk import DiskTier
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import CHUNK_BYTES, LAYERS, make_chunk, make_config, make_key, make_layers
from worlds.kv_checks import check_store

NUM_THREADS = 32
NUM_CHUNKS = 24
HOST_CHUNKS, DISK_CHUNKS = 5, 9
CHUNKS = [make_chunk(number) for number in range(NUM_CHUNKS)]
LAYERS_OF = [make_layers(number) for number in range(NUM_CHUNKS)]


class MeteredDisk(DiskTier):
    """Knows the most bytes that were ever on disk: an object counts from before it is written
    until after it is deleted."""

    def __init__(self, cfg: DiskTierConfig) -> None:
        super().__init__(cfg)
        self.peak_bytes = 0
        self._sizes: dict[ChunkKey, int] = {}
        self._meter = threading.Lock()

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        with self._meter:
            self._sizes[key] = sum(len(part) for part in parts)
            self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))
        return super().write(key, parts)

    def delete(self, key: ChunkKey) -> bool:
        with self._meter:  # one step: whoever finds it deleted must find it uncounted
            was_here = super().delete(key)
            self._sizes.pop(key, None)
        return was_here


class Traffic:
    """Random use of one store from many threads; remembers everything that went wrong."""

    def __init__(self, store: KVStore, seconds: float) -> None:
        self.wrong: list[str] = []
        self.num_checked = 0
        self._store = store
        self._end_s = time.monotonic() + seconds

    def run(self) -> None:
        threads = [threading.Thread(target=self._use, args=(i,)) for i in range(NUM_THREADS)]
        threads.append(threading.Thread(target=self._watch))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _use(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < self._end_s and not self.wrong:
                pick = [int(NUM_CHUNKS * rng.random() ** 2) for _ in range(4)]
                action = rng.random()
                if action < 0.6:
                    self._load(pick, stop_after=rng.choice([1, LAYERS, LAYERS]))
                elif action < 0.93:
                    self._store.save(CHUNKS[pick[0]], cost_s=rng.random(), wait_s=0.01)
                elif action < 0.97:
                    self._store.delete([make_key(pick[0])])
                else:
                    self._store.peek([make_key(number) for number in pick])
        except BaseException as error:
            self.wrong.append(repr(error))
            raise

    def _load(self, numbers: list[int], stop_after: int) -> None:
        with self._store.acquire([make_key(number) for number in numbers]) as lease:
            transfer = self._store.load(lease)
            kept = []
            for layer in range(stop_after):
                found = transfer.wait_layer(layer)
                kept += [(n, layer, found[make_key(n)]) for n in numbers if make_key(n) in found]
            for number, layer, encoded in kept:  # after all others had time to push it out
                self.num_checked += 1
                if not torch.equal(encoded.decode().k, LAYERS_OF[number][layer].k):
                    self.wrong.append(f"layer {layer} of chunk {number} changed under a lease")

    def _watch(self) -> None:
        while time.monotonic() < self._end_s:
            for name, used in self._store.used_bytes().items():
                limit = (HOST_CHUNKS if name == "host" else DISK_CHUNKS) * CHUNK_BYTES
                if used > limit:
                    self.wrong.append(f"{name} promises {used} of {limit} bytes")
            time.sleep(0.01)


@pytest.mark.parametrize("policy", ["lru", "pgdsf"])
@pytest.mark.parametrize(
    "seconds", [2.0, pytest.param(30.0, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_budgets_hold_and_leased_bytes_stay_under_heavy_traffic(
    tmp_path: Path, seconds: float, policy: str
) -> None:
    cfg = make_config(tmp_path, HOST_CHUNKS, DISK_CHUNKS, policy=policy)
    host = open_tier(cfg.tiers[0])
    disk = MeteredDisk(DiskTierConfig(tmp_path, fsync=False))  # more writes in the time there is
    # layer by layer and sometimes late, so that loads overlap with everything else
    slow = FaultyTier(disk, FaultPlan(delay=0.3, delay_s=0.002))
    slow.best_read_bytes = 1
    store = KVStore(
        cfg,
        tiers=[
            OpenTier(host, HOST_CHUNKS * CHUNK_BYTES),
            OpenTier(slow, DISK_CHUNKS * CHUNK_BYTES),
        ],
    )
    traffic = Traffic(store, seconds)
    traffic.run()
    assert traffic.wrong == []
    assert traffic.num_checked > 100
    assert disk.peak_bytes <= DISK_CHUNKS * CHUNK_BYTES
    pressure = ("kv_evictions_total", "kv_admissions_refused_total")  # lru evicts, pgdsf refuses
    for tier in ("host", slow.name):
        assert sum(store.metrics.value(name, tier=tier) for name in pressure) > 0
    assert store.flush()
    _settle(store)
    check_store(store)
    store.close()
    tier = DiskTier(cfg.tiers[1])  # type: ignore[arg-type]
    for stored in tier.scan():
        reader = tier.open(stored.key)
        assert reader is not None
        verify_object(reader, stored.key)
        reader.close()


def _settle(store: KVStore) -> None:
    """Reads that nobody waits for any more may still be on their way."""
    give_up_s = time.monotonic() + 10
    while store.num_pinned() and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert store.num_pinned() == 0


BIG_TOKENS = 2800  # more than 1 MiB: copying one takes long enough for others to come between
BIG_CHUNKS = 8


def test_a_chunk_saved_while_it_is_evicted_never_shows_another_chunks_bytes(
    tmp_path: Path,
) -> None:
    chunks = [make_chunk(number, num_tokens=BIG_TOKENS) for number in range(BIG_CHUNKS)]
    want = [[kv.k for kv in make_layers(n, num_tokens=BIG_TOKENS)] for n in range(BIG_CHUNKS)]
    size = chunks[0].header.total_bytes
    assert size >= 1 << 20
    host = HostTierConfig(4 * size, pinned=False)
    disk = DiskTierConfig(tmp_path, capacity_bytes=2 * size, fsync=False)
    store = KVStore(StoreConfig(tiers=(host, disk), policy="lru"))
    wrong: list[str] = []
    num_checked = [0]
    end_s = time.monotonic() + 2.0

    def use(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end_s and not wrong:
                number = rng.randrange(BIG_CHUNKS)
                action = rng.random()
                if action < 0.57:
                    store.save(chunks[number], cost_s=0.1)
                    continue
                if action < 0.6:
                    store.delete([chunks[number].key])
                    continue
                with store.acquire([chunks[number].key]) as lease:
                    transfer = store.load(lease)
                    for layer in range(LAYERS):
                        for encoded in transfer.wait_layer(layer).values():
                            num_checked[0] += 1
                            if not torch.equal(encoded.decode().k, want[number][layer]):
                                wrong.append(f"layer {layer} of chunk {number}")
        except BaseException as error:
            wrong.append(repr(error))
            raise

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert num_checked[0] > 50
    assert store.flush()
    _settle(store)
    check_store(store)
    store.close()


class HeldDeletes(DiskTier):
    """Deletes wait for a sign."""

    def __init__(self, cfg: DiskTierConfig) -> None:
        super().__init__(cfg)
        self.begun, self.may_go = threading.Event(), threading.Event()

    def delete(self, key: ChunkKey) -> bool:
        self.begun.set()
        assert self.may_go.wait(5)
        return super().delete(key)


def test_a_late_delete_on_disk_does_not_take_what_was_saved_after_it(tmp_path: Path) -> None:
    cfg = make_config(tmp_path)
    disk = HeldDeletes(DiskTierConfig(tmp_path))
    store = KVStore(cfg, tiers=[OpenTier(disk, 1 << 30)])
    assert store.save(make_chunk(0)).wait(5)
    deleting = threading.Thread(target=store.delete, args=([make_key(0)],))
    deleting.start()
    assert disk.begun.wait(5)
    ticket = store.save(make_chunk(0))
    ticket.wait(0.2)  # wrong code would acknowledge it now
    disk.may_go.set()
    deleting.join()
    assert ticket.wait(5)
    assert disk.size(make_key(0)) == CHUNK_BYTES
    check_store(store)
    store.close()
