"""A document that comes with questions is stored once it comes back, and found in any context."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.app.library.kv_behind import ChunkPromotion
from kvweave.app.library.kv_maker import KVMaker, WantedKV
from kvweave.app.library.library_kv import key_context
from kvweave.app.weave import Answer, Sampling
from kvweave.engine.background import ActiveAnswers, BackgroundPace
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_text
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import open_weave

TEXTS = [make_text(40, seed=i) for i in range(4)]
GREEDY = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    folder = make_chat_model_folder(tmp_path_factory.mktemp("seen"), max_position_embeddings=4096)
    return load_decoder(folder, device="cpu"), Tokenizer(folder)


@pytest.fixture
def weave(tmp_path: Path, model: tuple[Decoder, Tokenizer]) -> Iterator[Weave]:
    with open_weave(tmp_path / "kb", model) as weave:
        yield weave


def ask(weave: Weave, *texts: str) -> Answer:
    answer = weave.ask("What is it?", documents=texts, reuse="reuse", sampling=GREEDY)
    assert weave.library.promotion is None or weave.library.promotion.wait(30)
    return answer


def reused(answer: Answer) -> int:
    assert answer.explain is not None
    return answer.explain.counts["reused"] + answer.explain.counts["exact"]


def num_stored(weave: Weave) -> int:
    """Bytes in the store: a chunk has KV behind filler, isolated once it has stood in front."""
    return sum(weave.library.store.used_bytes().values())


def test_a_document_seen_twice_is_found_in_any_other_context(weave: Weave) -> None:
    preamble = len(weave.library.encoder.preamble_ids)
    assert reused(ask(weave, TEXTS[0], TEXTS[1])) == preamble
    assert reused(ask(weave, TEXTS[2], TEXTS[1])) == preamble, "stored behind its second answer"
    third = ask(weave, TEXTS[3], TEXTS[0], TEXTS[1])
    tokens = len(weave.build_prompt("x", [TEXTS[1]]).chunks[0])
    assert reused(third) == preamble + tokens
    assert third.explain is not None
    assert [c.tier for c in third.explain.chunks] == [None, None, "host"]


def test_there_is_one_copy_per_unique_chunk(weave: Weave) -> None:
    for others in ((), (TEXTS[1],), ()):
        ask(weave, *others, TEXTS[0])
    once = num_stored(weave)
    assert once > 0
    for _ in range(3):
        ask(weave, TEXTS[0])
    assert num_stored(weave) == once
    encoder = weave.library.encoder
    (chunk,) = weave.build_prompt("x", [TEXTS[0]]).chunks
    peeks = weave.library.store.peek([encoder.key(chunk), encoder.exact_key(chunk)])
    assert [peek.residency for peek in peeks] == [Residency.HERE] * 2


def test_promotion_zero_keeps_nothing_of_a_request(
    tmp_path: Path, model: tuple[Decoder, Tokenizer]
) -> None:
    with open_weave(tmp_path / "kb", model, promotion=0) as weave:
        for _ in range(3):
            ask(weave, TEXTS[0])
        assert num_stored(weave) == 0


def test_full_prefill_stores_nothing(weave: Weave) -> None:
    for _ in range(3):
        weave.ask("What is it?", documents=TEXTS[:1], reuse="full", sampling=GREEDY)
    assert weave.library.promotion is not None
    assert weave.library.promotion.wait(10)
    assert num_stored(weave) == 0


def test_a_document_that_comes_back_while_its_first_copy_is_tried_is_stored(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time it may only be taken from the tree; the second time it may be computed."""
    goes_on, is_absent = threading.Event(), WantedKV.is_absent

    def look_late(wanted: WantedKV) -> bool:
        assert goes_on.wait(30)
        return is_absent(wanted)

    monkeypatch.setattr(WantedKV, "is_absent", look_late)
    for _ in range(2):
        weave.ask("What is it?", documents=TEXTS[:1], reuse="reuse", sampling=GREEDY)
    goes_on.set()
    assert weave.library.maker.wait(30)
    assert num_stored(weave) > 0


def test_encoding_waits_while_an_answer_is_in_the_making(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weave.library.promotion is not None
    monkeypatch.setattr(weave.library.maker, "_read_exact", lambda *_: None)  # not in the tree
    weave.runtime.client.pace.share = 0.0
    ask(weave, TEXTS[0])
    under_way = weave.stream("Is it so?", documents=["x"], sampling=GREEDY)
    pieces = iter(under_way)
    next(pieces)
    asked = weave.ask("Why?", documents=TEXTS[:1], reuse="reuse", sampling=GREEDY)
    assert asked.text is not None
    assert not weave.library.promotion.wait(0.3), "somebody is being answered"
    assert num_stored(weave) == 0
    for _ in pieces:
        pass
    assert weave.library.promotion.wait(30)
    assert num_stored(weave) > 0


def test_a_failure_beside_the_answers_is_logged_and_harms_nobody(
    weave: Weave, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(weave.library.encoder, "take_exact", fail)
    for _ in range(2):
        ask(weave, TEXTS[0])
    assert "which requests brought, is not stored" in caplog.text
    monkeypatch.undo()
    ask(weave, TEXTS[0])
    assert num_stored(weave) > 0, "the next time it is seen it is tried again"


def test_closing_does_not_wait_for_what_was_not_begun(
    tmp_path: Path, model: tuple[Decoder, Tokenizer]
) -> None:
    before = set(threading.enumerate())
    weave = open_weave(tmp_path / "kb", model)
    for _ in range(2):
        ask(weave, TEXTS[0])
    weave.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "chunk-kv"]


@pytest.mark.parametrize("encoding", ["isolated", "filler:4", "neighbours:2"])
def test_a_chunk_needs_room_for_what_it_is_computed_behind_and_no_more(
    model: tuple[Decoder, Tokenizer], encoding: str
) -> None:
    decoder, tokenizer = model
    preparation, context = Preparation.parse(encoding), key_context(decoder, tokenizer)
    texts = Texts.for_preparation(tokenizer, preparation)
    chunk = tuple(tokenizer.encode_text(TEXTS[0]))
    behind = len(texts.filler) if encoding.startswith("filler") else 0
    needed = len(context.preamble_ids) + behind + len(chunk)
    for max_context in (needed - 1, needed):
        with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 26),))) as store:
            encoder = ChunkEncoder(
                decoder, store, context, preparation, texts, neighbours_of=lambda _: None
            )
            maker = KVMaker(BackgroundPace(ActiveAnswers()), lambda *_: False, lambda *_: None)
            seen = ChunkPromotion(max_context, 1, maker)
            seen.saw(encoder, [chunk])
            assert seen.wait(30)
            maker.close()
            has_context = encoding.startswith("filler")
            (peek,) = store.peek([(encoder.key if has_context else encoder.exact_key)(chunk)])
            assert (peek.residency is Residency.HERE) == (max_context == needed)
