"""The store: leases, layer-streamed loads, host memory, eviction, write-behind, deletion."""

import gc
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.memory import Memory, new_memory
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig
from kvweave.kv.tiers.disk import DiskTier
from kvweave.reasons import Reason
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import CHUNK_BYTES, LAYERS, is_layer_of, make_chunk, make_config, make_key
from worlds.kv_checks import check_store


def make_store(root: Path | None, saved: range = range(0), **changes: object) -> KVStore:
    store = KVStore(make_config(root, **changes))  # type: ignore[arg-type]
    for number in saved:
        store.save(make_chunk(number), wait_s=10)
    assert store.flush()
    return store


def keys_of(*numbers: int) -> list[ChunkKey]:
    return [make_key(number) for number in numbers]


def load_and_check(store: KVStore, *numbers: int) -> set[int]:
    """Load chunks, check every byte of every layer; returns the numbers that came whole."""
    came = set(numbers)
    with store.acquire(keys_of(*numbers)) as lease:
        transfer = store.load(lease)
        for layer in range(LAYERS):
            found = transfer.wait_layer(layer)
            for number in numbers:
                encoded = found.get(make_key(number))
                if encoded is None:
                    came.discard(number)
                else:
                    assert is_layer_of(number, layer, encoded), f"wrong bytes in chunk {number}"
    return came


def tier_of(store: KVStore, number: int) -> str | None:
    return store.peek([make_key(number)])[0].tier


def test_what_was_saved_comes_back_from_every_tier(tmp_path: Path) -> None:
    for changes in ({}, {"host_chunks": None}, {"host_chunks": 0}):
        with make_store(tmp_path, range(3), **changes) as store:
            assert load_and_check(store, 0, 1, 2) == {0, 1, 2}
            check_store(store)


def test_a_store_opened_again_finds_everything(tmp_path: Path) -> None:
    make_store(tmp_path, range(5)).close()
    with make_store(tmp_path) as store:
        assert load_and_check(store, *range(5)) == set(range(5))


def test_a_host_only_store_keeps_nothing_past_its_end() -> None:
    with make_store(None) as store:
        assert store.save(make_chunk(0)).wait(5) is True
        assert load_and_check(store, 0) == {0}


def test_peek_changes_nothing(tmp_path: Path) -> None:
    with make_store(tmp_path, range(6)) as store:
        before = store.used_bytes()
        for _ in range(20):
            peeks = store.peek(keys_of(0, 5, 99))
        assert [p.residency for p in peeks] == [Residency.HERE, Residency.HERE, Residency.ABSENT]
        assert [p.tier for p in peeks] == ["disk", "host", None]
        assert store.used_bytes() == before
        assert store.num_pinned() == 0
        # LRU order is as saved: the next newcomer pushes out chunk 2, however often it was peeked
        store.peek(keys_of(2, 2, 2))
        store.save(make_chunk(6))
        assert [tier_of(store, n) for n in (2, 3)] == ["disk", "host"]


def test_missing_chunks_are_named_with_the_reason(tmp_path: Path) -> None:
    with make_store(tmp_path, range(1)) as store:
        with store.acquire(keys_of(0, 7, 0, 8)) as lease:
            assert lease.keys == tuple(keys_of(0))
            assert lease.missing == dict.fromkeys(keys_of(7, 8), Reason.ABSENT)
        assert store.metrics.value("kv_misses_total", reason="absent") == 2


def test_a_leased_chunk_survives_eviction(tmp_path: Path) -> None:
    with make_store(None, range(2), host_chunks=2) as store:
        with store.acquire(keys_of(0)) as lease:
            transfer = store.load(lease)
            for number in range(2, 12):
                store.save(make_chunk(number))
            assert is_layer_of(0, 1, transfer.wait_layer(1)[make_key(0)])
            assert tier_of(store, 1) is None
        store.save(make_chunk(20))
        store.save(make_chunk(21))
        assert tier_of(store, 0) is None  # released, it leaves like any other
        check_store(store)


def test_releasing_twice_is_harmless_and_pins_return_to_zero(tmp_path: Path) -> None:
    with make_store(tmp_path, range(3)) as store:
        lease = store.acquire(keys_of(0, 1, 2))
        assert store.num_pinned() == 3
        lease.release()
        lease.release()
        assert store.num_pinned() == 0


def test_a_forgotten_lease_gives_its_pins_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_store(tmp_path, range(1)) as store:
        store.acquire(keys_of(0))
        gc.collect()
        store.acquire([]).release()
        assert store.num_pinned() == 0
        assert "dropped unreleased" in caplog.text


def test_a_load_from_disk_is_kept_in_host_and_the_next_comes_from_there(tmp_path: Path) -> None:
    with make_store(tmp_path, range(6)) as store:
        assert tier_of(store, 0) == "disk"
        load_and_check(store, 0)
        assert tier_of(store, 0) == "host"
        assert store.metrics.value("kv_promotions_total", tier="disk") == 1
        loads = store.metrics.value("kv_loads_total")
        load_and_check(store, 0)
        assert store.metrics.value("kv_loads_total") == loads


def test_a_chunk_worth_less_is_served_from_staging_and_not_kept(tmp_path: Path) -> None:
    with make_store(tmp_path, range(6), host_chunks=2, policy="lfu") as store:
        for _ in range(5):
            load_and_check(store, 0, 1)
        assert {tier_of(store, n) for n in (0, 1)} == {"host"}
        assert load_and_check(store, 5) == {5}
        assert tier_of(store, 5) == "disk"
        assert store.metrics.value("kv_admissions_refused_total", tier="host") >= 1
        check_store(store)


def test_what_leaves_host_and_is_nowhere_below_is_written_down(tmp_path: Path) -> None:
    with make_store(tmp_path, range(2), host_chunks=2) as store:
        store.remover.delete_from(store.inventory.below[0], make_key(0))  # as disk eviction would
        for number in (2, 3):
            store.save(make_chunk(number))
        assert store.flush()
        assert tier_of(store, 0) == "disk"
        assert store.metrics.value("kv_demotions_total") == 1
        assert load_and_check(store, 0, 1, 2, 3) == {0, 1, 2, 3}


def test_budgets_hold_on_disk_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.kv.tiers.disk.DiskTier.writes_at_once", 1)
    with make_store(tmp_path, range(12), host_chunks=None, disk_chunks=5) as store:
        files = list((tmp_path / "objects").rglob("*.kv"))
        assert sum(f.stat().st_size for f in files) <= 5 * CHUNK_BYTES
        assert len(files) == 5
        check_store(store)
        assert load_and_check(store, *range(12)) == {7, 8, 9, 10, 11}


def test_a_smaller_budget_evicts_the_oldest_at_the_next_start(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for number in range(4):
        assert store.save(make_chunk(number)).wait(5)
        time.sleep(0.01)  # file times tell them apart
    store.close()
    with make_store(tmp_path, host_chunks=None, disk_chunks=2) as store:
        assert load_and_check(store, 0, 1, 2, 3) == {2, 3}
        assert len(list((tmp_path / "objects").rglob("*.kv"))) == 2


def test_saving_twice_writes_once(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        assert all(store.save(make_chunk(0)).wait(5) for _ in range(3))
        assert store.metrics.value("kv_saves_total", tier="disk") == 1


def test_a_deleted_chunk_is_gone_from_every_tier_and_a_leased_one_goes_with_its_lease(
    tmp_path: Path,
) -> None:
    with make_store(tmp_path, range(2)) as store:
        with store.acquire(keys_of(0)) as lease:
            transfer = store.load(lease)
            assert store.delete(keys_of(0, 1, 9)) == 2
            assert store.delete(keys_of(0)) == 1  # again: its bytes are still leased
            assert is_layer_of(0, 2, transfer.wait_layer(2)[make_key(0)])
        assert [p.residency for p in store.peek(keys_of(0, 1))] == [Residency.ABSENT] * 2
        assert not list((tmp_path / "objects").rglob("*.kv"))
        check_store(store)


def test_a_chunk_saved_again_while_its_deletion_waits_for_a_lease_stays(tmp_path: Path) -> None:
    with make_store(tmp_path, range(1)) as store:
        with store.acquire(keys_of(0)):
            store.delete(keys_of(0))
            assert store.save(make_chunk(0)).wait(5) is True
        assert load_and_check(store, 0) == {0}
        check_store(store)


def make_slow_store(root: Path, plan: FaultPlan, **changes: object) -> tuple[KVStore, FaultyTier]:
    """A faulty disk that is read layer by layer. Without host memory, unless asked for: every load
    goes through the faults."""
    cfg = make_config(root, **{"host_chunks": None, **changes})  # type: ignore[arg-type]
    *hosts, disk = [open_tier(tier_cfg) for tier_cfg in cfg.tiers]
    tier = FaultyTier(disk, FaultPlan())
    tier.best_read_bytes = 1
    opened = [OpenTier(host, 4 * CHUNK_BYTES) for host in hosts]
    store = KVStore(cfg, tiers=[*opened, OpenTier(tier, 64 * CHUNK_BYTES)])
    for number in range(4):
        store.save(make_chunk(number), wait_s=10)
    assert store.flush()
    tier.plan = plan
    return store, tier


def test_ten_requests_for_one_chunk_load_it_once(tmp_path: Path) -> None:
    store, _ = make_slow_store(tmp_path, FaultPlan(delay=1.0, delay_s=0.05))
    threads = [threading.Thread(target=load_and_check, args=(store, 0)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.metrics.value("kv_loads_total") == 1
    assert store.metrics.value("kv_loads_joined_total") == 9
    store.close()


def test_bytes_on_the_way_are_counted_until_they_are_there(tmp_path: Path) -> None:
    store, tier = make_slow_store(tmp_path, FaultPlan(hang=1.0))
    assert store.pending_bytes() == {}
    with store.acquire([make_key(0)]) as lease:
        transfer = store.load(lease)
        assert store.pending_bytes() == {tier.name: CHUNK_BYTES}
        tier.plan = FaultPlan()
        tier.release()
        transfer.headers()
    assert store.pending_bytes() == {}, "nobody waits for it any more"
    store.close()


def test_layers_come_in_order_before_the_whole_is_there(tmp_path: Path) -> None:
    store, tier = make_slow_store(tmp_path, FaultPlan(), lookahead_layers=1)
    with store.acquire(keys_of(0)) as lease:
        transfer = store.load(lease)
        assert is_layer_of(0, 0, transfer.wait_layer(0)[make_key(0)])
        tier.plan = FaultPlan(fail=1.0)  # layers beyond the look-ahead were not asked for yet
        assert transfer.wait_layer(2) == {}
        assert transfer.lost == {make_key(0): Reason.TIER_FAILED}
    store.close()


def test_an_abandoned_load_gives_its_memory_back(tmp_path: Path) -> None:
    store, _ = make_slow_store(tmp_path, FaultPlan(), host_chunks=4, lookahead_layers=1)
    store.remover.delete_from(store.inventory.slots[0], make_key(0))
    before = store.used_bytes()["host"]
    with store.acquire(keys_of(0)) as lease:
        store.load(lease).wait_layer(0)
        assert store.used_bytes()["host"] == before + CHUNK_BYTES
    give_up_s = time.monotonic() + 5
    while store.used_bytes()["host"] > before and time.monotonic() < give_up_s:
        time.sleep(0.01)  # the last read may still be under way
    assert store.used_bytes()["host"] == before
    check_store(store)
    store.close()


def test_a_hung_tier_costs_one_deadline_and_then_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, tier = make_slow_store(
        tmp_path, FaultPlan(hang=1.0), local_deadline_s=0.2, breaker_rest_s=60.0
    )
    start_s = time.monotonic()
    assert load_and_check(store, 0, 1) == set()
    first_s = time.monotonic() - start_s
    assert 0.2 <= first_s < 2.0
    start_s = time.monotonic()
    for _ in range(50):
        with store.acquire(keys_of(0, 1)) as lease:
            assert set(lease.missing.values()) == {Reason.TIER_FAILED}
    assert time.monotonic() - start_s < 0.2
    assert caplog.text.count("rest for a while") == 1
    assert store.metrics.value("kv_misses_total", reason="too slow") >= 1
    tier.release()
    store.close()


def test_a_tier_that_recovers_is_used_again(tmp_path: Path) -> None:
    store, tier = make_slow_store(tmp_path, FaultPlan(fail=1.0), breaker_rest_s=0.1)
    for _ in range(3):
        assert load_and_check(store, 0) == set()
    with store.acquire(keys_of(0)) as lease:
        assert lease.missing == {make_key(0): Reason.TIER_FAILED}
    tier.plan = FaultPlan()
    time.sleep(0.15)
    assert load_and_check(store, 0) == {0}
    store.close()


def test_write_behind_is_bounded_and_drops_are_counted(tmp_path: Path) -> None:
    store, tier = make_slow_store(tmp_path, FaultPlan(hang=1.0), write_behind_bytes=3 * CHUNK_BYTES)
    tickets = [store.save(make_chunk(number)) for number in range(10, 20)]
    assert store.metrics.value("kv_saves_dropped_total", reason="write-behind is full") == 7
    assert tickets[-1].wait(1) is False
    start_s = time.monotonic()
    store.save(make_chunk(30), wait_s=0.1)
    assert 0.1 <= time.monotonic() - start_s < 2
    tier.release()
    store.close()


@pytest.mark.parametrize("fault", ["drop", "fail", "truncate", "corrupt"])
def test_no_fault_ever_gives_a_wrong_byte(tmp_path: Path, fault: str) -> None:
    plan = FaultPlan(seed=1, **{fault: 0.2})  # type: ignore[arg-type]
    store, _ = make_slow_store(tmp_path, plan, breaker_failures=1000)
    for _ in range(30):
        load_and_check(store, 0, 1, 2, 3)  # asserts on every byte that comes
        for number in range(4):
            store.save(make_chunk(number), wait_s=5)
        store.flush()
    lost = sum(s.value for s in store.metrics.snapshot() if s.name == "kv_misses_total")
    assert lost > 0
    store.close()


def test_a_tier_that_cannot_be_used_is_said_once_and_the_store_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    with KVStore(make_config(tmp_path / "store")) as store:
        assert store.save(make_chunk(0)).wait(5) is False  # in host memory, which does not stay
        assert load_and_check(store, 0) == {0}
        assert store.metrics.value("kv_tier_errors_total", tier="disk", verb="scan") == 1
    assert caplog.text.count("give a folder this user can read and write") == 1


def test_a_tier_that_there_is_no_memory_for_is_left_out_and_the_store_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = make_config(tmp_path)
    huge = HostTierConfig(10**9 << 30, pinned=False)
    with KVStore(replace(cfg, tiers=(huge, *cfg.tiers[1:]))) as store:
        assert store.save(make_chunk(0)).wait(5) is True
        assert load_and_check(store, 0) == {0}
        assert store.metrics.value("kv_tier_errors_total", tier="host", verb="open") == 1
    assert caplog.text.count("a tier is left out") == 1


def test_a_full_disk_is_said_once_and_serving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, tier = make_slow_store(tmp_path, FaultPlan(drop=1.0))
    assert [store.save(make_chunk(n), wait_s=5).wait(5) for n in range(10, 14)] == [False] * 4
    tier.plan = FaultPlan()
    assert caplog.text.count("free space there or lower capacity_bytes") == 1
    assert store.metrics.value("kv_saves_dropped_total", reason="no room") == 4
    assert load_and_check(store, 0, 1) == {0, 1}
    check_store(store)
    store.close()


def test_a_miss_strikes_only_the_copy_it_looked_for(tmp_path: Path) -> None:
    with make_store(tmp_path, range(1), host_chunks=None) as store:
        (slot,) = store.inventory.below
        assert slot.budget is not None
        older = slot.budget.find(make_key(0))
        store.delete(keys_of(0))
        assert store.save(make_chunk(0)).wait(5)
        store.remover.forget(slot, make_key(0), older)  # a load that found the older one gone
        assert store.used_bytes() == {"disk": CHUNK_BYTES}
        assert load_and_check(store, 0) == {0}


def test_objects_written_by_another_process_are_found(tmp_path: Path) -> None:
    with make_store(tmp_path) as reader, make_store(tmp_path, range(3)):
        assert [p.tier for p in reader.peek(keys_of(0, 1, 2))] == ["disk"] * 3
        assert load_and_check(reader, 0, 1, 2) == {0, 1, 2}


def test_objects_deleted_by_another_process_are_a_miss(tmp_path: Path) -> None:
    with make_store(tmp_path, range(2), host_chunks=None) as store:
        for path in (tmp_path / "objects").rglob("*.kv"):
            path.unlink()
        assert load_and_check(store, 0, 1) == set()
        assert store.metrics.value("kv_misses_total", reason="absent") == 2
        check_store(store)


def test_a_chunk_deleted_while_it_loads_does_not_come_back(tmp_path: Path) -> None:
    store, _ = make_slow_store(tmp_path, FaultPlan(), host_chunks=4, lookahead_layers=1)
    store.remover.delete_from(store.inventory.slots[0], make_key(0))
    with store.acquire(keys_of(0)) as lease, store.acquire(keys_of(0)) as late:
        transfer = store.load(lease)
        assert is_layer_of(0, 0, transfer.wait_layer(0)[make_key(0)])
        assert store.delete(keys_of(0)) == 1
        for each in (transfer, store.load(late)):  # both leases still get what they hold
            for layer in range(LAYERS):
                assert is_layer_of(0, layer, each.wait_layer(layer)[make_key(0)])
        assert tier_of(store, 0) is None
    give_up_s = time.monotonic() + 5
    while store.num_pinned() and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert tier_of(store, 0) is None
    assert not list(tmp_path.rglob(f"{make_key(0).hex()}*"))
    check_store(store)
    store.close()


def test_what_leaves_host_is_written_down_where_there_is_a_remote_tier_too(
    tmp_path: Path,
) -> None:
    cfg = make_config(tmp_path / "disk", host_chunks=2)
    remote = DiskTier(DiskTierConfig(tmp_path / "remote"))
    remote.name = "remote"
    capacities = (2 * CHUNK_BYTES, 1 << 30)
    opened = [OpenTier(open_tier(t), c) for t, c in zip(cfg.tiers, capacities, strict=True)]
    store = KVStore(cfg, tiers=[*opened, OpenTier(remote, None)])
    for number in (0, 1):
        assert store.save(make_chunk(number), wait_s=5).wait(5)
    for slot in store.inventory.below:
        assert store.remover.delete_from(slot, make_key(0))
    for number in (2, 3):
        assert store.save(make_chunk(number), wait_s=5).wait(5)
    assert store.flush()
    assert tier_of(store, 0) == "disk"
    assert store.metrics.value("kv_demotions_total") == 1
    store.close()


def test_a_busy_disk_is_not_a_broken_one(tmp_path: Path) -> None:
    plan = FaultPlan(delay=1.0, delay_s=0.05)
    store, _ = make_slow_store(tmp_path, plan, io_threads=1, locate_deadline_s=0.1)
    with store.acquire(keys_of(0, 1, 2)) as lease:
        transfer = store.load(lease)  # 12 reads of 50 ms on one thread
        with store.acquire([make_key(number) for number in range(900, 920)]) as other:
            assert len(other.missing) == 20  # more than can be asked in time
        with store.acquire(keys_of(3)) as other:
            assert not other.missing
        for layer in range(LAYERS):
            assert len(transfer.wait_layer(layer)) == 3
    assert store.metrics.value("kv_tier_errors_total") == 0
    store.close()


def test_copies_are_counted_in_every_local_tier(tmp_path: Path) -> None:
    with make_store(tmp_path, range(3), host_chunks=2) as store:
        assert store.copies(keys_of(2)) == {"host": CHUNK_BYTES, "disk": CHUNK_BYTES}
        assert store.copies(keys_of(0, 2)) == {"host": CHUNK_BYTES, "disk": 2 * CHUNK_BYTES}
        assert store.copies(keys_of(9)) == {}
        assert store.capacity_bytes() == {"host": 2 * CHUNK_BYTES, "disk": 64 * CHUNK_BYTES}


def test_the_last_evictions_are_remembered(tmp_path: Path) -> None:
    began_s = time.time()
    with make_store(None, range(3), host_chunks=2) as store:
        (gone,) = store.evictions()
        assert (gone.tier, gone.key, gone.size_bytes) == ("host", make_key(0), CHUNK_BYTES)
        assert began_s <= gone.at_s <= time.time()
        assert store.metrics.value("kv_evictions_total", tier="host") == 1


def test_a_cleared_store_holds_nothing_in_local_tiers(tmp_path: Path) -> None:
    with make_store(tmp_path, range(3)) as store:
        assert store.clear() == 3
        assert store.used_bytes() == {"host": 0, "disk": 0}
        assert store.clear() == 0
        check_store(store)
    with make_store(tmp_path) as store:
        assert load_and_check(store, 0, 1, 2) == set()


@pytest.mark.parametrize("is_leased", [False, True])
def test_a_closed_store_gives_its_memory_back_before_any_garbage_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_leased: bool
) -> None:
    """A server that opens and closes knowledge bases had the host tiers of many at a time."""
    taken: list[weakref.ref[object]] = []

    def watched(size_bytes: int, *, pinned: bool) -> Memory:
        memory = new_memory(size_bytes, pinned=pinned)
        taken.append(weakref.ref(memory.view.obj))
        return memory

    monkeypatch.setattr("kvweave.kv.tiers.host.new_memory", watched)
    # of buffers that loads pass by
    monkeypatch.setattr("kvweave.kv.format.memory.new_memory", watched)
    gc.disable()
    try:
        store = KVStore(make_config(tmp_path, host_chunks=2))
        for number in range(4):
            assert store.save(make_chunk(number), wait_s=5).wait(5)
        leases = [store.acquire([make_key(number)]) for number in range(4)] if is_leased else []
        assert load_and_check(store, 0, 1, 2, 3) == {0, 1, 2, 3}
        assert len(taken) > 1, "host tier and staging"
        store.close()
        while leases:
            leases.pop().release()
        assert [each() for each in taken] == [None] * len(taken)
    finally:
        gc.enable()


def test_what_is_saved_again_while_it_is_evicted_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer deleted the new file as that of its victim."""
    evicting, go_on, delete = threading.Event(), threading.Event(), DiskTier.delete

    def slow(self: DiskTier, key: ChunkKey) -> bool:
        evicting.set()
        assert go_on.wait(10)
        return delete(self, key)

    with make_store(tmp_path, range(2), host_chunks=None, disk_chunks=2) as store:
        monkeypatch.setattr(DiskTier, "delete", slow)
        store.save(make_chunk(2), wait_s=5)
        assert evicting.wait(10)
        again = store.save(make_chunk(0), wait_s=5)
        time.sleep(0.05)
        go_on.set()
        assert again.wait(10)
        assert store.flush(10)
        assert 0 in load_and_check(store, 0, 1, 2)
        check_store(store)
