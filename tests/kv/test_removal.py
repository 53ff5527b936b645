"""What another process deleted does not come back through what was under way here."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvweave.kv.format.header import Buffer
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.provenance import CHUNK as WHOSE
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk import DiskTier
from worlds.extras import CHUNK, KEY, on_disk, wait_until
from worlds.kv import make_chunk, make_config, make_key
from worlds.kv_checks import check_store


def files(root: Path) -> list[Path]:
    return list((root / "objects").rglob("*.kv"))


def in_host(store: KVStore) -> bool:
    wait_until(lambda: store.num_pinned() == 0)
    return bool(list(store.inventory.slots[0].tier.scan()))


def test_a_load_that_begins_behind_a_deletion_elsewhere_leaves_no_copy(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        store.forget(["another"])
        world.load()
        assert in_host(store)
        store.forget(["id"])
        assert not in_host(store)
    assert not files(tmp_path), "a copy that was here takes its file along"


def test_bytes_that_are_still_there_serve_requests_and_are_not_kept(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        store.forget(["id"])  # whoever deleted it has not come to the file yet
        assert world.load("anchors") == {"anchors": b"a" * 9000}
        assert not in_host(store)
        assert not store.metrics.value("kv_promotions_total")
        check_store(store)


def test_what_was_computed_behind_a_deleted_chunk_is_not_kept_either(tmp_path: Path) -> None:
    with KVStore(make_config(tmp_path, host_chunks=None)) as store:
        saved = make_chunk(0, extras={WHOSE: b"mine", "behind": b"one\ntwo"})
        assert store.save(saved, wait_s=5).wait(5)
    with KVStore(make_config(tmp_path, host_chunks=16)) as store:
        store.forget(["two"])
        with store.acquire([make_key(0)]) as lease:
            transfer = store.load(lease)
            assert make_key(0) in transfer.wait_layer(0)
            assert transfer.wait_layer(2)
        assert not in_host(store)


def test_what_was_saved_since_is_kept_as_ever(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        store.forget(["id"])
        assert store.save(CHUNK, wait_s=5).wait(5)  # its file was still there, and is its own now
        assert in_host(store)
        store.remover.delete_from(store.inventory.slots[0], KEY)  # evicted
        world.load()
        assert in_host(store)


def test_a_chunk_that_somebody_brought_back_is_kept_again(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    alive: set[str] = set()
    with world.store as store:
        store.know_by(alive.intersection)
        store.forget(["id"])
        world.load()
        assert not in_host(store)
        alive.add("id")
        world.load()
        assert in_host(store)
        store.forget(["id"])
        assert not in_host(store)


def test_a_file_that_this_process_wrote_behind_the_deletion_goes(tmp_path: Path) -> None:
    with KVStore(make_config(tmp_path, host_chunks=0)) as store:  # no copy in memory tells of it
        for number, name in enumerate([b"id", b"another"]):
            packed = make_chunk(number, extras={WHOSE: name})
            assert store.save(packed, wait_s=5).wait(5)
        assert store.forget(["id"]) == 1
        assert [path.stem for path in files(tmp_path)] == [make_key(1).hex()]
        check_store(store)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes to the disk wait for it."""
    go_on, write = threading.Event(), DiskTier.write

    def slow(self: DiskTier, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        assert go_on.wait(10)
        return write(self, key, parts)

    monkeypatch.setattr(DiskTier, "write", slow)
    monkeypatch.setattr(DiskTier, "writes_at_once", 1)
    return go_on


def test_a_write_that_waits_for_its_turn_is_dropped(tmp_path: Path, held: threading.Event) -> None:
    with KVStore(make_config(tmp_path, host_chunks=0)) as store:
        for number, name in enumerate([b"another", b"id"]):  # one is being written, one waits
            store.save(make_chunk(number, extras={WHOSE: name}), wait_s=5)
        store.forget(["id"])
        held.set()
        assert store.flush()
        assert [path.stem for path in files(tmp_path)] == [make_key(0).hex()]
        check_store(store)


def test_a_write_under_way_is_deleted_when_it_ends(tmp_path: Path, held: threading.Event) -> None:
    with KVStore(make_config(tmp_path, host_chunks=0)) as store:
        store.save(make_chunk(0, extras={WHOSE: b"id"}), wait_s=5)
        forgetting = threading.Thread(target=store.forget, args=(["id"],))
        forgetting.start()
        held.set()
        forgetting.join(10)
        assert store.flush()
        assert not files(tmp_path)
        check_store(store)


def test_a_victim_on_its_way_down_is_not_written_behind_a_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVStore(make_config(tmp_path, host_chunks=4)) as store:
        first = make_chunk(0, extras={WHOSE: b"id"})
        assert store.save(first, wait_s=5).wait(5)
        # the disk evicted it: memory alone has it
        store.remover.delete_from(store.inventory.below[0], first.key)
        copy = PackedChunk.from_bytes
        copied: list[ChunkKey] = []

        def interrupted(key: ChunkKey, data: memoryview) -> PackedChunk:
            copied.append(key)
            if key == first.key:
                store.forget(["id"])  # off the books, and with no writer yet
            return copy(key, data)

        monkeypatch.setattr(PackedChunk, "from_bytes", interrupted)
        for number in range(1, 5):
            store.save(make_chunk(number, extras={WHOSE: b"another"}), wait_s=5).wait(5)
        assert store.flush()
        assert store.metrics.value("kv_evictions_total", tier="host") > 0
        assert first.key in copied
        assert first.key.hex() not in [path.stem for path in files(tmp_path)]


def test_where_nobody_knows_what_went_only_chunks_that_exist_are_kept(tmp_path: Path) -> None:
    alive = {"alive", "also"}
    whose = [{WHOSE: b"alive"}, {WHOSE: b"gone"}, {WHOSE: b"also", "behind": b"gone"}]
    chunks = [make_chunk(number, extras=extras) for number, extras in enumerate(whose)]
    with KVStore(make_config(tmp_path, host_chunks=None)) as store:
        for chunk in chunks:
            assert store.save(chunk, wait_s=5).wait(5)
    with KVStore(make_config(tmp_path, host_chunks=64)) as store:
        store.know_by(alive.intersection)

        def load() -> list[int]:
            """Which of them are in host memory when all were read."""
            with store.acquire([chunk.key for chunk in chunks]) as lease:
                transfer = store.load(lease)
                assert all(len(transfer.wait_layer(layer)) == 3 for layer in range(3))
            wait_until(lambda: store.num_pinned() == 0)
            kept = {each.key for each in store.inventory.slots[0].tier.scan()}
            return [number for number in range(3) if make_key(number) in kept]

        store.forget(None)
        assert load() == [0]
        alive.add("gone")
        assert load() == [0, 1, 2]
        alive.remove("gone")
        assert store.forget(None) == 2
        assert [path.stem for path in files(tmp_path)] == [make_key(0).hex()]
        check_store(store)
