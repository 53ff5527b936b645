"""An extra that cannot be had is lost for those who want it; all others get their layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.errors import TierError
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import RedisTierConfig, StoreConfig
from kvweave.kv.transfers import Transfer
from kvweave.reasons import Reason
from worlds.extras import CHUNK, EXTRAS, HEADER, KEY, UNREAD, World, damage, on_disk, wait_until
from worlds.kv import CHUNK_BYTES, LAYERS, is_layer_of, make_config, read_extras
from worlds.kv_checks import check_store
from worlds.servers import running_redis

BAD = HEADER.extras["anchors"].offset + 8999


def assert_whole(transfer: Transfer) -> None:
    for layer in range(LAYERS):
        assert is_layer_of(0, layer, transfer.wait_layer(layer)[KEY])
    assert not transfer.lost


def assert_lost(transfer: Transfer, miss: Reason = Reason.CORRUPT) -> None:
    assert read_extras(transfer, "anchors") == {}
    assert transfer.lost == {KEY: miss}
    assert transfer.wait_layer(0) == {}


def assert_gone_and_computed_anew(world: World) -> None:
    """Nobody is sent to the damaged object any more, and a whole one takes its place."""
    store = world.store
    wait_until(lambda: store.num_pinned() == 0)
    wait_until(lambda: store.metrics.value("kv_quarantined_total") == 1)
    assert store.peek([KEY])[0].tier is None
    check_store(store)
    assert store.save(CHUNK, wait_s=5).wait(5)
    assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}
    assert store.metrics.value("kv_misses_total", reason="corrupt") == 1


@pytest.mark.parametrize("host_chunks", [None, 0, 64])
@pytest.mark.parametrize("plain_is_first", [True, False])
def test_a_plain_load_that_shares_an_arrival_with_damaged_extras_gets_its_layers(
    tmp_path: Path, host_chunks: int | None, plain_is_first: bool
) -> None:
    world = on_disk(tmp_path, host_chunks)
    damage(tmp_path, BAD)
    with world.store as store:
        world.below.go_on.clear()  # the front is read for both
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            asked = [(), ("anchors",)] if plain_is_first else [("anchors",), ()]
            transfers = [store.load(lease, extras=asked.pop(0)) for lease in (one, two)]
            plain, wanting = transfers if plain_is_first else transfers[::-1]
            world.below.go_on.set()
            assert_lost(wanting)
            assert_whole(plain)
        assert store.metrics.value("kv_loads_total") == 1
        assert not store.metrics.value("kv_promotions_total"), "half of it is not worth keeping"
        assert_gone_and_computed_anew(world)


@pytest.mark.parametrize("host_chunks", [None, 64])
def test_damaged_extras_that_are_asked_for_behind_the_front_leave_the_layers_alone(
    tmp_path: Path, host_chunks: int | None
) -> None:
    world = on_disk(tmp_path, host_chunks)
    damage(tmp_path, BAD)
    with world.store as store:
        world.below.go_on.clear()
        world.below.hold_from = HEADER.layers[0].offset
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            plain = store.load(one)
            plain.headers()
            wanting = store.load(two, extras=["anchors"])
            assert_lost(wanting)
            assert wanting.has_extras(), "there is nothing to wait for"
            world.below.go_on.set()
            assert_whole(plain)
        assert store.metrics.value("kv_loads_total") == 1
        assert_gone_and_computed_anew(world)


def test_whoever_wants_another_extra_of_a_host_copy_gets_it(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.load()
        damage(tmp_path, BAD)
        world.below.go_on.clear()
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two, store.acquire([KEY]) as last:
            damaged = store.load(one, extras=["anchors"])
            sound = store.load(two, extras=["rest"])
            world.below.go_on.set()
            assert_lost(damaged)
            assert read_extras(sound, "rest") == {KEY: EXTRAS["rest"]}
            assert_whole(sound)
            assert_whole(store.load(last))  # its layers were in memory before
        assert_gone_and_computed_anew(world)


def test_a_damaged_extra_among_others_in_front_costs_only_those_who_want_it(
    tmp_path: Path,
) -> None:
    world = on_disk(tmp_path, 64)
    damage(tmp_path, BAD)
    with world.store as store:
        world.below.go_on.clear()
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            damaged = store.load(one, extras=["anchors", "rest"])
            sound = store.load(two, extras=["rest", "inter"])
            world.below.go_on.set()
            assert_lost(damaged)
            assert read_extras(sound, "rest") == {KEY: EXTRAS["rest"]}
            assert read_extras(sound, "inter") == {KEY: EXTRAS["inter"]}
            assert_whole(sound)
        assert_gone_and_computed_anew(world)


def test_what_says_whose_text_it_is_must_be_whole_for_everybody(tmp_path: Path) -> None:
    world = on_disk(tmp_path, 64)
    damage(tmp_path, HEADER.extras["chunk"].offset)
    with world.store as store, store.acquire([KEY]) as lease:
        transfer = store.load(lease)
        assert transfer.wait_layer(0) == {}
        assert transfer.lost == {KEY: Reason.CORRUPT}


def test_an_extra_that_the_tier_fails_to_read_is_tried_again_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = on_disk(tmp_path, 64)
    with world.store as store:
        world.below.go_on.clear()
        world.below.hold_from = HEADER.layers[0].offset
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            plain = store.load(one)
            plain.headers()
            (reader,) = world.below.readers
            read = reader.read

            def fail(offset: int, out: memoryview) -> None:
                if offset == HEADER.extras["anchors"].offset:
                    raise TierError("a bad sector")
                read(offset, out)

            with monkeypatch.context() as broken:
                broken.setattr(reader, "read", fail)
                assert_lost(store.load(two, extras=["anchors"]), Reason.TIER_FAILED)
            world.below.go_on.set()
            assert_whole(plain)
        assert store.metrics.value("kv_tier_errors_total", tier="disk", verb="read") == 1
        assert world.entry_lacks() == UNREAD, "its layers are as good as any"
        assert world.load("anchors") == {"anchors": EXTRAS["anchors"]}


@contextmanager
def on_redis(root: Path, *, over_disk: bool = False) -> Iterator[World]:
    """A remote tier that holds a damaged chunk."""
    with running_redis(root) as port:
        cfg = StoreConfig((RedisTierConfig(f"redis://127.0.0.1:{port}/0"),), policy="lru")
        world = World(cfg, None)
        world.store.close()
        world.below.inner = open_tier(cfg.tiers[0])
        raw = bytearray(CHUNK.view)
        raw[BAD] ^= 1
        world.below.inner.write(KEY, [raw])
        local = make_config(root / "kv", host_chunks=64).tiers if over_disk else ()
        sizes = (64 * CHUNK_BYTES, 1 << 30)
        opened = [OpenTier(open_tier(t), n) for t, n in zip(local, sizes, strict=False)]
        remote = OpenTier(world.below, None)  # type: ignore[arg-type]
        world.store = KVStore(cfg, tiers=[*opened, remote])
        with world.store:
            yield world


def test_a_server_is_rid_of_a_damaged_object_when_its_layers_were_read(tmp_path: Path) -> None:
    with on_redis(tmp_path) as world:
        store = world.store
        world.below.go_on.clear()
        world.below.hold_from = HEADER.layers[0].offset
        with store.acquire([KEY]) as one, store.acquire([KEY]) as two:
            plain = store.load(one)
            wanting = store.load(two, extras=["anchors"])
            assert_lost(wanting)
            assert world.below.inner.size(KEY), "somebody reads it"
            world.below.go_on.set()
            assert_whole(plain)
        wait_until(lambda: store.metrics.value("kv_quarantined_total") == 1)
        assert world.below.inner.size(KEY) is None


def test_a_server_is_rid_of_a_damaged_object_when_nobody_reads_on(tmp_path: Path) -> None:
    with on_redis(tmp_path) as world:
        store = world.store
        world.below.go_on.clear()
        world.below.hold_from = HEADER.layers[0].offset
        with store.acquire([KEY]) as lease:
            assert_lost(store.load(lease, extras=["anchors"]))
            assert not store.metrics.value("kv_quarantined_total")
        world.below.go_on.set()
        wait_until(lambda: store.metrics.value("kv_quarantined_total") == 1)
        assert world.below.inner.size(KEY) is None


def test_an_extra_that_nobody_asked_for_costs_nobody_anything(tmp_path: Path) -> None:
    with on_redis(tmp_path, over_disk=True) as world:  # read whole: a disk may get it one day
        with world.store.acquire([KEY]) as lease:
            assert_whole(world.store.load(lease))
        wait_until(lambda: world.store.metrics.value("kv_quarantined_total") == 1)
        assert world.store.peek([KEY])[0].tier is None
