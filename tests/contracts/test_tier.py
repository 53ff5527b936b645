"""The Tier contract, promise by promise, over every tier we ship. A new one is a new line in
`conftest.TIERS`."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.format.keys import ChunkKey, tag_of
from kvweave.kv.format.memory import new_memory
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.tiers import Reader, Tier
from worlds.kv import make_chunk, make_context, make_key


class _Vanished(Exception):
    """The object was deleted or replaced while it was read: an allowed answer."""


def read_all(reader: Reader) -> bytes:
    out = new_memory(reader.size_bytes, pinned=False).view
    reader.read(0, out)
    return bytes(out)


def read_key(tier: Tier, key: ChunkKey) -> bytes | None:
    reader = tier.open(key)
    if reader is None:
        return None
    try:
        return read_all(reader)
    finally:
        reader.close()


def test_what_was_written_is_read_back(tier: Tier) -> None:
    chunk = make_chunk(1)
    assert tier.write(chunk.key, [chunk.view]) is True
    assert tier.size(chunk.key) == len(chunk.view)
    assert read_key(tier, chunk.key) == bytes(chunk.view)


def test_what_was_not_written_is_an_ordinary_no(tier: Tier) -> None:
    assert tier.size(make_key()) is None
    assert tier.open(make_key()) is None
    assert tier.delete(make_key()) is False
    assert tier.quarantine(make_key()) is False
    assert list(tier.scan()) == []


def test_parts_are_joined_in_order(tier: Tier) -> None:
    chunk = make_chunk()
    parts = [chunk.view[:4096], bytes(chunk.view[4096:8192]), chunk.view[8192:]]
    tier.write(chunk.key, parts)
    assert read_key(tier, chunk.key) == bytes(chunk.view)


def test_ranges_are_read_exactly(tier: Tier) -> None:
    chunk = make_chunk(num_tokens=700)  # layers beyond any prefetched prelude
    tier.write(chunk.key, [chunk.view])
    reader = tier.open(chunk.key)
    assert reader is not None
    for section in chunk.header.layers:
        end = chunk.header.padded_end(section)
        out = new_memory(end - section.offset, pinned=False).view
        reader.read(section.offset, out)
        assert out == chunk.view[section.offset : end]
    reader.close()
    reader.close()


def test_reading_past_the_end_is_refused(tier: Tier) -> None:
    chunk = make_chunk()
    tier.write(chunk.key, [chunk.view])
    reader = tier.open(chunk.key)
    assert reader is not None
    with pytest.raises(TierCorrupt):
        reader.read(len(chunk.view) - 4096, new_memory(8192, pinned=False).view)
    reader.close()


def test_writing_twice_is_harmless(tier: Tier) -> None:
    chunk = make_chunk()
    assert tier.write(chunk.key, [chunk.view])
    assert tier.write(chunk.key, [chunk.view])
    assert read_key(tier, chunk.key) == bytes(chunk.view)
    assert len(list(tier.scan())) == 1


def test_a_tier_keeps_no_reference_to_the_callers_buffer(tier: Tier) -> None:
    chunk = make_chunk()
    buffer = bytearray(chunk.view)
    tier.write(chunk.key, [buffer])
    buffer[:] = bytes(len(buffer))
    assert read_key(tier, chunk.key) == bytes(chunk.view)


def test_a_deleted_object_is_gone_and_deleting_again_is_false(tier: Tier) -> None:
    chunk = make_chunk()
    tier.write(chunk.key, [chunk.view])
    assert tier.delete(chunk.key) is True
    assert tier.delete(chunk.key) is False
    assert tier.size(chunk.key) is None


def test_an_open_reader_of_a_deleted_object_gives_its_bytes_or_an_error(tier: Tier) -> None:
    chunk = make_chunk(1, num_tokens=700)
    tier.write(chunk.key, [chunk.view])
    reader = tier.open(chunk.key)
    assert reader is not None
    tier.delete(chunk.key)
    for number in range(2, 5):  # what could take its place
        other = make_chunk(number, num_tokens=700)
        tier.write(other.key, [other.view])
    with suppress(TierError):  # the other allowed answer
        assert read_all(reader) == bytes(chunk.view)
    reader.close()


def test_a_quarantined_object_is_out_of_sight(tier: Tier) -> None:
    chunk = make_chunk()
    tier.write(chunk.key, [chunk.view])
    assert tier.quarantine(chunk.key) is True
    assert tier.open(chunk.key) is None
    assert list(tier.scan()) == []
    assert tier.write(chunk.key, [chunk.view]) is True  # and can be written afresh


def test_scan_lists_every_object_with_its_size(tier: Tier) -> None:
    other_model = make_context(model="weights-2")
    chunks = [make_chunk(i) for i in range(5)]
    for chunk in chunks:
        tier.write(chunk.key, [chunk.view])
    tier.write(make_key(0, other_model), [b"x" * 4096])
    found = {o.key: o.size_bytes for o in tier.scan()}
    assert found == {
        **{c.key: len(c.view) for c in chunks},
        make_key(0, other_model): 4096,
    }


def test_all_objects_of_a_chunk_are_found_by_name_whoever_wrote_them(tier: Tier) -> None:
    other_model = make_context(model="weights-2")
    for number in range(4):
        tier.write(make_key(number), [make_chunk(number).view])
        tier.write(make_key(number, other_model), [b"x" * 4096])
    wanted = [tag_of(make_key(number)) for number in (1, 3, 9)]
    found = tier.tagged_keys(wanted)
    assert len(found) == len(set(found))
    assert set(found) == {
        make_key(number, context) for number in (1, 3) for context in (None, other_model)
    }
    assert tier.tagged_keys([]) == []


def test_a_tier_that_can_be_used_says_so(tier: Tier) -> None:
    tier.check()
    assert list(tier.scan()) == [], "a look leaves nothing behind"


def test_what_is_durable_is_there_for_the_next_one_who_opens(
    make_tier: Callable[[], Tier],
) -> None:
    first, chunk = make_tier(), make_chunk()
    first.write(chunk.key, [chunk.view])
    first.close()
    if first.durable or first.remote:
        assert read_key(make_tier(), chunk.key) == bytes(chunk.view)
    else:
        assert make_tier().open(chunk.key) is None


def test_many_threads_write_read_and_delete_at_once(tier: Tier) -> None:
    chunks = [make_chunk(i) for i in range(4)]
    wrong: list[str] = []

    def step(i: int, chunk: PackedChunk) -> None:
        tier.write(chunk.key, [chunk.view])
        with suppress(_Vanished):
            got = read_while_others_delete(chunk.key)
            if got is not None and got != bytes(chunk.view):
                wrong.append("other bytes")
        if i % 3 == 0:
            tier.delete(chunk.key)

    def read_while_others_delete(key: ChunkKey) -> bytes | None:
        try:
            return read_key(tier, key)
        except TierCorrupt:
            raise
        except TierError as error:
            raise _Vanished from error

    def work(seed: int) -> None:
        for i in range(12):
            try:
                step(i, chunks[(seed + i) % len(chunks)])
            except Exception as error:
                # moto answers 500 when one object is put and deleted at once; servers may
                is_allowed = tier.remote and type(error) is TierError
                if not is_allowed:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
