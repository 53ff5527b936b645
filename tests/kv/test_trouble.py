"""The store on a bad day: tiers that drip or hang, objects it cannot read, deletes that fail."""

import threading
import time
from pathlib import Path

import pytest

from kvweave.errors import TierError
from kvweave.fuse.encode.save_log import SaveLog
from kvweave.kv.format.objects import PackedChunk, pack_chunk
from kvweave.kv.lookup import Locator, Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier, make_slot
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import RedisTierConfig, StoreConfig
from kvweave.kv.tiers.redis import RedisTier
from kvweave.kv.writer import SaveTicket, Writer
from kvweave.metrics import Metrics
from kvweave.reasons import Reason
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import (
    CHUNK_BYTES,
    LAYERS,
    is_layer_of,
    make_chunk,
    make_config,
    make_key,
    make_layers,
)
from worlds.kv_checks import check_store
from worlds.servers import running_redis

KEY = make_key(0)


def open_faulty(root: Path, disk_chunks: int = 64, **changes: object) -> tuple[KVStore, FaultyTier]:
    """A store over one disk, read layer by layer, whose faults can be switched on."""
    cfg = make_config(root, None, disk_chunks, **changes)
    tier = FaultyTier(open_tier(cfg.tiers[0]), FaultPlan())
    tier.best_read_bytes = 1
    store = KVStore(cfg, tiers=[OpenTier(tier, disk_chunks * CHUNK_BYTES)])
    return store, tier


def serve(store: KVStore, number: int = 0) -> dict[bytes, Reason]:
    """Load a chunk as a request would; returns what was missing or lost."""
    with store.acquire([make_key(number)]) as lease:
        transfer = store.load(lease)
        for layer in range(LAYERS):
            for encoded in transfer.wait_layer(layer).values():
                assert is_layer_of(number, layer, encoded)
        return {**lease.missing, **transfer.lost}


def wait_for(what: str, store: KVStore, value: float = 1) -> None:
    give_up_s = time.monotonic() + 5
    while store.metrics.value(what) < value:
        assert time.monotonic() < give_up_s, f"{what} did not come"
        time.sleep(0.005)


def test_a_tier_that_drips_costs_a_request_its_budget_and_no_more(tmp_path: Path) -> None:
    store, tier = open_faulty(tmp_path, local_deadline_s=5.0, local_budget_s=0.3)
    for number in range(4):
        assert store.save(make_chunk(number), wait_s=5).wait(5)
    tier.plan = FaultPlan(delay=1.0, delay_s=0.12)  # each read within its deadline
    start_s = time.monotonic()
    with store.acquire([make_key(n) for n in range(4)]) as lease:
        transfer = store.load(lease)
        for layer in range(LAYERS):
            transfer.wait_layer(layer)
        assert set(transfer.lost.values()) == {Reason.TOO_SLOW}
    assert 0.3 <= time.monotonic() - start_s < 1.5
    with store.acquire([KEY]) as lease:  # and the tier rests
        assert lease.missing == {KEY: Reason.TIER_FAILED}
    store.close()


def test_time_a_request_spends_elsewhere_is_not_counted(tmp_path: Path) -> None:
    store, tier = open_faulty(tmp_path, local_budget_s=0.2, lookahead_layers=0)
    assert store.save(make_chunk(0), wait_s=5).wait(5)
    tier.plan = FaultPlan(delay=1.0, delay_s=0.01)
    with store.acquire([KEY]) as lease:
        transfer = store.load(lease)
        for layer in range(LAYERS):
            assert transfer.wait_layer(layer).keys() == {KEY}
            time.sleep(0.15)  # the request computes
    store.close()


def test_a_write_that_hangs_is_found_out_and_ingest_does_not_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, tier = open_faulty(tmp_path, write_deadline_s=0.2, write_behind_bytes=CHUNK_BYTES)
    tier.plan = FaultPlan(hang=1.0)
    store.save(make_chunk(0))
    start_s = time.monotonic()
    for number in range(1, 6):  # each would wait ten minutes
        assert store.save(make_chunk(number), wait_s=600).wait(600) is False
    assert time.monotonic() - start_s < 3
    assert caplog.text.count("a write takes longer than 0.2 s") == 1
    assert store.metrics.value("kv_tier_errors_total", verb="write") == 1
    tier.release()
    assert store.flush(5)
    store.close()


def test_a_writer_that_came_back_takes_writes_again() -> None:
    wrote: list[bytes] = []
    hang_s = [0.3]

    def write(packed: PackedChunk) -> bool:
        time.sleep(hang_s.pop() if hang_s else 0)
        wrote.append(packed.key)
        return True

    writer = Writer("slow", CHUNK_BYTES, write, deadline_s=0.05)
    assert writer.offer(make_chunk(0), SaveTicket(), wait_s=0)
    assert not writer.offer(make_chunk(1), SaveTicket(), wait_s=0.2)
    assert writer.flush(5)
    assert writer.offer(make_chunk(2), SaveTicket(), wait_s=0)
    writer.close(5)
    assert wrote == [make_key(0), make_key(2)]


def test_a_write_that_raises_is_no_end_of_its_thread() -> None:
    """Later saves, and whoever waited for them, waited for ever."""
    bugs: list[str] = []

    def write(packed: PackedChunk) -> bool:
        if packed.key == make_key(0):
            raise AttributeError("'NoneType' object has no attribute 'get'")
        return True

    writer = Writer("disk", 1 << 20, write, on_bug=lambda: bugs.append("told"))
    tickets = [SaveTicket() for _ in range(2)]
    for number, ticket in enumerate(tickets):
        assert writer.offer(make_chunk(number), ticket, wait_s=0.0)
        ticket.answer(None)
    assert not tickets[0].wait(5)
    assert tickets[1].wait(5)
    assert bugs == ["told"]
    writer.close(1.0)


def test_a_save_behind_a_write_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """Ingest waited ten minutes for it."""
    store, tier = open_faulty(tmp_path, write_deadline_s=0.3)
    tier.plan = FaultPlan(hang=1.0)
    log, began_s = SaveLog(store), time.monotonic()
    log.add(store.save(make_chunk(0)))
    assert log.finish(60.0).dropped == 1
    assert time.monotonic() - began_s < 10
    tier.release()
    store.close()


def test_a_delete_that_hangs_holds_up_nobody_and_takes_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.kv.removal.DELETE_S", 0.3)
    store, tier = open_faulty(tmp_path, breaker_rest_s=0.05)
    for number in range(3):
        assert store.save(make_chunk(number)).wait(5)
    tier.plan = FaultPlan(hang=1.0)
    began_s = time.monotonic()
    store.delete([make_key(0), make_key(1)])
    lease = store.acquire([make_key(2)])
    store.delete([make_key(2)])  # goes with its lease
    lease.release()
    assert time.monotonic() - began_s < 5
    assert store.metrics.value("kv_tier_errors_total", verb="delete") >= 2
    tier.plan = FaultPlan()
    tier.release()  # the one that hung fails, those behind it are done
    wait_for("kv_tier_errors_total", store, 3)
    give_up_s = time.monotonic() + 10
    while tier.size(make_key(1)) is not None or tier.size(make_key(2)) is not None:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    time.sleep(0.1)  # writes have rested
    assert store.save(make_chunk(0)).wait(20)
    assert serve(store, 0) == {}
    store.close()


def test_a_look_that_hangs_or_fails_holds_up_nobody_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload looks at what the books say is there; it waited for the disk for ever."""
    monkeypatch.setattr("kvweave.kv.removal.DELETE_S", 0.3)
    store, tier = open_faulty(tmp_path)
    for number in range(3):
        assert store.save(make_chunk(number)).wait(5)
    tier.plan = FaultPlan(fail=1.0)
    store.confirm([KEY])
    assert store.metrics.value("kv_tier_errors_total", verb="size") == 1
    tier.plan = FaultPlan(hang=1.0)
    began_s = time.monotonic()
    store.confirm([make_key(number) for number in range(3)])
    assert time.monotonic() - began_s < 5
    tier.plan = FaultPlan()
    tier.release()
    assert serve(store, 1) == {}, "what may be there is not forgotten"
    store.close()


def test_what_a_closed_writer_refused_is_not_waited_for() -> None:
    go_on = threading.Event()

    def write(packed: PackedChunk) -> bool:
        return go_on.wait(30)

    writer = Writer("slow", 8 * CHUNK_BYTES, write)
    tickets = [SaveTicket() for _ in range(3)]
    for number, ticket in enumerate(tickets):
        assert writer.offer(make_chunk(number), ticket, wait_s=0)
        ticket.answer(None)  # the store's own part
    writer.close(0.1)  # the first is under way, the others wait
    assert [ticket.is_answered for ticket in tickets] == [False, True, True]
    assert writer.pending_bytes == make_chunk(0).header.total_bytes
    go_on.set()
    assert writer.flush(5), "only what was under way is waited for"
    assert tickets[0].wait(5)


def save_unreadable(store: KVStore, numbers: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a codec that this build has never heard of."""
    for number in numbers:
        assert store.save(make_chunk(number), wait_s=5).wait(5)
    known = {"fp16": None}
    monkeypatch.setattr("kvweave.kv.format.objects.CODECS", known)


def test_unreadable_objects_are_said_once_count_and_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = open_faulty(tmp_path)
    save_unreadable(store, range(3), monkeypatch)
    assert [serve(store, n) for n in range(3)] == [{make_key(n): Reason.FOREIGN} for n in range(3)]
    give_up_s = time.monotonic() + 5  # a request goes on before it is noted and said
    while len(store.inventory.foreign) < 3 or "cannot be read here" not in caplog.text:
        assert time.monotonic() < give_up_s, caplog.text
        time.sleep(0.001)
    assert caplog.text.count("cannot be read here") == 1
    assert store.used_bytes() == {"faulty disk": 3 * CHUNK_BYTES}  # they take room all the same
    peeks = store.peek([make_key(n) for n in range(3)])
    assert {p.residency for p in peeks} == {Residency.ABSENT}  # so ingest computes them again
    assert serve(store, 0) == {KEY: Reason.ABSENT}
    monkeypatch.undo()
    assert store.save(make_chunk(0), wait_s=5).wait(5)
    assert serve(store, 0) == {}
    assert store.used_bytes() == {"faulty disk": 3 * CHUNK_BYTES}
    check_store(store)
    store.close()


def test_unreadable_objects_leave_when_room_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_faulty(tmp_path, disk_chunks=3)
    save_unreadable(store, range(3), monkeypatch)
    for number in range(3):
        serve(store, number)
    monkeypatch.undo()
    for number in range(10, 13):
        assert store.save(make_chunk(number), wait_s=5).wait(5)
    assert len(list((tmp_path / "objects").rglob("*.kv"))) == 3
    assert [serve(store, n) for n in range(10, 13)] == [{}] * 3
    check_store(store)
    store.close()


def test_a_file_that_cannot_be_deleted_stays_on_the_books_and_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tier = open_faulty(tmp_path, disk_chunks=2, breaker_failures=100)
    for number in range(2):
        assert store.save(make_chunk(number), wait_s=5).wait(5)

    def refuse(key: bytes) -> bool:
        raise TierError("not now")

    monkeypatch.setattr(tier, "delete", refuse)
    assert store.delete([KEY]) == 0
    assert store.used_bytes() == {"faulty disk": 2 * CHUNK_BYTES}
    assert serve(store, 0) == {KEY: Reason.ABSENT}
    assert store.save(make_chunk(5), wait_s=5).wait(5) is False  # no room: nothing can leave
    assert store.metrics.value("kv_saves_dropped_total", reason="cannot evict") == 1
    files = list((tmp_path / "objects").rglob("*.kv"))
    assert len(files) * CHUNK_BYTES == store.used_bytes()["faulty disk"]
    monkeypatch.undo()
    assert store.save(make_chunk(5), wait_s=5).wait(5) is True
    check_store(store)
    store.close()


def test_bytes_damaged_on_the_way_do_not_cost_a_good_copy(tmp_path: Path) -> None:
    store, tier = open_faulty(tmp_path)
    assert store.save(make_chunk(0), wait_s=5).wait(5)
    real = tier.strikes
    flips = iter([False, True])  # the header comes well, then a layer does not
    tier.strikes = lambda p: p > 0 and next(flips, False)  # type: ignore[method-assign]
    tier.plan = FaultPlan(corrupt=1.0)
    assert serve(store) == {KEY: Reason.CORRUPT}
    wait_for("kv_quarantine_spared_total", store)
    tier.strikes = real  # type: ignore[method-assign]
    tier.plan = FaultPlan()
    assert serve(store) == {}
    assert store.metrics.value("kv_quarantined_total") == 0
    store.close()


def test_a_copy_saved_since_is_not_quarantined_for_an_older_one(tmp_path: Path) -> None:
    store, _ = open_faulty(tmp_path)
    assert store.save(make_chunk(0), wait_s=5).wait(5)
    (slot,) = store.inventory.below
    assert slot.budget is not None
    older = slot.budget.find(KEY)
    store.delete([KEY])
    assert store.save(make_chunk(0), wait_s=5).wait(5)
    (path,) = (tmp_path / "objects").rglob("*.kv")
    path.write_bytes(b"damaged")  # even so: that is for a load of this copy to find out
    store.remover.quarantine(slot, KEY, older)
    assert path.exists()
    store.close()


def test_an_object_rewritten_on_the_server_between_two_reads_survives(tmp_path: Path) -> None:
    with running_redis(tmp_path) as port:
        cfg = StoreConfig((RedisTierConfig(f"redis://127.0.0.1:{port}/0"),), lookahead_layers=0)
        with KVStore(cfg) as store:
            tier = store.inventory.below[0].tier
            assert isinstance(tier, RedisTier)
            tier.best_read_bytes = 1  # type: ignore[misc]
            assert store.save(make_chunk(0, num_layers=9)).wait(5)
            other = pack_chunk(KEY, make_layers(1, num_layers=9))
            with store.acquire([KEY]) as lease:
                transfer = store.load(lease)
                assert transfer.wait_layer(0).keys() == {KEY}
                tier.write(KEY, [other.view])  # as another machine would
                transfer.wait_layer(8)
                assert transfer.lost == {KEY: Reason.CORRUPT}
            wait_for("kv_quarantine_spared_total", store)
            assert tier.size(KEY) == other.header.total_bytes


def test_a_bug_while_a_tier_is_asked_for_a_chunk_is_counted_and_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = make_config(tmp_path, host_chunks=None)
    tier = open_tier(cfg.tiers[0])

    def size(_: object) -> int:
        raise ZeroDivisionError("a bug")

    tier.size = size  # type: ignore[method-assign]
    metrics = Metrics()
    slot = make_slot(OpenTier(tier, None), cfg, metrics)
    locator = Locator(0.5, metrics)
    assert locator.locate([slot], [KEY]) == {}
    locator.close()
    assert metrics.value("kv_tier_errors_total", tier="disk", verb="bug") == 1
    assert "which is a bug" in caplog.text


def test_writes_of_other_keys_go_on_beside_one_that_waits_for_the_medium() -> None:
    """A disk that takes long to sync each file took a fifth of a second for every chunk."""
    first, others, order = threading.Event(), threading.Barrier(3), []

    def write(packed: PackedChunk) -> bool:
        if packed.key == make_key(0):
            assert first.wait(10)
        else:
            others.wait(10)
        order.append(packed.key)
        return True

    writer = Writer("disk", 8 * CHUNK_BYTES, write, num_threads=4)
    for number in (0, 0, 1, 2, 3):  # the second of one key waits for the first
        assert writer.offer(make_chunk(number), SaveTicket(), wait_s=0)
    while len(order) < 3:
        time.sleep(0.01)
    assert make_key(0) not in order
    first.set()
    assert writer.flush(10)
    assert order[3:] == [make_key(0), make_key(0)]
    writer.close(1.0)
