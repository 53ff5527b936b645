"""What a strategy wants beside stored chunk KV is made when a request first asks, then kept."""

import time
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from kvweave import Weave
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Answer, Sampling
from kvweave.fuse.encode.extras import INTER, RULES, anchors_of, choose_beside, extra_name
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_text, open_kb
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import ingest_with_fronts, library_of, plain_weave

TEXTS = [(f"Note {i}", make_text(40, seed=i)) for i in range(4)]
QUESTION = "How do I drain a node and evict its pods?"
SHORT = Sampling(max_tokens=2)
ENCODED = "kv_chunks_encoded_total"
Model = tuple[Decoder, Tokenizer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_chat_model_folder(tmp_path_factory.mktemp("m"), max_position_embeddings=4096)
    return load_decoder(folder, device="cpu"), Tokenizer(folder)


def open_over(folder: Path, model: Model, encoding: str = "filler:1") -> Weave:
    """A Weave over a knowledge base with memory and a disk for its chunk KV."""
    runtime = ModelRuntime(*model, "tiny")
    kb = open_kb(folder, runtime.tokenizer, chunk_tokens=128)
    tiers = (HostTierConfig(1 << 26), DiskTierConfig(folder / "kv"))
    return Weave(runtime, library_of(kb, runtime, KVOptions(encoding, tiers=tiers)))


def ask(weave: Weave, reuse: str) -> Answer:
    """An answer whose chunks come from the store: no exact path of them is known."""
    return weave.ask(QUESTION, reuse=reuse, k=3, sampling=SHORT)


def fates(answer: Answer) -> list[tuple[str, str | None]]:
    assert answer.explain is not None
    return [(chunk.state.value, chunk.why) for chunk in answer.explain.chunks]


def extras_on_disk(weave: Weave) -> list[set[str]]:
    """The extras of every object of chunk KV that has some."""
    store = weave.library.store
    assert store.flush()
    keys = [key for slot in store.inventory.below for key in slot.budget or ()]
    with store.acquire(keys) as lease:
        headers = store.load(lease).headers().values()
        found = [set(header.extras) - PROVENANCE for header in headers]
    return [each for each in found if each]


@pytest.mark.parametrize("encoding", ["isolated", "filler:1", "neighbours:2"])
@pytest.mark.parametrize(
    ("reuse", "extra"),
    [
        ("qcfuse", "anchors:kvzip"),
        ("qcfuse:sink", "anchors:sink"),
        ("qcfuse:knorm:20%", "anchors:knorm:0.2"),
        ("cachecraft-like", "inter"),
    ],
)
def test_extras_are_made_once_and_found_by_the_next_request(
    tmp_path: Path, model: Model, encoding: str, reuse: str, extra: str
) -> None:
    with open_over(tmp_path, model, encoding) as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert extras_on_disk(weave) == []
        metrics = weave.library.store.metrics
        before = metrics.value(ENCODED)
        first = ask(weave, reuse)
        assert {why for _, why in fates(first)} == {None}
        assert metrics.value(ENCODED) == before + 3, "the chunks of this request"
        again = ask(weave, reuse)
        assert metrics.value(ENCODED) == before + 3
        assert (again.text, fates(again)) == (first.text, fates(first))
        assert extras_on_disk(weave) == [{extra}] * 3
    with open_over(tmp_path, model, encoding) as weave:
        later = ask(weave, reuse)
        assert weave.library.store.metrics.value(ENCODED) == 0, "what lies on the disk is taken"
        assert (later.text, fates(later)) == (first.text, fates(first))


def test_another_rule_leaves_the_first_ones_anchors_where_they_are(
    tmp_path: Path, model: Model
) -> None:
    with open_over(tmp_path, model) as weave:
        ingest_with_fronts(weave, *TEXTS)
        for reuse in ("qcfuse", "qcfuse:sink", "qcfuse"):
            assert {why for _, why in fates(ask(weave, reuse))} == {None}
        assert extras_on_disk(weave) == [{"anchors:kvzip", "anchors:sink"}] * 3


def test_whatever_shares_are_asked_for_what_is_stored_can_be_read_again(
    tmp_path: Path, model: Model
) -> None:
    """A header refuses an object with more beside its layers than these take."""
    with open_over(tmp_path, model, "isolated") as weave:
        ingest_with_fronts(weave, *TEXTS)
        for reuse in ("qcfuse", "qcfuse:100%", "qcfuse:sink:100%", "qcfuse:knorm:90%", "qcfuse"):
            assert {why for _, why in fates(ask(weave, reuse))} == {None}
        assert extras_on_disk(weave) == [{"anchors:kvzip", "anchors:knorm:0.9"}] * 3
    with open_over(tmp_path, model, "isolated") as weave:
        assert {why for _, why in fates(ask(weave, "qcfuse:knorm:90%"))} == {None}
        assert weave.library.store.metrics.value(ENCODED) == 0, "what lies on the disk is taken"


@pytest.mark.parametrize("size", range(1, 30))
def test_what_lies_beside_a_chunk_is_bounded_and_has_what_is_wanted(size: int) -> None:
    there: tuple[str, ...] = ()
    for share in range(1, size + 1):
        wanted = extra_name(RULES[share % 3], share / 100)
        there = choose_beside([wanted, INTER], there)
        assert {wanted, INTER} <= set(there)
        assert sum(anchors_of(name)[1] for name in there if name != INTER) <= 1.0 + 1e-9


def test_layers_stay_what_they_were(tmp_path: Path, model: Model) -> None:
    with open_over(tmp_path, model) as weave:
        ingest_with_fronts(weave, *TEXTS)
        plain = ask(weave, "reuse")
        ask(weave, "qcfuse")
        assert ask(weave, "reuse").text == plain.text


def test_nothing_is_guessed_where_extras_may_have_to_be_made(tmp_path: Path, model: Model) -> None:
    with open_over(tmp_path, model) as weave:
        ingest_with_fronts(weave, *TEXTS)
        for reuse in ("qcfuse", "cachecraft-like"):
            answer = weave.ask(QUESTION, reuse=reuse, k=3, speculate="on", sampling=SHORT)
            assert answer.not_guessed is Reason.MADE_FIRST
        guessed = weave.ask(QUESTION, reuse="weave", k=3, speculate="on", sampling=SHORT)
        assert guessed.not_guessed is None


def test_chunks_without_kv_are_computed_and_nothing_is_made(tmp_path: Path, model: Model) -> None:
    with open_over(tmp_path, model) as weave:
        weave.ingest(*TEXTS)
        answer = ask(weave, "qcfuse")
        assert {state for state, _ in fates(answer)} == {"computed"}
        assert weave.library.store.metrics.value(ENCODED) == 0


def test_extras_of_a_chunk_that_was_deleted_meanwhile_are_not_kept(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_over(tmp_path, model) as weave:
        ingest_with_fronts(weave, *TEXTS)
        encoder = weave.library.encoder
        save = encoder.save

        def delete_and_save(*args: Any) -> int:
            for document in weave.library.kb.documents():
                weave.remove(document.id)
            return save(*args)

        monkeypatch.setattr(encoder, "save", delete_and_save)
        ask(weave, "qcfuse")
        assert weave.library.store.flush()
        assert not any(len(budget) for budget in weave.library.store.inventory.budgets())


def test_what_was_made_before_a_failure_goes_with_its_deleted_document(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_over(tmp_path, model) as weave:
        ingest_with_fronts(weave, *TEXTS)
        encoder, saved = weave.library.encoder, list[int]()
        save = encoder.save

        def delete_save_and_fail(*args: Any) -> int:
            for document in weave.library.kb.documents():
                weave.remove(document.id)
            saved.append(save(*args))
            raise RuntimeError("no memory left")

        monkeypatch.setattr(encoder, "save", delete_save_and_fail)
        with pytest.raises(RuntimeError, match="no memory"):
            ask(weave, "qcfuse")
        assert saved
        assert weave.library.store.flush()
        assert not any(len(budget) for budget in weave.library.store.inventory.budgets())


def test_documents_that_come_with_a_question_get_theirs_once_their_kv_is_stored(
    model: Model,
) -> None:
    weave = plain_weave(*model)
    orders = permutations([f"{title}. {text}" for title, text in TEXTS])  # no path comes back
    found: set[str] = set()
    while "reused" not in found:
        answer = weave.ask(QUESTION, documents=next(orders), reuse="qcfuse:sink", sampling=SHORT)
        found = {state for state, _ in fates(answer)}
        time.sleep(0.1)  # their KV is stored behind answers, at times just behind the look for it
    assert str(Reason.NEEDS_MISSING) not in {why for _, why in fates(answer)}
    weave.close()


def test_where_extras_cannot_be_kept_the_chunks_are_computed_and_it_is_said(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_over(tmp_path, model) as weave:
        ingest_with_fronts(weave, *TEXTS)
        monkeypatch.setattr(weave.library.own, "add_extras", lambda *_: None)
        assert fates(ask(weave, "qcfuse")) == [("computed", str(Reason.NEEDS_MISSING))] * 3
