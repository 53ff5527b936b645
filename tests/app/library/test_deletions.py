"""A deletion reaches requests that found the chunk before it: they answer, and keep nothing."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Sampling, Weave
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.engine import Engine
from kvweave.engine.tombstones import Tombstones
from kvweave.kv.lookup import Residency
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId
from worlds.engine import SMALL, alone, ids, with_chunks
from worlds.serving import GatedDecoder, Interrupted
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import plain_weave

T = TypeVar("T")
GREEDY = Sampling(max_tokens=2)


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu")


def names(engine: Engine) -> set[str]:
    """Chunks that the knowledge tree has."""
    return engine.run_alone(lambda: {node.chunk_id for node in engine.tree})


def test_a_request_that_found_a_chunk_before_its_deletion_does_not_bring_it_back(
    decoder: Decoder,
) -> None:
    rng = random.Random(1)
    for preamble in (ids(rng, 6), ()):
        request = with_chunks(preamble, [ids(rng, 9), ids(rng, 5)], ids(rng, 3))
        gone, behind = (chunk.id for chunk in request.chunks)
        with Engine(decoder, SMALL) as engine:
            found = engine.tombstones.generation
            engine.forget([gone])
            assert list(engine.submit(replace(request, as_of=found))) == alone(decoder, request)
            left = names(engine)
            assert not any(name.endswith((gone, behind)) for name in left)
            list(engine.submit(request))  # brought by somebody who knows of no deletion
            assert sum(name.endswith((gone, behind)) for name in names(engine)) == 2
            engine.run_alone(engine.check_integrity)


def test_a_request_under_way_does_not_bring_it_back_either(decoder: Decoder) -> None:
    rng = random.Random(2)
    gated = GatedDecoder(decoder)
    request = with_chunks(ids(rng, 6), [ids(rng, 20), ids(rng, 20)], ids(rng, 3))
    cfg = replace(SMALL, alone_rows=8, step_rows=8)
    with Engine(gated, cfg) as engine, ThreadPoolExecutor(1) as other:
        ticket = engine.submit(request)
        gated.permits.release(2)  # in the middle of its first chunk
        forgetting = other.submit(engine.forget, [request.chunks[0].id])
        gated.permits.release(10_000)
        forgetting.result(timeout=60)
        assert list(ticket) == alone(decoder, request)
        assert not any(name.endswith(request.chunks[0].id) for name in names(engine))
        engine.run_alone(engine.check_integrity)


def test_deletions_beyond_what_is_remembered_count_for_everybody_who_is_older() -> None:
    a, b, c = (ChunkId(name) for name in "abc")
    stones = Tombstones(most=2)
    stones.add([a])
    stones.add([b])
    assert [stones.is_gone(a, when) for when in (0, 1, 2)] == [True, False, False]
    assert not stones.is_gone(c, 0)
    stones.add([c])  # a is no longer remembered
    assert stones.is_gone(a, 0), "still gone for who found it before"
    assert stones.is_gone(ChunkId("never heard of"), 0), "perhaps: nobody remembers"
    assert not stones.is_gone(a, 1)
    stones.add([])
    assert stones.generation == 3
    stones.add_all()  # nobody knows which
    assert stones.is_gone(ChunkId("never heard of"), 3)
    assert not stones.is_gone(a, 4)
    assert stones.generation == 4


def test_what_one_tenant_deletes_is_there_for_another(decoder: Decoder) -> None:
    rng = random.Random(3)
    for preamble in (ids(rng, 6), ()):
        request = with_chunks(preamble, [ids(rng, 9), ids(rng, 5)], ids(rng, 3))
        gone = request.chunks[0].id
        with Engine(decoder, SMALL) as engine:
            found = engine.tombstones.generation
            for namespace in ("a", "b"):
                list(engine.submit(replace(request, namespace=namespace, as_of=found)))
            exact = request.prompt_ids[: len(request.prompt_ids) - 3]
            engine.forget([gone], ["a"])
            assert engine.tombstones.is_gone(gone, found, "a")
            assert not engine.tombstones.is_gone(gone, found, "b")
            ticket = engine.submit(replace(request, namespace="b", as_of=found))
            assert list(ticket) == alone(decoder, request)
            assert ticket.record is not None
            assert ticket.record.counts["exact"] == len(exact), "its KV is still there"
            engine.forget(None, ["a"])  # any of a's may be gone
            assert not engine.tombstones.is_gone(gone, found, "b")
            assert engine.forget([gone], ["b"]) > 0
            engine.run_alone(engine.check_integrity)


def test_however_much_a_tenant_deletes_deletions_of_others_are_remembered() -> None:
    a, b = ChunkId("a"), ChunkId("b")
    stones = Tombstones(most=2)
    stones.add([a], "small")
    for number in range(5):
        stones.add([ChunkId(str(number))], "large")
    assert stones.is_gone(a, 0, "small")
    assert not stones.is_gone(b, 0, "small"), "nothing of it is forgotten"
    assert stones.is_gone(b, 0, "large")


# ── with a knowledge base ────────────────────────────────────────────────────


@pytest.fixture
def world(chat_model_folder: Path, tmp_path: Path) -> Iterator[tuple[Weave, Interrupted]]:
    decoder, searches = load_decoder(chat_model_folder, device="cpu"), Interrupted()
    with (
        plain_weave(decoder, Tokenizer(chat_model_folder)) as whole,
        whole.over(
            tmp_path,
            KVOptions("isolated", system=whole.system),
            AnswerSettings(whole.system, look_up=searches),
            open_embedder=lambda name: WordEmbedder(),
        ) as weave,
    ):
        weave.ingest(("Drain", "To drain a node, cordon it first."), chunk_kv=True)
        yield weave, searches


@pytest.mark.parametrize("reuse", ["prefix", "full", "reuse"])
def test_a_document_deleted_right_behind_a_search_stays_deleted(
    world: tuple[Weave, Interrupted], reuse: str
) -> None:
    weave, searches = world
    (hit,) = weave.search("drain", 1)
    key, name = weave.library.encoder.exact_key(hit.chunk.token_ids), hit.chunk.id
    assert make_chunk_id(hit.chunk.token_ids) == name
    for _ in range(3):  # it came often enough to be stored for those who bring it
        weave.ask("How do I drain?", k=1, reuse=reuse, sampling=GREEDY)
    (document,) = weave.library.kb.documents()
    searches.then = lambda: weave.remove(document.id)
    answer = weave.ask("How do I drain a node?", k=1, reuse=reuse, sampling=GREEDY)
    assert answer.completion_tokens > 0
    assert weave.library.promotion is not None
    assert weave.library.promotion.wait(30)
    assert not any(each.endswith(name) for each in names(weave.engine))
    assert weave.library.store.flush()
    assert weave.library.store.peek([key])[0].residency is Residency.ABSENT
    assert weave.library.store.num_pinned() == 0
    # the same text from the caller is the caller's own
    for _ in range(2):
        weave.ask("Well?", documents=[hit.chunk.text], reuse="prefix", sampling=GREEDY)
    assert any(each.endswith(name) for each in names(weave.engine))


@pytest.mark.parametrize("when", ["before it is computed", "before it is saved"])
def test_a_chunk_deleted_while_it_is_being_stored_is_not_left_behind(
    world: tuple[Weave, Interrupted], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    weave, _ = world
    seen, encoder = weave.library.promotion, weave.library.encoder
    token_ids = weave.build_prompt("x", ["A quota limits pods."]).chunks[0]
    name, compute = make_chunk_id(token_ids), encoder.run_alone

    def interrupted(job: Callable[[], T]) -> T:
        made = compute(job)
        weave.engine.forget([name])
        return made

    def deleted_first(timeout_s: float) -> bool:
        weave.engine.forget([name])
        return True

    assert seen is not None
    if when == "before it is saved":
        encoder.run_alone = interrupted
    else:
        monkeypatch.setattr(weave.runtime.client.answers, "wait_for_quiet", deleted_first)
    seen.saw(
        weave.library.encoder, [token_ids], at_once={name}, as_of=weave.engine.tombstones.generation
    )
    assert seen.wait(30)
    assert weave.library.store.flush()
    peek = weave.library.store.peek([encoder.exact_key(token_ids)])[0]
    assert peek.residency is Residency.ABSENT


def test_a_conversation_does_not_bring_back_what_was_deleted(
    world: tuple[Weave, Interrupted],
) -> None:
    over, _ = world
    first = over.ask("How many pods?", conversation_id="c", k=1, sampling=GREEDY)
    assert first.explain is not None
    part = first.explain.chunks[0]
    chunk = first.explain.token_ids[part.start : part.start + part.num_tokens]
    history = [
        {"role": "user", "content": "How many pods?"},
        {"role": "assistant", "content": first.text},
    ]

    def brings_it() -> bool:
        later = over.ask(
            "And now?",
            conversation_id="c",
            history=history,
            k=1,
            reuse="prefix",
            nothing_found="answer",
            sampling=GREEDY,
        )
        assert later.explain is not None
        ids, width = later.explain.token_ids, len(chunk)
        return any(ids[at : at + width] == chunk for at in range(len(ids) - width + 1))

    (document,) = over.library.kb.documents()
    text = over.library.kb.search("pods", 1)[0].chunk.text
    assert brings_it()
    over.remove(document.id)
    assert not brings_it(), "the history had it"
    name = make_chunk_id(chunk)
    assert not any(known.endswith(name) for known in names(over.engine))
    over.ingest((document.title, text), chunk_kv=True)
    assert brings_it(), "it is there again, and was not taken for something the history holds"
