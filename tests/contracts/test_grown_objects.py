"""Somebody else who can write to a shared tier makes an object longer: it is not used any more."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.format.header import HEAD_BYTES, Section, seal_header
from kvweave.kv.format.memory import new_memory
from kvweave.kv.format.objects import PackedChunk, read_header, verify_object
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import Tier
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
from kvweave.kv.tiers.disk import DiskTier
from kvweave.kv.tiers.host import HostTier
from kvweave.kv.tiers.redis import RedisTier
from kvweave.reasons import Reason
from worlds.extras import CHUNK as WITH_EXTRAS
from worlds.extras import UNREAD, wait_until
from worlds.kv import LAYERS, is_layer_of, make_chunk

JUNK = b"x" * (50 << 20)
CHUNK = make_chunk(num_tokens=256)  # more of it than comes along when a tier opens it
in_every_shared_tier = pytest.mark.parametrize(
    "make_tier", ["disk", "disk direct", "redis", "s3"], indirect=True
)


def append(tier: Tier, chunk: PackedChunk, junk: bytes = JUNK) -> None:
    """Do what another machine with rights to write could do, in place where the tier has that."""
    if isinstance(tier, DiskTier):
        with tier._path(chunk.key).open("ab") as file:
            file.write(junk)
    elif isinstance(tier, RedisTier):
        tier._client.append(tier._name(chunk.key), junk)
    else:
        tier.write(chunk.key, [chunk.view, junk])


def open_store(*tiers: Tier) -> KVStore:
    return KVStore(
        StoreConfig(), tiers=[OpenTier(tier, None if tier.remote else 1 << 30) for tier in tiers]
    )


def load(store: KVStore, chunk: PackedChunk, *extras: str) -> dict[bytes, Reason]:
    """Load a chunk as a request would; what is missing or lost. What comes is right."""
    with store.acquire([chunk.key]) as lease:
        transfer = store.load(lease, extras=extras)
        for name in extras:
            transfer.extras(name)
        for layer in range(LAYERS):
            for encoded in transfer.wait_layer(layer).values():
                assert is_layer_of(0, layer, encoded)
        return {**lease.missing, **transfer.lost}


@in_every_shared_tier
def test_an_object_with_bytes_appended_is_a_miss_and_goes(make_tier: Callable[[], Tier]) -> None:
    with open_store(make_tier()) as store:
        assert store.save(CHUNK, wait_s=30).wait(30)
        assert load(store, CHUNK) == {}
        append(make_tier(), CHUNK)
        assert load(store, CHUNK) == {CHUNK.key: Reason.CORRUPT}
        wait_until(lambda: store.metrics.value("kv_quarantined_total") == 1)
        assert make_tier().size(CHUNK.key) is None


@in_every_shared_tier
def test_an_object_that_grows_while_it_is_read_is_refused(make_tier: Callable[[], Tier]) -> None:
    tier = make_tier()
    tier.write(CHUNK.key, [CHUNK.view])
    reader = tier.open(CHUNK.key)
    assert reader is not None
    assert read_header(reader, CHUNK.key) == CHUNK.header
    append(tier, CHUNK)
    start = 1 << 16  # behind what came along
    end = CHUNK.header.total_bytes
    assert HEAD_BYTES < start < end
    with pytest.raises(TierError):
        reader.read(start, new_memory(end - start, pinned=False).view)
    reader.close()


@in_every_shared_tier
def test_extras_of_an_object_that_grew_are_not_used(
    make_tier: Callable[[], Tier],
) -> None:
    """The layers lie in host memory from an earlier load, so that no header is read again."""
    tier = make_tier()
    tier.write(WITH_EXTRAS.key, [WITH_EXTRAS.view])
    host = HostTier(HostTierConfig(capacity_bytes=64 << 20, pinned=False))
    with open_store(host, tier) as store:
        assert load(store, WITH_EXTRAS) == {}
        append(tier, WITH_EXTRAS)
        assert load(store, WITH_EXTRAS, *UNREAD) == {WITH_EXTRAS.key: Reason.CORRUPT}


def forge(chunk: PackedChunk, size_bytes: int) -> bytes:
    """The object as a stranger would lengthen it, with a header that says so: one extra more."""
    header = chunk.header
    assert size_bytes % header.align == 0
    first = header.layers[0].offset
    moved = replace(
        header,
        extras={**header.extras, "junk": Section(first, size_bytes, 0)},
        layers=tuple(each._replace(offset=each.offset + size_bytes) for each in header.layers),
        total_bytes=header.total_bytes + size_bytes,
    )
    raw = bytearray(chunk.view[:first]) + b"x" * size_bytes + chunk.view[first:]
    _, front = seal_header(moved, memoryview(raw))
    raw[: len(front)] = front
    return bytes(raw)


@in_every_shared_tier
def test_an_object_forged_to_be_longer_is_refused(make_tier: Callable[[], Tier]) -> None:
    tier = make_tier()
    with open_store(tier) as store:
        tier.write(CHUNK.key, [forge(CHUNK, 4096)])  # a header of another kvweave may name more
        assert load(store, CHUNK) == {}
        tier.write(CHUNK.key, [forge(CHUNK, 50 << 20)])
        assert load(store, CHUNK) == {CHUNK.key: Reason.CORRUPT}


def test_an_object_that_claims_to_be_huge_takes_no_memory_when_it_is_checked() -> None:
    class Huge:
        size_bytes = 1 << 60  # a file with a hole has any length

        def read(self, offset: int, out: memoryview) -> None:
            out[:] = CHUNK.view[offset : offset + len(out)]

        def close(self) -> None: ...

    with pytest.raises(TierCorrupt, match="its header says"):
        verify_object(Huge(), CHUNK.key)
