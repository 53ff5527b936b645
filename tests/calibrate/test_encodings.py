"""Chunk KV behind neighbours computed on the spot: what ingest would store, and no more work."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvweave.calibrate import encodings
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import (
    KVZIP,
    ContextPrefixes,
    FixedContext,
    NeighbourContext,
    TokenIds,
)
from kvweave.calibrate.measure import Setting, measure
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.encode.contexts import neighbour_prefix
from kvweave.fuse.encode.extras import compute_extras
from kvweave.fuse.encode.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.strategy import ModelFacts
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, ChunkId
from worlds.fuse import unpack_anchors
from worlds.kv import make_context

RNG = random.Random(3)


def ids(num_tokens: int) -> TokenIds:
    return tuple(RNG.randrange(5, 200) for _ in range(num_tokens))


PREAMBLE, FILLER, REPEAT = ids(6), ids(13), ids(4)
A, B, C, D, E, F = (ids(n) for n in (11, 1, 19, 7, 9, 5))
NEAR = {A: (E,), B: (D, E, A), C: (), D: (E, F)}  # A is the first: its neighbour does not count
CASE = Case(PREAMBLE, (A, B, C, D), ids(8), (0, 8))


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu", dtype="float32")


def nearest(chunks: Sequence[TokenIds]) -> list[Sequence[TokenIds]]:
    return [NEAR[chunk] for chunk in chunks]


def behind(decoder: Decoder) -> NeighbourContext:
    prefixes = ContextPrefixes(decoder)
    return NeighbourContext(decoder, prefixes, "neighbours:3", FILLER, REPEAT, nearest)


def prefix_of(decoder: Decoder, others: Sequence[TokenIds]) -> Prefix:
    """Preamble, filler and neighbours, each neighbour computed by itself."""
    front = encode_prefix(decoder, (*PREAMBLE, *FILLER))
    made = [(other, encode_chunks(decoder, front, [other])[0]) for other in others]
    return neighbour_prefix(decoder, front, made)


def assert_same_kv(decoder: Decoder, made: ComputedChunks, want: Sequence[list[LayerKV]]) -> None:
    for layer in range(decoder.spec.num_layers):
        for part in (0, 1):
            expected = torch.cat([layers[layer][part] for layers in want])
            torch.testing.assert_close(made.layer(layer)[part], expected, atol=1e-5, rtol=1e-4)


def test_each_chunk_stands_behind_preamble_filler_and_its_neighbours_nearest_first(
    decoder: Decoder,
) -> None:
    bare = encode_prefix(decoder, PREAMBLE)
    prefixes = [
        bare,  # the first chunk is exact, whoever is near it
        prefix_of(decoder, (D, E, A)),
        bare,  # and this one has nobody
        prefix_of(decoder, (E, F)),
    ]
    want = encode_chunks(decoder, prefixes, CASE.chunks)
    assert_same_kv(decoder, behind(decoder).prepare(CASE, []), want)


@pytest.mark.parametrize("pass_rows", [1, 1 << 20])
def test_passes_of_any_size_give_the_same(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, pass_rows: int
) -> None:
    want = behind(decoder).prepare(CASE, [])
    cut = encodings.passes
    monkeypatch.setattr(encodings, "passes", lambda lengths: cut(lengths, pass_rows))
    made = behind(decoder).prepare(CASE, [])
    assert_same_kv(decoder, made, [[want.layer(i) for i in range(decoder.spec.num_layers)]])


def test_it_is_what_ingest_stores_behind_the_same_neighbours(
    decoder: Decoder, chat_model_folder: Path
) -> None:
    preparation = Preparation.parse("neighbours:3")
    texts = Texts.for_preparation(Tokenizer(chat_model_folder), preparation)
    chunks = {each: Chunk(ChunkId(str(i)), "", "", each) for i, each in enumerate([*NEAR, E, F])}
    by_id = {chunk.id: chunk for chunk in chunks.values()}
    near = {chunks[each].id: [chunks[o].id for o in others] for each, others in NEAR.items()}
    with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 26),))) as store:
        encoder = ChunkEncoder(
            decoder,
            store,
            make_context(preamble_ids=PREAMBLE),  # raw: nothing is rounded
            preparation,
            texts,
            neighbours_of=lambda ids: near.get(chunks[tuple(ids)].id),
        )
        encoder.encode_isolated(list(by_id.values()))
        second = NeighbourEncoder(encoder, lambda ids: {each: by_id[each] for each in ids})
        second.encode(list(by_id.values()), near)
        keys = [encoder.exact_key(A), *(encoder.key(each) for each in CASE.chunks[1:])]
        with store.acquire(keys) as lease:
            transfer = store.load(lease)
            layers = [transfer.wait_layer(i) for i in range(decoder.spec.num_layers)]
            stored = [[layer[key].decode() for layer in layers] for key in keys]
            context = NeighbourContext(
                decoder,
                ContextPrefixes(decoder),
                "neighbours:3",
                texts.filler,
                texts.repeat,
                nearest,
            )
            assert_same_kv(decoder, context.prepare(CASE, []), stored)
        assert context.context == encoder.encoding_context  # what the gate looks for


def test_anchors_lie_beside_every_chunk_and_come_from_behind_its_own_neighbours(
    decoder: Decoder,
) -> None:
    made = behind(decoder).prepare(CASE, [KVZIP])
    found = made.blobs[KVZIP]
    assert list(found) == list(CASE.keys)
    prefix = prefix_of(decoder, (E, F))
    layers = encode_chunks(decoder, prefix, [D])
    (want,) = compute_extras(decoder, [KVZIP], prefix, [D], layers, REPEAT)
    # float16, of products of other shapes: the last bit may differ
    here, there = unpack_anchors(found[CASE.keys[3]]), unpack_anchors(want[KVZIP])
    assert torch.equal(here.indices, there.indices)
    torch.testing.assert_close(here.keys, there.keys)
    torch.testing.assert_close(here.values, there.values)
    isolated = FixedContext(decoder, ContextPrefixes(decoder), "isolated", (), REPEAT)
    alone = isolated.prepare(CASE, [KVZIP]).blobs[KVZIP]
    assert found[CASE.keys[0]] == alone[CASE.keys[0]]
    assert found[CASE.keys[3]] != alone[CASE.keys[3]]


def test_a_neighbour_of_several_chunks_is_computed_once_in_a_case(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[TokenIds] = []

    def watched(
        by: Decoder, prefix: Prefix | Sequence[Prefix], chunks: Sequence[Sequence[int]]
    ) -> list[list[LayerKV]]:
        passed.extend(map(tuple, chunks))
        return encode_chunks(by, prefix, chunks)

    monkeypatch.setattr(encodings, "encode_chunks", watched)
    behind(decoder).prepare(CASE, [])
    as_neighbours = {D, E, A, F}
    assert sorted(passed) == sorted([*as_neighbours, *CASE.chunks])


def test_neighbours_are_measured_like_any_encoding(
    decoder: Decoder, chat_model_folder: Path
) -> None:
    settings = [Setting(open_strategy("reuse", ModelFacts(3)), 0.0)]
    isolated = FixedContext(decoder, ContextPrefixes(decoder), "isolated", (), REPEAT)
    contexts = [behind(decoder), isolated]
    (found,) = measure(decoder, Tokenizer(chat_model_folder), [CASE], contexts, settings)
    assert found.noise["neighbours:3"] < 1e-5  # everything recomputed is full prefill
    (near,), (alone,) = found.outcomes["neighbours:3"], found.outcomes["isolated"]
    assert near.judged.kl_mean != alone.judged.kl_mean
