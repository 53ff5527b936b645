"""Flip any byte of a stored file: its chunk is refused, counted and put aside; never served."""

import random
import struct
import time
from pathlib import Path

import pytest

from kvweave.errors import TierCorrupt
from kvweave.kv.format.header import header_checksum
from kvweave.kv.format.objects import verify_object
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk import DiskTier
from kvweave.reasons import Reason
from worlds.kv import LAYERS, is_layer_of, make_chunk, make_config, make_key
from worlds.kv_checks import check_store

CHUNK = make_chunk(7, extras={"anchors": b"12345"})


def sampled_offsets() -> list[int]:
    """Some bytes of every region: each header field, padding, extras, each layer."""
    rng = random.Random(0)
    header = CHUNK.header
    fixed = list(range(0, 152, 8))
    tables = [rng.randrange(152, 400) for _ in range(8)]
    padding = [rng.randrange(400, header.header_bytes - 8), header.header_bytes - 1]
    sections = [*header.extras.values(), *header.layers]
    inside = [rng.randrange(s.offset, s.offset + s.size_bytes) for s in sections for _ in range(3)]
    behind = [header.padded_end(s) - 1 for s in sections]
    return [*fixed, *tables, *padding, *inside, *behind]


def serve(store: KVStore) -> tuple[int, dict[bytes, Reason]]:
    """Load the chunk as a request would; returns how many layers came, and what was lost."""
    with store.acquire([CHUNK.key]) as lease:
        transfer = store.load(lease, extras=["anchors"])
        came = 0
        for layer in range(LAYERS):
            for encoded in transfer.wait_layer(layer).values():
                assert is_layer_of(7, layer, encoded), "a damaged layer was served"
                came += 1
        return came, {**transfer.lost, **lease.missing}


def wait_for_quarantine(store: KVStore) -> None:
    """The request goes on before the file is moved."""
    give_up_s = time.monotonic() + 5
    while not store.metrics.value("kv_quarantined_total", tier="disk"):
        assert time.monotonic() < give_up_s, "not quarantined"
        time.sleep(0.001)


def flip_and_serve(root: Path, offset: int, bit: int) -> None:
    with KVStore(make_config(root, host_chunks=None)) as store:
        assert store.save(CHUNK).wait(5)
        (path,) = (root / "objects").rglob("*.kv")
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 1 << bit
        path.write_bytes(raw)

        came, lost = serve(store)
        assert came < LAYERS
        assert lost == {CHUNK.key: Reason.CORRUPT}, f"byte {offset}"
        assert store.metrics.value("kv_misses_total", reason="corrupt") == 1
        wait_for_quarantine(store)
        assert store.peek([CHUNK.key])[0].residency is Residency.ABSENT

        assert store.save(CHUNK).wait(5)  # the request recomputes it and saves it again
        assert serve(store) == (LAYERS, {})
        check_store(store)


def test_a_flipped_byte_in_any_region_is_refused_counted_and_quarantined(tmp_path: Path) -> None:
    for number, offset in enumerate(sampled_offsets()):
        flip_and_serve(tmp_path / str(number), offset, bit=number % 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_single_byte_is_guarded(tmp_path: Path) -> None:
    disk = DiskTier(make_config(tmp_path).tiers[1])  # type: ignore[arg-type]
    disk.write(CHUNK.key, [CHUNK.view])
    (path,) = (tmp_path / "objects").rglob("*.kv")
    raw = bytearray(CHUNK.view)
    for offset in range(len(raw)):
        raw[offset] ^= 1 << (offset % 8)
        path.write_bytes(raw)
        reader = disk.open(CHUNK.key)
        assert reader is not None
        with pytest.raises(TierCorrupt):
            verify_object(reader, CHUNK.key)
        reader.close()
        raw[offset] ^= 1 << (offset % 8)


@pytest.mark.parametrize("keep_bytes", [0, 10, 4095, 4096, 5000, CHUNK.header.total_bytes - 1])
def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    with KVStore(make_config(tmp_path, host_chunks=None)) as store:
        assert store.save(CHUNK).wait(5)
        (path,) = (tmp_path / "objects").rglob("*.kv")
        path.write_bytes(bytes(CHUNK.view[:keep_bytes]))
        came, lost = serve(store)
        assert (came, lost) == (0, {CHUNK.key: Reason.CORRUPT})


def test_an_object_of_another_version_is_a_miss_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvweave.kv.format.header.LAYOUT_VERSION", 2)
    newer = make_chunk(7)
    monkeypatch.undo()
    tier = DiskTier(make_config(tmp_path).tiers[1])  # type: ignore[arg-type]
    tier.write(CHUNK.key, [newer.view])
    with KVStore(make_config(tmp_path, host_chunks=None)) as store:
        assert serve(store) == (0, {CHUNK.key: Reason.FOREIGN})
        assert tier.size(CHUNK.key) is not None
    assert "encode the chunks again" in caplog.text


def test_chunks_of_another_model_are_an_ordinary_miss(tmp_path: Path) -> None:
    from worlds.kv import make_context, make_key

    with KVStore(make_config(tmp_path)) as store:
        assert store.save(make_chunk(0)).wait(5)
        other = make_key(0, make_context(model="weights-2"))
        with store.acquire([other]) as lease:
            assert lease.missing == {other: Reason.ABSENT}


def test_a_forged_header_is_a_miss_and_never_a_hang(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, host_chunks=None)
    tier = DiskTier(cfg.tiers[0])  # type: ignore[arg-type]
    forged = (("<I", 56, 0), ("<I", 56, 2**31), ("<I", 72, 0), ("<I", 60, 5000), ("<Q", 136, 2**40))
    for number, (form, at, value) in enumerate(forged):
        raw = bytearray(make_chunk(number).view)
        struct.pack_into(form, raw, at, value)
        raw[4088:4096] = header_checksum(raw[:4088])
        tier.write(make_key(number), [raw])
    keys = [make_key(number) for number in range(len(forged))]
    with KVStore(cfg) as store, store.acquire(keys) as lease:
        transfer = store.load(lease)
        assert transfer.wait_layer(0) == {}
        assert set({**lease.missing, **transfer.lost}.values()) == {Reason.CORRUPT}
