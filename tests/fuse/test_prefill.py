"""Chunk KV woven into prompts: exact where it must be, read-only, and never a wrong answer."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.chunk_pass import ChunkPass, encode_chunks, encode_prefix, passes
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.fuse.fuse import _best, _first_of
from kvweave.fuse.prefill import Prefilled, PromptFrame
from kvweave.fuse.request import PromptChunk, State, budget
from kvweave.fuse.selectors.strategies import NAMES, open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey, KeyContext
from kvweave.kv.format.objects import EncodedLayer, PackedChunk, pack_chunk
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.transfers import Transfer
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.reasons import Reason
from kvweave.types import Chunk, ChunkId, EncodeWork
from worlds.fuse import prefill_stored
from worlds.kv import make_context
from worlds.tiny_models import VARIANTS, make_model_folder

RNG = random.Random(3)
PREAMBLE = [RNG.randrange(97) for _ in range(6)]
CHUNKS = [[RNG.randrange(97) for _ in range(n)] for n in (11, 1, 19, 7)]
QUESTION = [RNG.randrange(97) for _ in range(5)]


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def any_decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    return load_decoder(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), "llama")
    return load_decoder(folder, device="cpu", dtype="float32")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(StoreConfig(tiers=(DiskTierConfig(tmp_path / "kv"),))) as store:
        yield store


def context_of(decoder: Decoder) -> KeyContext:
    return make_context(
        model=decoder.weights.fingerprint,
        preamble_ids=tuple(PREAMBLE),
        rope=str(asdict(decoder.spec.rope)),
    )


def prompt_of(chunks: list[list[int]]) -> list[int]:
    return [*PREAMBLE, *(i for chunk in chunks for i in chunk), *QUESTION]


def make_chunk(ids: list[int]) -> Chunk:
    return Chunk(ChunkId(str(ids)), "", "", tuple(ids))


def full_prefill(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    kv = decoder.new_kv(len(ids))
    return decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])[0]


def answer(
    decoder: Decoder,
    store: KVStore,
    chunks: list[list[int]],
    saved: list[list[int]],
    strategy: str = "reuse",
    ratio: float = 0.0,
) -> Prefilled:
    encoder = ChunkEncoder(decoder, store, context_of(decoder))
    encoder.encode([make_chunk(ids) for ids in saved])
    assert store.flush()
    named = [PromptChunk(tuple(i), encoder.key(i), encoder.exact_key(i)) for i in chunks]
    opened = open_strategy(strategy, ModelFacts(decoder.spec.num_layers))
    frame = PromptFrame(encoder.preamble, QUESTION)
    return prefill_stored(decoder, store, named, frame, opened, ratio)


def reasons(prefilled: Prefilled) -> list[str | None]:
    """Why each chunk was computed; None where it was not."""
    return [chunk.why for chunk in prefilled.record.chunks]


def test_a_chunk_encoded_in_company_equals_the_chunk_encoded_alone(any_decoder: Decoder) -> None:
    preamble = encode_prefix(any_decoder, PREAMBLE)
    together = encode_chunks(any_decoder, preamble, CHUNKS)
    for ids, layers in zip(CHUNKS, together, strict=True):
        (alone,) = encode_chunks(any_decoder, preamble, [ids])
        for ours, theirs in zip(layers, alone, strict=True):
            torch.testing.assert_close(ours.k, theirs.k, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.v, theirs.v, atol=1e-4, rtol=1e-4)


def test_a_stored_key_turned_to_its_place_equals_the_key_computed_there(
    any_decoder: Decoder,
) -> None:
    ids = PREAMBLE + CHUNKS[0]
    kv = any_decoder.new_kv(len(ids))
    any_decoder.forward([Rows(ids, range(len(ids)), kv, [])])
    preamble = encode_prefix(any_decoder, PREAMBLE)
    (layers,) = encode_chunks(any_decoder, preamble, [CHUNKS[0]])
    angles = any_decoder.angles(torch.arange(len(PREAMBLE), len(ids)))
    for layer, made in enumerate(layers):
        there = kv.keys(layer)[len(PREAMBLE) :], kv.values(layer)[len(PREAMBLE) :]
        torch.testing.assert_close(rotate(made.k, angles), there[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(made.v, there[1], atol=1e-4, rtol=1e-4)


def test_one_chunk_behind_the_preamble_is_exact(any_decoder: Decoder, store: KVStore) -> None:
    reused = answer(any_decoder, store, [CHUNKS[0]], saved=[CHUNKS[0]])
    assert [chunk.state for chunk in reused.record.chunks] == [State.EXACT]
    want = full_prefill(any_decoder, PREAMBLE + CHUNKS[0] + QUESTION)
    torch.testing.assert_close(reused.logits, want, atol=1e-4, rtol=1e-4)


def test_nothing_stored_means_full_prefill(any_decoder: Decoder, store: KVStore) -> None:
    reused = answer(any_decoder, store, CHUNKS, saved=[])
    assert set(reasons(reused)) == {Reason.ABSENT}
    want = full_prefill(any_decoder, prompt_of(CHUNKS))
    torch.testing.assert_close(reused.logits, want, atol=1e-4, rtol=1e-4)


def test_the_same_chunk_twice_in_one_prompt_is_placed_twice(
    decoder: Decoder, store: KVStore
) -> None:
    chunks = [CHUNKS[0], CHUNKS[2], CHUNKS[0]]
    reused = answer(decoder, store, chunks, saved=chunks)
    states = [chunk.state for chunk in reused.record.chunks]
    assert states == [State.EXACT, State.REUSED, State.REUSED]
    again = answer(decoder, store, chunks, saved=[], strategy="epic", ratio=1.0)
    want = full_prefill(decoder, prompt_of(chunks))
    torch.testing.assert_close(again.logits, want, atol=1e-4, rtol=1e-4)
    assert again.record.counts["reused"] == 0


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("qcfuse", "cachecraft-like")])
def test_the_record_accounts_for_every_token(decoder: Decoder, store: KVStore, name: str) -> None:
    opened = open_strategy(name, ModelFacts(decoder.spec.num_layers))
    got = answer(decoder, store, CHUNKS, saved=CHUNKS[:3], strategy=name, ratio=opened.ratio)
    counts = got.record.counts
    assert sum(counts.values()) == len(got.record.states) == len(prompt_of(CHUNKS))
    hits = len(CHUNKS[1]) + len(CHUNKS[2])
    missing = len(CHUNKS[3]) + len(QUESTION)
    if name == "full":
        assert counts["computed"] == len(prompt_of(CHUNKS)) - len(PREAMBLE)
    elif name == "prefix":
        assert counts["computed"] == hits + missing
        assert reasons(got) == [None, "not asked for", "not asked for", "not asked for"]
    else:
        assert counts["computed"] == missing
        assert counts["recomputed"] == budget(hits, opened.ratio)
        assert reasons(got) == [None, None, None, Reason.ABSENT]
    if opened.reuses != "all":
        want = full_prefill(decoder, prompt_of(CHUNKS))
        torch.testing.assert_close(got.logits, want, atol=1e-4, rtol=1e-4)


def test_behind_filler_the_first_chunk_takes_its_isolated_kv(
    decoder: Decoder, store: KVStore
) -> None:
    texts = Texts(filler=(5, 6, 7, 8))
    preparation = Preparation.parse("filler:1")
    encoder = ChunkEncoder(decoder, store, context_of(decoder), preparation, texts)
    encoder.encode([make_chunk(ids) for ids in CHUNKS])
    encoder.encode_isolated([make_chunk(CHUNKS[0])])
    assert store.flush()
    extras = ("inter", "anchors:kvzip")
    encoder.add_extras([make_chunk(ids) for ids in CHUNKS], extras)
    encoder.add_extras([make_chunk(CHUNKS[0])], extras, isolated=True)
    assert store.flush()
    named = [PromptChunk(tuple(i), encoder.key(i), encoder.exact_key(i)) for i in CHUNKS]
    frame = PromptFrame(encoder.preamble, QUESTION)
    for name in ("reuse", "cachecraft-like", "qcfuse"):
        opened = open_strategy(name, ModelFacts(decoder.spec.num_layers, (1, 2)))
        got = prefill_stored(decoder, store, named, frame, opened, opened.ratio)
        states = [chunk.state for chunk in got.record.chunks]
        assert states == [State.EXACT, State.REUSED, State.REUSED, State.REUSED]
        assert got.record.counts["recomputed"] == budget(27, opened.ratio)
    store.delete([encoder.exact_key(CHUNKS[0])])
    opened = open_strategy("reuse", ModelFacts(decoder.spec.num_layers))
    got = prefill_stored(decoder, store, named, frame, opened, 0.0)
    states = [chunk.state for chunk in got.record.chunks]
    assert states == [State.COMPUTED, State.REUSED, State.REUSED, State.REUSED], "it is exact there"


def test_a_pass_in_slices_gives_what_one_in_a_piece_does(any_decoder: Decoder) -> None:
    preamble = encode_prefix(any_decoder, PREAMBLE)
    whole = encode_chunks(any_decoder, preamble, CHUNKS)
    sliced, turns = ChunkPass(any_decoder, preamble, CHUNKS), 1
    while not sliced.advance(0.0):  # a layer at a time
        turns += 1
    assert turns == any_decoder.spec.num_layers
    for ours, theirs in zip(sliced.made, whole, strict=True):
        assert all(torch.equal(a.k, b.k) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a.v, b.v) for a, b in zip(ours, theirs, strict=True))


class Counted:
    """A pace that lets everything through, for so long at a time, and counts."""

    def __init__(self, slice_s: float) -> None:
        self.slice_s, self.waits, self.seconds = slice_s, 0, 0.0

    def wait(self) -> float:
        self.waits += 1
        return self.slice_s

    def record_hold(self, seconds: float) -> None:
        self.seconds += seconds


def test_who_can_wait_has_the_decoder_a_layer_at_a_time_and_gets_the_same_bytes(
    decoder: Decoder, tmp_path: Path
) -> None:
    bytes_of = []
    for slice_s, least in ((60.0, 1), (0.0, decoder.spec.num_layers)):
        root, pace = tmp_path / str(slice_s), Counted(slice_s)
        with KVStore(StoreConfig(tiers=(DiskTierConfig(root),))) as store:
            encoder = ChunkEncoder(decoder, store, context_of(decoder))
            encoder.encode([make_chunk(CHUNKS[2])], pace=pace)
            assert store.flush()
        assert pace.waits >= 2 * least, "the preamble, then the chunk"
        assert pace.seconds > 0
        bytes_of.append([path.read_bytes() for path in sorted(root.rglob("*.kv"))])
    assert len(bytes_of[0]) == 1
    assert bytes_of[0] == bytes_of[1]


def test_what_is_missing_is_what_is_then_encoded_and_told(decoder: Decoder, store: KVStore) -> None:
    encoder = ChunkEncoder(decoder, store, context_of(decoder))
    chunks = [make_chunk(ids) for ids in CHUNKS]
    encoder.encode(chunks[:1])
    assert store.flush()
    work, told = encoder.missing(chunks), EncodeWork()
    assert work[:2] == (3, sum(map(len, CHUNKS[1:])))

    def tell(done: EncodeWork) -> None:
        nonlocal told
        told = told.plus(done)

    encoder.encode(chunks, tell)
    assert told == work, "bytes too: they are known before they are written"
    assert store.flush()
    assert encoder.missing(chunks) == EncodeWork()


def test_a_flipped_byte_in_any_layer_is_answered_by_recomputation(
    decoder: Decoder, tmp_path: Path
) -> None:
    clean = tmp_path / "clean"
    cfg = StoreConfig(tiers=(DiskTierConfig(clean),))
    with KVStore(cfg) as store:
        whole = answer(decoder, store, CHUNKS, saved=CHUNKS)
    assert reasons(whole) == [None] * len(CHUNKS)
    encoder_key = ChunkEncoder(decoder, store, context_of(decoder)).key
    victim = next(clean.rglob(f"*{encoder_key(CHUNKS[2]).hex()[16:]}*"))
    pristine = victim.read_bytes()
    header = PackedChunk.from_bytes(encoder_key(CHUNKS[2]), memoryview(pristine)).header
    unread = range(header.header_bytes, header.layers[0].offset)  # beside the layers: not wanted
    for offset in range(0, len(pristine), max(1, len(pristine) // 12)):
        if offset in unread:
            continue
        damaged = bytearray(pristine)
        damaged[offset] ^= 0x10
        victim.write_bytes(damaged)
        with KVStore(cfg) as store:
            reused = answer(decoder, store, CHUNKS, saved=[])
            assert reasons(reused) == [None, None, Reason.CORRUPT, None]
            again = reused
            while reasons(again)[2] == Reason.CORRUPT:  # put aside behind the request's back
                again = answer(decoder, store, CHUNKS, saved=[])
            assert reasons(again) == [None, None, Reason.ABSENT, None]  # and for good
            torch.testing.assert_close(again.logits, reused.logits)
        victim.parent.mkdir(parents=True, exist_ok=True)
        victim.write_bytes(pristine)


def test_a_chunk_lost_at_its_last_layer_is_recomputed_and_the_answer_is_right(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.kv.tiers.disk.DiskTier.best_read_bytes", 1)  # layer by layer
    (ids,) = chunks = [CHUNKS[2]]
    last = decoder.spec.num_layers - 1
    came: list[tuple[int, int]] = []  # (layer, chunks that came)
    real = Transfer.wait_layer

    def wait_layer(self: Transfer, layer: int) -> dict[ChunkKey, EncodedLayer]:
        found = real(self, layer)
        came.append((layer, len(found)))
        return found

    monkeypatch.setattr(Transfer, "wait_layer", wait_layer)
    cfg = StoreConfig(tiers=(DiskTierConfig(tmp_path),), lookahead_layers=0)
    with KVStore(cfg) as store:
        ChunkEncoder(decoder, store, context_of(decoder)).encode([make_chunk(ids)])
        assert store.flush()
        (path,) = (tmp_path / "objects").rglob("*.kv")
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1  # of the last layer
        path.write_bytes(raw)
        reused = answer(decoder, store, chunks, saved=[])
    assert came[:2] == [(layer, 1) for layer in range(last)][:2]  # the pass was well under way
    assert (last, 0) in came
    assert reasons(reused) == [Reason.CORRUPT]
    want = full_prefill(decoder, prompt_of(chunks))
    torch.testing.assert_close(reused.logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(
    "wrong", ["fewer layers", "more layers", "fewer tokens", "more heads", "smaller heads"]
)
def test_stored_kv_of_another_shape_is_computed_instead(
    decoder: Decoder, tmp_path: Path, wrong: str, host: bool
) -> None:
    tier = HostTierConfig(1 << 24) if host else DiskTierConfig(tmp_path / "kv")
    with KVStore(StoreConfig(tiers=(tier,))) as store:
        want = answer(decoder, store, CHUNKS, saved=[CHUNKS[0]])
        encoder = ChunkEncoder(decoder, store, context_of(decoder))
        (layers,) = encode_chunks(decoder, encoder.preamble, [CHUNKS[2]])
        if wrong.endswith(" layers"):
            layers = layers[:-1] if wrong == "fewer layers" else [*layers, layers[-1]]
        cut = {
            "fewer tokens": lambda x: x[1:],
            "more heads": lambda x: torch.cat([x, x], dim=1),
            "smaller heads": lambda x: x[..., ::2],
        }.get(wrong, lambda x: x)
        layers = [LayerKV(cut(kv.k), cut(kv.v)) for kv in layers]
        store.save(pack_chunk(encoder.key(CHUNKS[2]), layers))
        got = answer(decoder, store, CHUNKS, saved=[])
        assert reasons(got) == [None, Reason.ABSENT, Reason.CORRUPT, Reason.ABSENT]
        torch.testing.assert_close(got.logits, want.logits)


def test_encoding_again_computes_nothing(decoder: Decoder, store: KVStore) -> None:
    computed: list[object] = []

    def run_alone(job: Callable[[], object]) -> object:
        computed.append(job())
        return computed[-1]

    encoder = ChunkEncoder(decoder, store, context_of(decoder), run_alone=run_alone)
    encoder.encode([make_chunk(ids) for ids in [*CHUNKS, CHUNKS[0]]])
    assert encoder.saves().saved == len(CHUNKS)
    num_jobs = len(computed)
    again = ChunkEncoder(decoder, store, context_of(decoder), run_alone=run_alone)
    again.encode([make_chunk(ids) for ids in CHUNKS])
    assert again.saves().saved == 0
    assert len(computed) == num_jobs > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
@pytest.mark.parametrize("codec", ["fp16", "int8", "fp8", "int4"])
def test_a_chunk_that_the_codec_cannot_hold_is_left_out_and_the_rest_is_saved(
    decoder: Decoder, store: KVStore, monkeypatch: pytest.MonkeyPatch, codec: str, bad: float
) -> None:
    class BadPass(ChunkPass):
        def advance(self, most_s: float = math.inf) -> bool:
            is_done = super().advance()
            for layers in self.made:
                if len(layers[0].k) == len(CHUNKS[2]):
                    layers[-1] = LayerKV(layers[-1].k, torch.full_like(layers[-1].v, bad))
            return is_done

    monkeypatch.setattr("kvweave.fuse.encode.chunk_encoder.ChunkPass", BadPass)
    context = replace(context_of(decoder), codec=codec)
    encoder = ChunkEncoder(decoder, store, context)
    encoder.encode([make_chunk(ids) for ids in CHUNKS])
    assert store.flush()
    assert encoder.saves()[:2] == (len(CHUNKS) - 1, 1)
    absent = [
        peek.residency is Residency.ABSENT
        for peek in store.peek([encoder.key(ids) for ids in CHUNKS])
    ]
    assert absent == [False, False, True, False]
    assert store.metrics.value("kv_saves_dropped_total", reason="not representable") == 1


def test_stored_chunk_kv_is_never_written(decoder: Decoder) -> None:
    with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 24),))) as store:
        first = answer(decoder, store, CHUNKS, saved=CHUNKS)
        for _ in range(20):
            answer(decoder, store, list(reversed(CHUNKS)), saved=[])
        again = answer(decoder, store, CHUNKS, saved=[])
    assert torch.equal(first.logits, again.logits)


def test_passes_are_bounded_and_lose_no_chunk() -> None:
    lengths = [5, 5, 100, 1, 9, 9, 9]
    runs = list(passes(lengths, max_rows=20))
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    assert all(len(run) == 1 or sum(lengths[i] for i in run) <= 20 for run in runs)
    assert list(passes([])) == []


def test_filler_kv_is_the_chunk_behind_preamble_and_filler(
    decoder: Decoder, store: KVStore
) -> None:
    filler = (5, 6, 7, 8)
    encoder = ChunkEncoder(
        decoder, store, context_of(decoder), Preparation.parse("filler:1"), Texts(filler=filler)
    )
    encoder.encode([make_chunk(ids) for ids in CHUNKS])
    keys = [encoder.exact_key(ids) for ids in CHUNKS]
    assert {peek.residency for peek in store.peek(keys)} == {Residency.ABSENT}, "not for all"
    encoder.encode_isolated([make_chunk(ids) for ids in CHUNKS])
    assert store.flush()
    prefixes = {
        encoder.key: encode_prefix(decoder, [*PREAMBLE, *filler]),
        encoder.exact_key: encode_prefix(decoder, PREAMBLE),
    }
    for key_of, prefix in prefixes.items():
        for ids, want in zip(CHUNKS, encode_chunks(decoder, prefix, CHUNKS), strict=True):
            with store.acquire([key_of(ids)]) as lease:
                transfer = store.load(lease)
                for layer, kv in enumerate(want):
                    got = transfer.wait_layer(layer)[key_of(ids)].decode()
                    torch.testing.assert_close(got.k, kv.k, atol=1e-5, rtol=1e-5)
                    torch.testing.assert_close(got.v, kv.v, atol=1e-5, rtol=1e-5)
    isolated, filled = (encode_chunks(decoder, p, CHUNKS)[2][-1].v for p in prefixes.values())
    assert not torch.allclose(isolated, filled, atol=1e-2)


def test_drift_is_part_of_weave_in_the_store(decoder: Decoder, store: KVStore) -> None:
    def logits(drift: float) -> torch.Tensor:
        opened = replace(open_strategy("weave", ModelFacts(decoder.spec.num_layers)), drift=drift)
        encoder = ChunkEncoder(decoder, store, context_of(decoder))
        encoder.encode([make_chunk(ids) for ids in CHUNKS])
        assert store.flush()
        named = [PromptChunk(tuple(i), encoder.key(i), encoder.exact_key(i)) for i in CHUNKS]
        frame = PromptFrame(encoder.preamble, QUESTION)
        return prefill_stored(decoder, store, named, frame, opened, 0.3).logits

    assert open_strategy("weave", ModelFacts(3)).drift > 0
    stored = answer(decoder, store, CHUNKS, saved=CHUNKS, strategy="weave", ratio=0.3).logits
    assert torch.equal(stored, logits(open_strategy("weave", ModelFacts(3)).drift))
    assert not torch.allclose(stored, logits(0.0), atol=1e-3)


def test_the_record_counts_work_bytes_and_time(decoder: Decoder, store: KVStore) -> None:
    answer(decoder, store, CHUNKS, saved=CHUNKS)
    by_name = {
        name: answer(decoder, store, CHUNKS, saved=[], strategy=name, ratio=0.3).record
        for name in ("random", "weave", "cacheblend")
    }
    num_layers, total = decoder.spec.num_layers, len(prompt_of(CHUNKS))
    rows = budget(27, 0.3) + len(QUESTION)
    assert by_name["random"].work == pytest.approx(rows / total)
    probe = (num_layers - 1) * len(QUESTION)
    assert by_name["weave"].work == pytest.approx((num_layers * rows + probe) / num_layers / total)
    wide = 27 + len(QUESTION)  # layer 0, and the products of layer 1
    assert by_name["cacheblend"].work == pytest.approx((2 * wide + rows) / num_layers / total)
    for record in by_name.values():
        assert record.loaded_bytes["disk"] > 0
        assert record.stages.load > 0
        assert record.stages.compute > 0
    assert by_name["weave"].stages.select > 0


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
def test_what_a_codec_rounded_is_not_called_exact(
    decoder: Decoder, store: KVStore, codec: str
) -> None:
    """The first chunk is taken as it is stored, right behind the preamble: reused, not exact. None
    of its rows is computed again."""
    context = replace(context_of(decoder), codec=codec)
    encoder = ChunkEncoder(decoder, store, context)
    encoder.encode([make_chunk(CHUNKS[0])])
    assert store.flush()
    ids = tuple(CHUNKS[0])
    opened = open_strategy("prefix", ModelFacts(decoder.spec.num_layers))
    chunk = PromptChunk(ids, encoder.key(ids), encoder.exact_key(ids))
    frame = PromptFrame(encoder.preamble, QUESTION)
    got = prefill_stored(decoder, store, [chunk], frame, opened, 0.0)
    assert got.record.chunks[0].state is State.REUSED
    assert got.record.counts == {
        "exact": len(PREAMBLE),
        "reused": len(ids),
        "recomputed": 0,
        "computed": len(QUESTION),
    }
    assert list(got.record.states[len(PREAMBLE) :][: len(ids)]) == [State.REUSED] * len(ids)
    want = full_prefill(decoder, PREAMBLE + CHUNKS[0] + QUESTION).log_softmax(-1)
    kl = (want.exp() * (want - got.logits.log_softmax(-1))).sum()
    assert 0.0 < float(kl) < (0.1 if codec == "int4" else 1e-3)


@pytest.mark.parametrize(
    ("logits", "token_id"),
    [
        ([0.5, 3.0, -1.0], 1),
        ([3.0, 0.5, 3.0], 0),
        ([0.5, math.nan, 9.0], None),
        ([0.5, math.inf, 9.0], None),
        ([-math.inf, -2.0, -math.inf], 1),
    ],
)
def test_the_likeliest_token_is_known_where_there_are_numbers(
    logits: list[float], token_id: int | None
) -> None:
    first = _first_of(_best(torch.tensor(logits)))
    assert (None if first is None else first.token_id) == token_id
    if first is not None:
        ahead = sorted(logits)[-2:]
        assert first.lead == pytest.approx(ahead[1] - ahead[0])
