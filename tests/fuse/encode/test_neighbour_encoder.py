"""Chunk KV behind neighbours: what is computed, what it is called, and the table of neighbours."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.errors import ConfigError, CorpusError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.chunk_pass import encode_chunks
from kvweave.fuse.encode.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey, context_of
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.types import Chunk, ChunkId
from worlds.kv import make_context, read_extras
from worlds.tiny_models import make_model_folder

RNG = random.Random(5)
PREAMBLE = tuple(RNG.randrange(97) for _ in range(6))
FILLER = tuple(RNG.randrange(97) for _ in range(9))
FRONT = (*PREAMBLE, *FILLER)
CHUNKS = {
    name: Chunk(ChunkId(name), "", "", tuple(RNG.randrange(97) for _ in range(n)))
    for name, n in (("a", 11), ("b", 1), ("c", 19), ("d", 7))
}
NEIGHBOURS = {ChunkId("a"): ("c", "d"), ChunkId("b"): ("a",), ChunkId("c"): ("d", "b", "a")}


@pytest.fixture(scope="module", params=["llama", "qwen3", "mixtral"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    return load_decoder(folder, device="cpu", dtype="float32")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 24),))) as store:
        yield store


@pytest.fixture
def table(tmp_path: Path) -> Iterator[NeighbourTable]:
    table = NeighbourTable(tmp_path / "kv" / "neighbours.sqlite")
    yield table
    table.close()


def neighbours_of(token_ids: Sequence[int]) -> Sequence[ChunkId] | None:
    (name,) = (chunk.id for chunk in CHUNKS.values() if chunk.token_ids == tuple(token_ids))
    return tuple(map(ChunkId, NEIGHBOURS[name])) if name in NEIGHBOURS else None


def make_encoder(decoder: Decoder, store: KVStore, codec: str = "raw") -> ChunkEncoder:
    context = replace(make_context(preamble_ids=PREAMBLE), codec=codec)
    return ChunkEncoder(
        decoder,
        store,
        context,
        Preparation.parse("neighbours:3"),
        Texts(FILLER),
        neighbours_of=neighbours_of,
    )


def encode_all(encoder: ChunkEncoder, **options: int) -> int:
    known = {chunk.id: chunk for chunk in CHUNKS.values()}
    second = NeighbourEncoder(encoder, lambda ids: {each: known[each] for each in ids}, **options)
    return second.encode(
        list(CHUNKS.values()),
        {each: tuple(map(ChunkId, others)) for each, others in NEIGHBOURS.items()},
    )


def stored_layers(store: KVStore, key: ChunkKey, num_layers: int) -> list[LayerKV]:
    with store.acquire([key]) as lease:
        transfer = store.load(lease)
        layers = [transfer.wait_layer(i)[key].decode() for i in range(num_layers)]
        return [LayerKV(kv.k.clone(), kv.v.clone()) for kv in layers]


def is_stored(store: KVStore, key: ChunkKey) -> bool:
    (peek,) = store.peek([key])
    return peek.residency is not Residency.ABSENT


def dense(decoder: Decoder, chunk: Chunk, others: Sequence[Chunk]) -> list[LayerKV]:
    """The same by plain forward passes: keys turned to their place, values, of the chunk's rows."""
    kv = decoder.new_kv(256)
    decoder.forward([Rows(FRONT, range(len(FRONT)), kv, [])])
    at = first = len(FRONT)
    for other in others:
        alone = decoder.new_kv(64)
        ids = [*FRONT, *other.token_ids]
        decoder.forward([Rows(ids, range(len(ids)), alone, [])])
        num = len(other.token_ids)
        # it was computed right behind the filler: turn it on by as far as it moves
        shift = decoder.angles(torch.full((num,), at - first))
        kv.reserve(at + num)
        for layer in range(decoder.spec.num_layers):
            kv.keys(layer)[at : at + num] = rotate(alone.keys(layer)[first : first + num], shift)
            kv.values(layer)[at : at + num] = alone.values(layer)[first : first + num]
        at += num
    rows = range(at, at + len(chunk.token_ids))
    decoder.forward([Rows(chunk.token_ids, rows, kv, [])])
    return [
        LayerKV(kv.keys(layer)[at : rows.stop], kv.values(layer)[at : rows.stop])
        for layer in range(decoder.spec.num_layers)
    ]


def test_stored_kv_equals_dense_prefill_behind_the_stitched_neighbours(
    decoder: Decoder, store: KVStore
) -> None:
    encoder = make_encoder(decoder, store)
    assert encode_all(encoder) == len(NEIGHBOURS)
    for name, names in NEIGHBOURS.items():
        chunk, others = CHUNKS[name], [CHUNKS[each] for each in names]
        made = stored_layers(store, encoder.key(chunk.token_ids), decoder.spec.num_layers)
        start = len(FRONT) + sum(len(other.token_ids) for other in others)
        angles = decoder.angles(torch.arange(start, start + len(chunk.token_ids)))
        for ours, want in zip(made, dense(decoder, chunk, others), strict=True):
            torch.testing.assert_close(rotate(ours.k, angles), want.k, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.v, want.v, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_neighbours_from_the_store_and_computed_ones_give_the_same_kv(
    decoder: Decoder, codec: str
) -> None:
    made = []
    for stored_first in (True, False):
        with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 24),))) as store:
            encoder = make_encoder(decoder, store, codec)
            if stored_first:  # as a knowledge base that was prepared with filler before
                filler = Preparation.parse("filler:4")
                before = ChunkEncoder(decoder, store, encoder.context, filler, Texts(FILLER))
                before.encode(list(CHUNKS.values()))
                assert is_stored(store, encoder.filled_key(CHUNKS["d"].token_ids))
            # one chunk a pass, or all at once: neither may show
            encode_all(encoder, pass_bytes=1 if stored_first else 1 << 30)
            key = encoder.key(CHUNKS["c"].token_ids)
            made.append(stored_layers(store, key, decoder.spec.num_layers))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours.k, theirs.k, atol=2e-2 if codec == "int8" else 1e-4, rtol=0)
        torch.testing.assert_close(ours.v, theirs.v, atol=2e-2 if codec == "int8" else 1e-4, rtol=0)


def test_what_is_stored_is_not_computed_again(decoder: Decoder, store: KVStore) -> None:
    encoder = make_encoder(decoder, store)
    assert encode_all(encoder) == len(NEIGHBOURS)
    assert encode_all(encoder) == 0


def test_the_kv_that_a_neighbour_brings_is_stored_once_for_all(
    decoder: Decoder, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(decoder, store)
    passed: list[tuple[int, ...]] = []

    def watched(prefix_decoder: Decoder, prefix: object, chunks: Sequence[Sequence[int]]) -> object:
        passed.extend(map(tuple, chunks))
        return encode_chunks(prefix_decoder, prefix, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr("kvweave.fuse.encode.neighbour_encoder.encode_chunks", watched)
    encode_all(encoder, pass_bytes=1)  # one chunk a pass: what the first stored the others find
    neighbours = {each for others in NEIGHBOURS.values() for each in others}
    as_neighbour = [passed.count(CHUNKS[each].token_ids) for each in sorted(neighbours)]
    as_itself = [int(ChunkId(each) in NEIGHBOURS) for each in sorted(neighbours)]
    assert as_neighbour == [1 + own for own in as_itself]
    assert all(is_stored(store, encoder.filled_key(CHUNKS[each].token_ids)) for each in neighbours)


def test_looking_for_what_neighbours_bring_is_no_miss(decoder: Decoder, store: KVStore) -> None:
    encoder = make_encoder(decoder, store)
    encode_all(encoder, pass_bytes=1)
    assert store.metrics.value("kv_misses_total") == 0


def test_a_neighbour_that_the_codec_cannot_hold_is_named_and_counted_once(
    decoder: Decoder,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def encode(*args: object) -> list[list[LayerKV]]:
        made = encode_chunks(*args)  # type: ignore[arg-type]
        for layers in made:
            if len(layers[0].k) == len(CHUNKS["d"].token_ids):
                layers[-1] = LayerKV(layers[-1].k, torch.full_like(layers[-1].v, 1e5))
        return made

    monkeypatch.setattr("kvweave.fuse.encode.neighbour_encoder.encode_chunks", encode)
    encoder = make_encoder(decoder, store, "fp16")
    encode_all(encoder, pass_bytes=1)  # "d" is a neighbour in two passes, and has none itself
    assert not is_stored(store, encoder.filled_key(CHUNKS["d"].token_ids))
    assert caplog.text.count("chunk d is not saved behind the filler") == 1
    assert store.metrics.value("kv_saves_dropped_total", reason="not representable") == 1


def test_a_key_names_the_neighbours_in_their_order(decoder: Decoder, store: KVStore) -> None:
    encoder = make_encoder(decoder, store)
    ids = CHUNKS["a"].token_ids
    there = [ChunkId("c"), ChunkId("d")]
    assert encoder.key(ids) == encoder.key_behind(ids, there)
    others = {
        encoder.key_behind(ids, there[::-1]),
        encoder.key_behind(ids, there[:1]),
        encoder.key_behind(ids, [ChunkId("cd")]),
        encoder.exact_key(ids),
    }
    assert len(others) == 4
    assert encoder.key(ids) not in others
    assert encoder.key_behind(ids, []) == encoder.exact_key(ids)
    # one folder for all of them, not one per chunk
    assert context_of(encoder.key(ids)) == context_of(encoder.key(CHUNKS["c"].token_ids))


def test_a_chunk_whose_neighbours_were_not_chosen_is_a_miss(
    decoder: Decoder, store: KVStore
) -> None:
    encoder = make_encoder(decoder, store)
    encoder.encode(list(CHUNKS.values()))
    encode_all(encoder)
    (peek,) = store.peek([encoder.key(CHUNKS["d"].token_ids)])
    assert peek.residency is Residency.ABSENT


def test_an_encoder_that_knows_no_neighbours_is_refused(decoder: Decoder, store: KVStore) -> None:
    with pytest.raises(ConfigError, match="needs to be told who they are"):
        ChunkEncoder(
            decoder, store, make_context(), Preparation.parse("neighbours:3"), Texts(FILLER)
        )


def test_entries_come_back_in_their_order_and_turned_round(table: NeighbourTable) -> None:
    a, b, c = map(ChunkId, "abc")
    table.put(2, {a: [c, b], b: [c], c: []})
    table.put(5, {a: [b]})
    assert table.get(2, a) == (c, b)
    assert table.get(2, c) == ()
    assert table.get(5, a) == (b,)
    assert table.get(5, b) is None
    assert table.users_of([c]) == {a, b}
    assert table.users_of([b]) == {a}
    assert table.mentioned_chunks() == {a, b, c}
    table.put(2, {a: [b]})
    assert table.users_of([c]) == {b}
    table.drop([a], size=2)
    assert (table.get(2, a), table.get(5, a)) == (None, (b,))
    table.drop([a])
    assert table.get(5, a) is None
    assert table.users_of([b]) == set()


def test_a_change_that_is_interrupted_changes_nothing(table: NeighbourTable) -> None:
    a, b = map(ChunkId, "ab")
    table.put(2, {a: [b]})

    class Interrupting(dict[ChunkId, list[ChunkId]]):
        def items(self):  # type: ignore[no-untyped-def]
            yield a, []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.put(2, Interrupting({a: []}))
    assert table.get(2, a) == (b,)
    assert table.users_of([b]) == {a}


def test_a_table_of_another_process_is_read_while_it_changes(
    table: NeighbourTable, tmp_path: Path
) -> None:
    reader = NeighbourTable(tmp_path / "kv" / "neighbours.sqlite")
    a, b = map(ChunkId, "ab")
    table.put(2, {a: [b]})
    assert reader.get(2, a) == (b,)
    table.drop([a])
    assert reader.get(2, a) is None
    reader.close()


def test_a_damaged_table_is_one_line_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "neighbours.sqlite"
    path.write_bytes(b"no database" * 500)
    with pytest.raises(CorpusError, match=r"neighbours\.sqlite: .*; if it is damaged, delete"):
        NeighbourTable(path)


def test_kv_behind_neighbours_says_whose_text_it_has_seen(decoder: Decoder, tmp_path: Path) -> None:
    from kvweave.kv.provenance import carries, find_keys
    from kvweave.kv.tiers.disk import DiskTier

    disk = DiskTierConfig(tmp_path / "kv")
    with KVStore(StoreConfig(tiers=(disk,))) as store:
        encoder = make_encoder(decoder, store)
        encoder.encode(list(CHUNKS.values()))
        encode_all(encoder)
        assert store.flush()
        tier = DiskTier(disk, sweep=False)
        keys = {name: encoder.key(CHUNKS[name].token_ids) for name in NEIGHBOURS}
        assert set(find_keys(tier, carries(["d"]))) == {
            encoder.filled_key(CHUNKS["d"].token_ids),
            keys[ChunkId("a")],
            keys[ChunkId("c")],
        }
        assert set(find_keys(tier, lambda of: of.behind == ("c", "d"))) == {keys[ChunkId("a")]}


def test_what_a_neighbour_brings_is_what_an_encoder_behind_filler_serves(
    decoder: Decoder, store: KVStore
) -> None:
    encoder = ChunkEncoder(
        decoder,
        store,
        make_context(preamble_ids=PREAMBLE),
        Preparation.parse("neighbours:3"),
        Texts(FILLER, repeat=(3, 4, 5)),
        neighbours_of=neighbours_of,
    )
    encode_all(encoder)
    ids = CHUNKS["d"].token_ids
    filler = Preparation.parse("filler:4")
    served = ChunkEncoder(decoder, store, encoder.context, filler, Texts(FILLER))
    assert is_stored(store, served.key(ids))


def test_extras_are_added_beside_kv_behind_neighbours(decoder: Decoder, store: KVStore) -> None:
    encoder = ChunkEncoder(
        decoder,
        store,
        make_context(preamble_ids=PREAMBLE),
        Preparation.parse("neighbours:3"),
        Texts(FILLER, repeat=(3, 4, 5)),
        neighbours_of=neighbours_of,
    )
    assert encode_all(encoder) == len(NEIGHBOURS)
    extras = ("anchors:kvzip", "inter")
    second = NeighbourEncoder(encoder, lambda ids: {i: CHUNKS[i] for i in ids})
    keys = [encoder.key(CHUNKS[name].token_ids) for name in NEIGHBOURS]
    assert set(second.add_extras([CHUNKS[name] for name in NEIGHBOURS], extras)) == set(keys)
    for name, key in zip(NEIGHBOURS, keys, strict=True):
        with store.acquire([key]) as lease:
            transfer = store.load(lease, extras=(*extras, "behind"))
            assert all(len(transfer.extras(extra)[key]) for extra in extras)
            assert read_extras(transfer, "behind")[key].decode().split() == [*NEIGHBOURS[name]]
