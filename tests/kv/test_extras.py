"""What lies beside the layers is read by loads that want it, and by no others."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvweave.kv.format.header import ALIGN
from kvweave.kv.provenance import carries
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import RedisTierConfig, StoreConfig
from kvweave.reasons import Reason
from worlds.extras import (
    CHUNK,
    EXTRAS,
    HEADER,
    KEY,
    PLAIN_BYTES,
    UNREAD,
    World,
    damage,
    on_disk,
    wait_for,
    wait_until,
)
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import (
    CHUNK_BYTES,
    LAYERS,
    is_layer_of,
    make_chunk,
    make_config,
    make_key,
    read_extras,
)
from worlds.kv_checks import check_store
from worlds.servers import running_redis


@pytest.mark.parametrize("host_chunks", [None, 0, 16])
def test_a_load_that_wants_no_extras_reads_header_id_and_layers_alone(
    tmp_path: Path, host_chunks: int | None
) -> None:
    world = on_disk(tmp_path, host_chunks)
    with world.store as store:
        world.load()
        assert world.below.num_bytes == PLAIN_BYTES == HEADER.bytes_with({"chunk"})
        assert store.metrics.value("kv_bytes_loaded_total", tier="disk") == PLAIN_BYTES
        check_store(store)


def test_a_load_reads_the_extras_it_names_and_no_others(tmp_path: Path) -> None:
    world = on_disk(tmp_path)
    with world.store:
        assert world.load("rest") == {"rest": EXTRAS["rest"]}
        assert world.below.num_bytes <= HEADER.bytes_with(["rest"]) + 3 * ALIGN  # small ones along
        assert world.load("anchors", "nobody has") == {
            "anchors": EXTRAS["anchors"],
            "nobody has": b"",
        }
        assert world.below.num_bytes < HEADER.bytes_with(["anchors"]) + ALIGN + 1
        assert world.load(*EXTRAS) == EXTRAS
        assert world.below.num_bytes == HEADER.total_bytes


def test_a_remote_tier_moves_no_extras_that_nobody_wants(tmp_path: Path) -> None:
    with running_redis(tmp_path) as port:
        cfg = StoreConfig((RedisTierConfig(f"redis://127.0.0.1:{port}/0"),))
        world = World(cfg, None)
        with world.store:
            world.load()
            assert world.below.num_bytes == PLAIN_BYTES
            assert world.load("rest") == {"rest": EXTRAS["rest"]}


def test_extras_that_the_host_copy_lacks_are_brought_alone_and_stay(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        assert world.entry_lacks() == UNREAD
        assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}
        assert world.below.num_bytes == 3 * ALIGN  # 9,000 bytes in pages
        assert world.entry_lacks() == UNREAD - {"anchors"}
        assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}
        assert not world.below.reads
        assert world.load(*EXTRAS) == EXTRAS
        assert not world.entry_lacks()
        check_store(store)
        wait_until(lambda: store.num_pinned() == 0)


def test_a_load_that_joins_an_arrival_gets_its_extras_too(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.below.go_on.clear()
        world.below.hold_from = HEADER.layers[0].offset
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            first = store.load(one)
            first.headers()  # the front was read, without extras
            joined = store.load(two, extras=["anchors"])
            assert read_extras(joined, "anchors") == {KEY: EXTRAS["anchors"]}, "before any layer"
            world.below.go_on.set()
            assert all(KEY in joined.wait_layer(layer) for layer in range(LAYERS))
            assert all(KEY in first.wait_layer(layer) for layer in range(LAYERS))
        assert store.metrics.value("kv_loads_total") == 1
        assert world.entry_lacks() == UNREAD - {"anchors"}
        assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}
        assert not world.below.reads
        check_store(store)


def test_two_that_want_what_is_lacking_share_one_read_of_it(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        world.below.reads.clear()
        world.below.go_on.clear()
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            transfers = [store.load(lease, extras=["anchors"]) for lease in (one, two)]
            assert not any(transfer.has_extras() for transfer in transfers)
            assert store.pending_bytes() == {"disk": 9000}
            world.below.go_on.set()
            for transfer in transfers:
                assert read_extras(transfer, "anchors") == {KEY: EXTRAS["anchors"]}
                assert transfer.has_extras()
        assert len(world.below.reads) == 1
        check_store(store)
        wait_until(lambda: store.num_pinned() == 0)


@pytest.mark.parametrize("host_chunks", [None, 64])
def test_damaged_extras_do_no_harm_to_loads_that_do_not_want_them(
    tmp_path: Path, host_chunks: int | None
) -> None:
    world = on_disk(tmp_path, host_chunks)
    damage(tmp_path, HEADER.extras["anchors"].offset + 8999)
    with world.store as store:
        assert world.load("inter") == {"inter": EXTRAS["inter"]}
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease, extras=["anchors"])
            assert read_extras(transfer, "anchors") == {}
            assert transfer.lost == {KEY: Reason.CORRUPT}
        wait_for(store, "kv_quarantined_total")
        assert store.peek([KEY])[0].tier is None, "nobody is sent to it any more"
        assert store.save(CHUNK, wait_s=5).wait(5)
        assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}


def test_a_layer_is_checked_whatever_extras_are_read(tmp_path: Path) -> None:
    world = on_disk(tmp_path)
    damage(tmp_path, HEADER.layers[1].offset)
    with world.store as store, store.acquire([KEY]) as lease:
        transfer = store.load(lease)
        assert transfer.wait_layer(1) == {}
        assert transfer.lost == {KEY: Reason.CORRUPT}


def test_a_host_copy_whose_extras_are_gone_below_makes_way_for_a_whole_one(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        (path,) = (tmp_path / "objects").rglob("*.kv")
        path.unlink()
        world.load()  # its layers are served all the same
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease, extras=["anchors"])
            assert read_extras(transfer, "anchors") == {}
            assert transfer.lost == {KEY: Reason.ABSENT}
        assert store.peek([KEY])[0].tier is None
        assert store.save(CHUNK, wait_s=5).wait(5)
        assert not world.entry_lacks()
        assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}
        check_store(store)


def test_a_copy_that_lacks_extras_says_whose_text_it_is_when_its_file_is_gone(
    tmp_path: Path,
) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        assert world.entry_lacks() == UNREAD
        (path,) = (tmp_path / "objects").rglob("*.kv")
        path.unlink()
        assert store.keys_at_hand(carries(["another"])) == []
        assert store.keys_at_hand(carries(["id"])) == [KEY]
        assert store.delete([KEY]) == 1
        assert store.used_bytes()["host"] == 0
        check_store(store)


def test_a_load_under_way_brings_back_nothing_that_is_deleted_by_whose_text_it_is(
    tmp_path: Path,
) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.below.go_on.clear()
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease)
            (path,) = (tmp_path / "objects").rglob("*.kv")
            wait_until(lambda: bool(world.below.readers))
            path.unlink()  # by the process that removed the document
            assert store.forget(["id"]) == 0, "nothing is in host memory yet"
            world.below.go_on.set()
            for layer in range(LAYERS):
                assert is_layer_of(0, layer, transfer.wait_layer(layer)[KEY])
        wait_until(lambda: store.used_bytes()["host"] == 0)
        assert not store.metrics.value("kv_promotions_total")
        wait_until(lambda: store.num_pinned() == 0)


def test_extras_that_come_while_the_store_is_closed_are_no_bug(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    store = world.store
    world.load()
    world.below.go_on.clear()
    with store.acquire([KEY]) as lease:
        store.load(lease, extras=list(EXTRAS))
        with ThreadPoolExecutor(1) as other:
            closing = other.submit(store.close)
            wait_until(lambda: not list(store.inventory.slots[0].tier.scan()))  # the host tier is
            world.below.go_on.set()
            closing.result(timeout=10)
    assert not store.metrics.value("kv_tier_errors_total", verb="bug")


def test_saving_a_chunk_completes_the_copy_that_lacks_extras(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        store.save(CHUNK, wait_s=5).wait(5)
        assert not world.entry_lacks()
        assert world.load(*EXTRAS) == EXTRAS
        assert not world.below.reads


def test_a_host_copy_and_extras_of_another_making_are_not_mixed(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        (path,) = (tmp_path / "objects").rglob("*.kv")
        other = make_chunk(0, extras={**EXTRAS, "anchors": b"b" * 9000})
        path.write_bytes(other.view)
        store.save(other, wait_s=5)
        assert world.entry_lacks(), "not of these layers, for all it knows"
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease, extras=["anchors"])
            assert read_extras(transfer, "anchors") == {}
            assert transfer.lost == {KEY: Reason.CORRUPT}
        wait_for(store, "kv_quarantine_spared_total")
        assert world.load("anchors") == {"anchors": b"b" * 9000}


def test_half_an_object_is_never_written_down(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 10)  # room for one chunk with such extras
    with world.store as store:
        world.load()
        assert world.entry_lacks() == UNREAD
        store.remover.delete_from(store.inventory.below[0], KEY)  # the disk evicted it
        store.save(make_chunk(1, extras=EXTRAS), wait_s=5).wait(5)
        assert store.flush()
        assert store.metrics.value("kv_evictions_total", tier="host") == 1
        assert store.metrics.value("kv_saves_dropped_total", reason="in part") == 1
        assert store.peek([KEY])[0].tier is None
        check_store(store)


def test_what_only_a_remote_has_is_read_whole_if_a_disk_may_get_it(tmp_path: Path) -> None:
    with running_redis(tmp_path) as port:
        cfg = StoreConfig((RedisTierConfig(f"redis://127.0.0.1:{port}/0"),), policy="lru")
        world = World(cfg, None)
        local = make_config(tmp_path / "kv", host_chunks=10)
        sizes = (10 * CHUNK_BYTES, 1 << 30)
        tiers = zip(local.tiers, sizes, strict=True)
        opened = [OpenTier(open_tier(tier), size) for tier, size in tiers]
        remote = OpenTier(world.below, None)  # type: ignore[arg-type]
        world.store.close()
        world.below.inner = open_tier(cfg.tiers[0])
        world.store = KVStore(cfg, tiers=[*opened, remote])
        with world.store as store:
            world.load()
            assert not world.entry_lacks()
            store.save(make_chunk(1, extras=EXTRAS), wait_s=5).wait(5)  # pushes it down
            assert store.flush()
            assert store.peek([KEY])[0].tier == "disk"
            assert world.load(*EXTRAS) == EXTRAS


def test_a_resting_tier_is_not_asked_for_extras(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, host_chunks=64)
    world = World(cfg, OpenTier(open_tier(cfg.tiers[0]), 64 * CHUNK_BYTES))
    with world.store as store:
        world.load()
        world.below.inner = FaultyTier(world.below.inner, FaultPlan(fail=1.0))
        store.inventory.below[0].reads.record_failure("a test", at_once=True)
        with store.acquire([KEY]) as lease:
            transfer = store.load(lease, extras=["anchors"])
            assert transfer.lost == {KEY: Reason.TIER_FAILED}
            assert read_extras(transfer, "anchors") == {}
        world.load()


def test_many_that_want_different_extras_at_once_get_their_own(tmp_path: Path) -> None:
    chunks = [make_chunk(n, extras={"a": bytes([n]) * 9000, "b": bytes([n]) * 5}) for n in range(6)]
    size = chunks[0].header.total_bytes
    cfg = make_config(tmp_path, host_chunks=2 * size // CHUNK_BYTES + 1, io_threads=4)
    with KVStore(cfg) as store:
        for chunk in chunks:
            assert store.save(chunk, wait_s=5).wait(5)

        def ask(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                numbers = rng.sample(range(6), 2)
                names = rng.choice([(), ("a",), ("b",), ("a", "b")])
                with store.acquire([make_key(n) for n in numbers]) as lease:
                    transfer = store.load(lease, extras=names)
                    if rng.random() < 0.2:
                        continue  # gone before anything came
                    found = {name: read_extras(transfer, name) for name in names}
                    for n in numbers:
                        for name, length in (("a", 9000), ("b", 5)):
                            if name in names:
                                assert found[name][make_key(n)] == bytes([n]) * length
                        for layer in range(LAYERS):
                            assert is_layer_of(n, layer, transfer.wait_layer(layer)[make_key(n)])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        wait_until(lambda: store.num_pinned() == 0)
        assert not store.metrics.value("kv_misses_total")
        check_store(store)
