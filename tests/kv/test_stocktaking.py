"""A tier that cannot be listed when the store opens: answered without, used again once it can be,
and its books are true then."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import StoredObject, open_tier
from kvweave.kv.tiers.config import StoreConfig
from kvweave.reasons import Reason
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import CHUNK_BYTES, LAYERS, is_layer_of, make_chunk, make_config, make_key
from worlds.kv_checks import check_store
from worlds.permissions import closed_folder, plain_user

REST_S = 0.02  # until a tier that failed is tried again


@pytest.fixture(autouse=True)
def _permissions_bite() -> Iterator[None]:
    with plain_user():
        yield


def fill(root: Path, *numbers: int) -> None:
    """As an earlier process did."""
    with KVStore(make_config(root, None)) as store:
        for number in numbers:
            assert store.save(make_chunk(number), wait_s=5).wait(5)


def config(root: Path, host_chunks: int | None = None, disk_chunks: int = 64) -> StoreConfig:
    return make_config(root, host_chunks, disk_chunks, breaker_rest_s=REST_S)


def serve(store: KVStore, *numbers: int) -> dict[bytes, Reason]:
    """Load chunks as a request would; returns what was missing or lost."""
    by_key = {make_key(number): number for number in numbers}
    with store.acquire(list(by_key)) as lease:
        transfer = store.load(lease)
        for layer in range(LAYERS):
            for key, encoded in transfer.wait_layer(layer).items():
                assert is_layer_of(by_key[key], layer, encoded)
        return {**lease.missing, **transfer.lost}


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.005)


def come_back(store: KVStore, *numbers: int) -> None:
    wait_until(lambda: not serve(store, *numbers), "the tier is not in use again")


def count_files(root: Path) -> int:
    return len(list((root / "objects").rglob("*.kv")))


@pytest.mark.parametrize("closed", [".", "objects"])
def test_a_folder_that_cannot_be_read_at_the_start_comes_back_with_all_that_lies_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, closed: str
) -> None:
    root = tmp_path / "store"
    fill(root, 0, 1, 2)
    with closed_folder(root / closed):
        store = KVStore(config(root))
        for _ in range(3):
            assert serve(store, 0, 1) == {
                make_key(0): Reason.TIER_FAILED,
                make_key(1): Reason.TIER_FAILED,
            }
        assert [peek.residency for peek in store.peek([make_key(0)])] == [Residency.ABSENT]
        assert store.metrics.value("kv_misses_total", reason="tier failed") >= 6
        assert store.metrics.value("kv_tier_errors_total", tier="disk", verb="scan") >= 1
        store.update_gauges()
        assert store.metrics.value("kv_tier_resting", tier="disk") == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert "disk" in said
    assert "Permission denied" in said
    assert "without a restart" in said
    assert "\n" not in said
    come_back(store, 0, 1, 2)
    assert store.used_bytes() == {"disk": 3 * CHUNK_BYTES}
    store.update_gauges()
    assert store.metrics.value("kv_tier_resting", tier="disk") == 0
    check_store(store)
    store.close()


def test_a_folder_that_gives_errors_at_the_start_comes_back(tmp_path: Path) -> None:
    fill(tmp_path, 0)
    store, tier = open_faulty(tmp_path, FaultPlan(fail=1.0))
    assert serve(store, 0) == {make_key(0): Reason.TIER_FAILED}
    tier.plan = FaultPlan()
    come_back(store, 0)
    assert store.used_bytes() == {tier.name: CHUNK_BYTES}
    store.close()


def test_a_file_in_place_of_the_folder_is_a_tier_that_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.write_text("in the way")
    store = KVStore(config(root))
    assert serve(store, 0) == {make_key(0): Reason.TIER_FAILED}
    root.unlink()
    wait_until(lambda: serve(store, 0) == {make_key(0): Reason.ABSENT}, "it is not listed again")
    assert store.save(make_chunk(0), wait_s=5).wait(5)
    assert serve(store, 0) == {}
    store.close()


def test_what_is_saved_meanwhile_stays_in_memory_and_is_counted_as_dropped_below(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 0)
    with closed_folder(tmp_path / "objects"):
        store = KVStore(config(tmp_path, host_chunks=4))
        assert store.save(make_chunk(1), wait_s=5).wait(5) is False, "no tier that stays has it"
        assert serve(store, 1) == {}
    name, reason = "kv_saves_dropped_total", "tier cannot be listed"
    assert store.metrics.value(name, tier="disk", reason=reason) == 1
    come_back(store, 0)
    assert store.save(make_chunk(1), wait_s=5).wait(5)
    assert store.used_bytes()["disk"] == 2 * CHUNK_BYTES
    check_store(store)
    store.close()


def test_nothing_is_written_before_it_is_known_what_lies_there(tmp_path: Path) -> None:
    """A folder may take writes and give no names: its budget would not count what is there."""
    fill(tmp_path, 0, 1)
    store, tier = open_faulty(tmp_path, FaultPlan(fail=1.0), disk_chunks=2)
    gate = hold_scans(tier)
    tier.plan = FaultPlan()
    wait_until(lambda: bool(serve(store, 0)) and gate.num_scans > 0, "it is not listed again")
    assert store.save(make_chunk(2), wait_s=5).wait(5) is False
    assert serve(store, 0) == {make_key(0): Reason.TIER_FAILED}, "what is half counted is not read"
    gate.go_on.set()
    come_back(store, 0, 1)
    assert gate.num_scans == 1, "one at a time"
    assert store.save(make_chunk(2), wait_s=5).wait(5)
    assert count_files(tmp_path) == 2
    check_store(store)
    store.close()


def test_what_exceeds_the_budget_leaves_when_the_folder_is_back(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1, 2, 3)
    with closed_folder(tmp_path / "objects"):
        store = KVStore(config(tmp_path, disk_chunks=2))
        serve(store, 3)
    come_back(store, 3)
    assert store.used_bytes() == {"disk": 2 * CHUNK_BYTES}
    assert count_files(tmp_path) == 2
    assert store.metrics.value("kv_evictions_total", tier="disk") == 2
    check_store(store)
    store.close()


def test_what_was_deleted_meanwhile_is_deleted_when_the_folder_is_back(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1)
    with closed_folder(tmp_path / "objects"):
        store = KVStore(config(tmp_path))
        assert store.delete([make_key(0)]) == 0
        assert store.metrics.value("kv_tier_errors_total", tier="disk", verb="delete") == 1
    come_back(store, 1)
    assert serve(store, 0) == {make_key(0): Reason.ABSENT}
    assert count_files(tmp_path) == 1
    assert store.used_bytes() == {"disk": CHUNK_BYTES}
    check_store(store)
    store.close()


def test_what_is_deleted_while_it_is_listed_is_in_no_book(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1)
    store, tier = open_faulty(tmp_path, FaultPlan(fail=1.0))
    gate = hold_scans(tier)
    tier.plan = FaultPlan()
    wait_until(lambda: bool(serve(store, 1)) and gate.num_scans > 0, "it is not listed again")
    assert store.delete([make_key(0)]) == 1
    gate.go_on.set()
    come_back(store, 1)
    assert serve(store, 0) == {make_key(0): Reason.ABSENT}
    assert store.used_bytes() == {tier.name: CHUNK_BYTES}
    check_store(store)
    store.close()


def test_a_store_that_never_gets_its_folder_back_closes(tmp_path: Path) -> None:
    fill(tmp_path, 0)
    with closed_folder(tmp_path / "objects"):
        store = KVStore(config(tmp_path))
        serve(store, 0)
        store.close()
    assert count_files(tmp_path) == 1


class ScanGate:
    """Holds listings when they are done, before anybody has them."""

    def __init__(self) -> None:
        self.num_scans = 0
        self.go_on = threading.Event()


def hold_scans(tier: FaultyTier) -> ScanGate:
    gate, real = ScanGate(), tier.scan

    def scan() -> Iterator[StoredObject]:
        found = list(real())
        gate.num_scans += 1
        assert gate.go_on.wait(30)
        yield from found

    tier.scan = scan  # type: ignore[method-assign]
    return gate


def open_faulty(root: Path, plan: FaultPlan, disk_chunks: int = 64) -> tuple[KVStore, FaultyTier]:
    cfg = config(root, disk_chunks=disk_chunks)
    tier = FaultyTier(open_tier(cfg.tiers[0]), plan)
    return KVStore(cfg, tiers=[OpenTier(tier, disk_chunks * CHUNK_BYTES)]), tier
