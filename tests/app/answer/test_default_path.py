"""What a question gets that says nothing of reuse: what is exact, and fused KV where allowed."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from kvweave import Weave
from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.document_memory import DocumentMemoryConfig
from kvweave.app.library.kv_maker import WantedKV
from kvweave.app.library.library_kv import Retries
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Answer, AnswerStream
from kvweave.config import LibrarySettings, PlannerSettings, QualitySettings, StoreSettings
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.settings import read_settings
from kvweave.errors import RequestError, TierError
from kvweave.fuse.encode.chunk_encoder import Pace
from kvweave.kv.provenance import carries
from kvweave.model.decoder import Decoder
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId
from worlds.auto import GREEDY, QUESTION, TEXTS, World, model, planning_of, weave, world
from worlds.servers import refusing
from worlds.serving import serving
from worlds.weaves import ingest_with_fronts

__all__ = ["model", "weave", "world"]

DOCUMENTS = [text for _, text in TEXTS]
Model = tuple[Decoder, Tokenizer]


@pytest.fixture
def plain(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))  # a machine that was never measured
    with Weave(ModelRuntime(*model, "tiny")) as weave:
        yield weave


def counts(answer: Answer) -> dict[str, int]:
    assert answer.explain is not None
    return answer.explain.counts


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.02)


# ── documents ────────────────────────────────────────────────────────────────


def test_the_same_documents_are_prefilled_once(plain: Weave) -> None:
    first = plain.ask("What is it?", documents=DOCUMENTS, sampling=GREEDY)
    again = plain.ask("And who has it?", documents=DOCUMENTS, sampling=GREEDY)
    assert counts(first)["exact"] == 0
    prompt = plain.build_prompt("And who has it?", DOCUMENTS)
    assert counts(again)["exact"] == len(prompt.token_ids) - len(prompt.question)
    full = plain.ask("And who has it?", documents=DOCUMENTS, sampling=GREEDY, reuse="full")
    assert (full.text, counts(full)["exact"]) == (again.text, 0)


def test_full_reads_nothing_and_leaves_nothing(plain: Weave) -> None:
    for _ in range(2):
        full = plain.ask("What is it?", documents=DOCUMENTS, sampling=GREEDY, reuse="full")
        assert counts(full)["exact"] == 0
    assert counts(plain.ask("What is it?", documents=DOCUMENTS, sampling=GREEDY))["exact"] == 0


def test_tenants_share_no_exact_kv(plain: Weave) -> None:
    asked: dict[str, Any] = {"documents": DOCUMENTS, "sampling": GREEDY}
    plain.ask("What is it?", tenant="a", **asked)
    assert counts(plain.ask("What is it?", tenant="b", **asked))["exact"] == 0
    assert counts(plain.ask("What is it?", tenant="a", **asked))["exact"] > 0


def test_documents_that_come_back_in_another_order_can_be_fused(plain: Weave) -> None:
    asked: dict[str, Any] = {"sampling": GREEDY, "reuse": "weave", "tenant": "a"}
    plain.ask("What is it?", documents=DOCUMENTS[:3], **asked)
    plain.ask("What is it?", documents=DOCUMENTS[2::-1], **asked)
    memory = plain._target.documents
    assert memory is not None
    assert memory.promotion.wait(60)
    third = plain.ask("What?", documents=[DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]], **asked)
    assert third.explain is not None
    tiers = [chunk.tier for chunk in third.explain.chunks]
    assert tiers == ["tree", "host", "host"], "the first has stood in front before"
    other = plain.ask("What?", documents=DOCUMENTS[1:3], **{**asked, "tenant": "b"})
    assert other.explain is not None
    assert {chunk.tier for chunk in other.explain.chunks} == {None}, "another's are unknown"


def test_a_document_that_is_deleted_while_its_kv_is_made_leaves_none(
    plain: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, deleted = WantedKV.encode, list[ChunkId]()

    def encode_and_delete(wanted: WantedKV, pace: Pace) -> None:
        encode(wanted, pace)
        deleted.append(wanted.chunk.id)
        plain.runtime.client.forget([wanted.chunk.id], ("a",))

    monkeypatch.setattr(WantedKV, "encode", encode_and_delete)
    asked: dict[str, Any] = {"sampling": GREEDY, "tenant": "a"}
    plain.ask("What is it?", documents=DOCUMENTS[:3], **asked)
    plain.ask("What is it?", documents=DOCUMENTS[2::-1], **asked)
    memory = plain._target.documents
    assert memory is not None
    assert memory.promotion.wait(60)
    assert deleted
    assert memory.opened_store is not None
    assert memory.opened_store.keys_at_hand(carries(deleted)) == []


def test_tenants_forget_documents_for_themselves_alone_but_for_the_shared_copy(
    model: Model, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    memory = DocumentMemoryConfig(store=StoreSettings(redis_url=redis_url))
    settings = AnswerSettings(documents=memory)
    with (
        redis.Redis.from_url(redis_url) as valkey,
        Weave(ModelRuntime(*model, "tiny"), settings=settings) as weave,
    ):
        valkey.flushdb()
        documents = weave._target.documents
        assert documents is not None
        for tenant in "ab":
            for _ in range(2):
                weave.ask("What?", documents=DOCUMENTS[:1], sampling=GREEDY, tenant=tenant)
        assert documents.promotion.wait(60)
        store = documents.opened_store
        assert store is not None
        assert store.flush()
        assert valkey.dbsize() == 2, "one each"
        ids = weave.build_prompt("What?", DOCUMENTS[:1]).chunks[0]
        weave._target.forget_brought([make_chunk_id(ids)], "a")
        assert valkey.dbsize() == 0
        assert len(store.keys_at_hand(carries([make_chunk_id(ids)]))) == 1, "the other's"


def test_what_a_shared_tier_was_not_rid_of_is_removed_by_itself(
    model: Model, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    retries = partial(Retries, first_s=0.1)
    monkeypatch.setattr("kvweave.app.library.document_memory.Retries", retries)
    settings = AnswerSettings(
        documents=DocumentMemoryConfig(store=StoreSettings(redis_url=redis_url))
    )
    with (
        redis.Redis.from_url(redis_url) as valkey,
        Weave(ModelRuntime(*model, "tiny"), settings=settings) as weave,
    ):
        valkey.flushdb()
        documents = weave._target.documents
        assert documents is not None
        for _ in range(2):
            weave.ask("What?", documents=DOCUMENTS[:1], sampling=GREEDY, tenant="a")
        assert documents.promotion.wait(60)
        store = documents.opened_store
        assert store is not None
        assert store.flush()
        name = make_chunk_id(weave.build_prompt("What?", DOCUMENTS[:1]).chunks[0])
        with refusing(valkey, "scan", "del", "unlink"):
            for tenant in "ab":
                with pytest.raises(TierError):
                    weave._target.forget_brought([name], tenant)
            assert valkey.dbsize() == 1
            assert not store.inventory.removed.existing([name])
        wait_until(lambda: valkey.dbsize() == 0, "nobody tried again")
        wait_until(lambda: bool(store.inventory.removed.existing([name])), "still owed")


def test_a_memory_that_is_off_keeps_nothing(model: Model) -> None:
    settings = AnswerSettings(documents=DocumentMemoryConfig(capacity_bytes=0))
    with Weave(ModelRuntime(*model, "tiny"), settings=settings) as weave:
        assert weave._target.documents is None
        for _ in range(2):
            answer = weave.ask("What?", documents=DOCUMENTS, sampling=GREEDY)
        assert counts(answer)["exact"] > 0, "exact KV costs nothing and stays"


def test_documents_of_another_who_asked_the_same_are_not_taken_into_a_history(
    plain: Weave,
) -> None:
    asked: dict[str, Any] = {"sampling": GREEDY}
    plain.ask("What is it?", documents=DOCUMENTS[:1], **asked)
    plain.ask("What is it?", documents=DOCUMENTS[1:2], **asked)
    said = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Mine."}]
    answer = plain.ask("And now?", documents=DOCUMENTS[:1], history=said, **asked)
    assert answer.explain is not None
    prompt = plain.runtime.tokenizer.decode(answer.explain.token_ids)
    assert DOCUMENTS[0][:60] in prompt
    assert DOCUMENTS[1][:60] not in prompt


def test_planners_of_system_prompts_that_are_gone_go_too(world: World, weave: Weave) -> None:
    world.set_machine()
    for number in range(20):
        weave.ask(QUESTION, sampling=GREEDY, reuse="auto", system=f"Rule {number}.", k=1)
    assert len(weave._target.router._planners) <= 16


def test_a_configured_reuse_holds_for_chats_too(model: Model) -> None:
    settings = AnswerSettings(
        usual=QuestionDefaults(QualitySettings(reuse="full"), LibrarySettings(k=2))
    )
    with Weave(ModelRuntime(*model, "tiny"), settings=settings) as weave:
        for _ in range(2):
            answer = said(weave.chat([{"role": "user", "content": "Hello " * 60}], sampling=GREEDY))
        assert counts(answer)["exact"] == 0


# ── conversations and plain prompts ──────────────────────────────────────────


def said(stream: AnswerStream) -> Answer:
    with_closing = stream.finish()
    stream.close()
    return with_closing


def test_a_chat_computes_only_what_is_new(plain: Weave, model: Model) -> None:
    tokenizer = model[1]
    messages = [{"role": "system", "content": "You know all about pods. " * 40}]
    exact: list[int] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: where are the pods?"})
        answer = said(plain.chat(messages, sampling=GREEDY))
        assert answer.prompt_tokens == len(tokenizer.encode_chat(messages)), "the same prompt"
        exact.append(counts(answer)["exact"])
        assert answer.text == said(plain.chat(messages, sampling=GREEDY, reuse="full")).text
        messages.append({"role": "assistant", "content": answer.text})
    assert exact[0] == 0
    assert exact == sorted(set(exact)), "each turn finds the one before"
    assert counts(answer)["computed"] < 0.3 * answer.prompt_tokens


def test_a_long_message_is_shared_as_far_as_it_is_the_same(plain: Weave) -> None:
    pasted = " ".join(DOCUMENTS)
    first = [{"role": "user", "content": f"{pasted}\nWhat is it?"}]
    other = [{"role": "user", "content": f"{pasted}\nWho has it?"}]
    said(plain.chat(first, sampling=GREEDY))
    answer = said(plain.chat(other, sampling=GREEDY))
    assert counts(answer)["exact"] > 0.5 * answer.prompt_tokens
    assert counts(said(plain.chat(other, sampling=GREEDY, tenant="b")))["exact"] == 0


def test_a_prompt_to_complete_is_shared_too(plain: Weave) -> None:
    text = " ".join(DOCUMENTS)
    said(plain.complete(text, sampling=GREEDY))
    answer = said(plain.complete(text + " And so", sampling=GREEDY))
    assert counts(answer)["exact"] > 0.5 * answer.prompt_tokens
    full = said(plain.complete(text + " And so", sampling=GREEDY, reuse="full"))
    assert (full.text, counts(full)["exact"]) == (answer.text, 0)


def test_a_fusing_strategy_needs_chunks(plain: Weave) -> None:
    with pytest.raises(RequestError, match="'weave' needs chunks; a prompt without any takes auto"):
        plain.chat([{"role": "user", "content": "Hello"}], reuse="weave")


def test_a_question_without_chunks_says_why(plain: Weave) -> None:
    answer = plain.ask("What is it?", sampling=GREEDY)
    assert answer.explain is not None
    assert answer.explain.why == Reason.NO_CHUNKS


def test_through_http_chat_and_documents_reuse_what_is_exact(plain: Weave) -> None:
    with serving(plain) as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(**body: Any) -> dict[str, int]:
            body = {"max_tokens": 4, "temperature": 0, "explain": True, **body}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            found = reply.json()["explain"]["tokens"]
            assert isinstance(found, dict)
            return found

        user = [{"role": "user", "content": "What is it, and who has it?"}]
        assert ask(messages=user, documents=DOCUMENTS)["exact"] == 0
        assert ask(messages=user, documents=DOCUMENTS)["computed"] < 60
        assert ask(messages=user, documents=DOCUMENTS, reuse="full")["exact"] == 0
        long = [{"role": "system", "content": "Be brief. " * 100}, *user]
        assert ask(messages=long)["exact"] == 0
        assert ask(messages=long)["computed"] < 40
        assert ask(messages=long, reuse="full")["exact"] == 0
        refused = client.post("/v1/chat/completions", json={"messages": user, "reuse": "weave"})
        assert refused.status_code == 400
        assert "needs 'kb' or 'documents'" in refused.json()["error"]["message"]


# ── exact and fused together ─────────────────────────────────────────────────


def test_a_fused_path_that_comes_back_becomes_exact_in_idle_time(
    world: World, weave: Weave
) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    first = weave.ask(QUESTION, sampling=GREEDY)
    assert first.decision is not None
    assert first.decision.plan.strategy == "epic"
    second = weave.ask(QUESTION, sampling=GREEDY)
    assert second.decision is not None
    assert second.decision.plan.strategy == "epic", "nothing was computed of it yet"
    tree = weave.engine.tree
    wait_until(lambda: len(tree) >= 1 + len(TEXTS), "idle time computes the path")
    third = weave.ask(QUESTION, sampling=GREEDY)
    assert counts(third)["computed"] < 60
    assert counts(third)["reused"] == 0
    assert third.text == weave.ask(QUESTION, sampling=GREEDY, reuse="full").text


def test_a_named_strategy_honours_a_free_order_or_refuses_it(world: World, weave: Weave) -> None:
    world.set_machine()
    weave.ask(QUESTION, sampling=GREEDY, reuse="prefix")
    chunks = [hit.chunk.token_ids for hit in weave.search(QUESTION, 5)]
    texts = [world.tokenizer.decode(ids) for ids in chunks]
    weave.ask(QUESTION, documents=texts, sampling=GREEDY, reuse="prefix")
    # the turned order was never computed, so nothing of it is exact unless the chunks are moved
    free = weave.ask(
        "And why?", documents=texts[::-1], sampling=GREEDY, reuse="prefix", order="free"
    )
    assert counts(free)["computed"] < 60
    with pytest.raises(RequestError, match="order 'free' gains nothing with reuse 'full'"):
        weave.ask(QUESTION, sampling=GREEDY, reuse="full", order="free")


def test_an_order_may_be_usual_for_a_knowledge_base(world: World, weave: Weave) -> None:
    world.set_machine()
    texts = [world.tokenizer.decode(hit.chunk.token_ids) for hit in weave.search(QUESTION, 5)]
    weave.ask(QUESTION, documents=texts, sampling=GREEDY, reuse="prefix")
    weave.kb.set_order("free")

    def turned(question: str, order: str | None) -> Answer:
        return weave.ask(
            question, documents=texts[::-1], sampling=GREEDY, reuse="prefix", order=order
        )

    assert counts(turned("And who?", "as_found"))["computed"] > 60, "the question comes first"
    weave.kb.set_order("free")
    # asked for nothing, it refuses nothing
    assert weave.ask("And how?", documents=texts, sampling=GREEDY, reuse="full").text
    assert read_settings(weave.kb.folder) == weave.kb.settings
    weave.kb.set_order(None)
    assert "order" not in (weave.kb.folder / "kb.json").read_text(), "as older ones read it"


def test_a_named_strategy_counts_chunks_and_keeps_what_the_settings_say(world: World) -> None:
    world.set_machine()
    with world.open(AnswerSettings(planner=PlannerSettings(window=7, tree_uses=2))) as weave:
        ingest_with_fronts(weave, *TEXTS)
        texts = [world.tokenizer.decode(hit.chunk.token_ids) for hit in weave.search(QUESTION, 5)]

        def tree_after(question: str) -> int:
            asked = {"documents": texts, "sampling": GREEDY, "reuse": "prefix", "order": "free"}
            weave.ask(question, **asked)
            return len(weave.engine.tree)

        before = tree_after("And why?")
        assert tree_after("And how?") == before + len(texts), "all came twice"
        assert tree_after("And who?") == before + len(texts)
        planner = planning_of(weave)._planner
        assert (planner.tree_uses, planner.accesses._window) == (2, 7)


def test_a_question_moves_chunks_where_that_is_usual(world: World, weave: Weave) -> None:
    world.set_machine()
    texts = [world.tokenizer.decode(hit.chunk.token_ids) for hit in weave.search(QUESTION, 5)]
    weave.ask(QUESTION, documents=texts, sampling=GREEDY, reuse="prefix")
    weave.kb.set_order("free")
    usual = weave.ask("And why?", documents=texts[::-1], sampling=GREEDY, reuse="prefix")
    assert counts(usual)["computed"] < 60
