"""A gateway answers as the engine behind it does: chat, documents, knowledge bases, streams."""

import gc
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kvweave.serve.access.api_keys import parse_keys
from worlds.gateways import GatewayWorld, gateway_over
from worlds.serving import KbServer, user
from worlds.tiny_corpus import make_text

NOTES = [
    {"title": "Drain", "text": "To drain a node, cordon it first, then evict its pods."},
    {"title": "Quota", "text": "A quota limits the pods and volumes of a namespace."},
    {"title": "Probe", "text": "A probe asks the kubelet whether a pod is ready."},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def chat(url: str, question: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": user(question), "explain": True, **GREEDY, **fields}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def said(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def counts(reply: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of the answer; what was cached depends on who asked before."""
    return reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]


def fill(url: str, name: str) -> None:
    for note in NOTES:
        reply = httpx.post(f"{url}/v1/kb/{name}/documents", json=note, timeout=60)
        assert reply.status_code == 200, reply.text


@pytest.fixture(scope="module")
def filled(front: GatewayWorld, engine: KbServer) -> GatewayWorld:
    """The same documents on both sides."""
    fill(front.url, "cluster")
    fill(engine.url, "cluster")
    return front


def test_a_chat_is_what_the_engine_says(front: GatewayWorld, engine: KbServer) -> None:
    through, direct = chat(front.url, "Say hello."), chat(engine.url, "Say hello.")
    assert said(through) == said(direct)
    assert counts(through) == counts(direct)
    assert through["choices"][0]["finish_reason"] == direct["choices"][0]["finish_reason"]
    assert through["explain"]["upstream"]["upstream"] == engine.url


def test_an_answer_from_a_knowledge_base_is_the_engines_own(
    filled: GatewayWorld, engine: KbServer
) -> None:
    asked = {"kb": "cluster", "k": 2, "reuse": "prefix"}
    through = chat(filled.url, "How do I drain a node?", **asked)
    direct = chat(engine.url, "How do I drain a node?", **asked)
    assert said(through) == said(direct)
    assert counts(through) == counts(direct), "the very same prompt"
    assert len(through["explain"]["chunks"]) == 2
    starts = [(chunk["start"], chunk["tokens"]) for chunk in through["explain"]["chunks"]]
    assert starts == [(c["start"], c["tokens"]) for c in direct["explain"]["chunks"]]
    again = chat(filled.url, "How do I drain a node?", **asked)
    assert again["explain"]["tokens"]["exact"] > 0, "the engine's tree has the chunks by then"
    assert again["explain"]["upstream"]["matched_tokens"] > 0


def test_a_reply_names_its_sources_as_the_engine_does(
    filled: GatewayWorld, engine: KbServer
) -> None:
    asked = {"kb": "cluster", "k": 2, "reuse": "prefix"}
    through, direct = (
        chat(url, "How is a probe drained?", **asked)["sources"] for url in (filled.url, engine.url)
    )
    assert len(through) == 2
    # documents have ids of their own
    unknown = {"document": None, "document_id": None, "tier": None, "fate": None}
    assert [{**s, **unknown} for s in through] == [{**s, **unknown} for s in direct]
    assert [s["fate"] for s in through] == [None, None]
    documents = httpx.get(f"{filled.url}/v1/kb/cluster/documents", timeout=60).json()["data"]
    titles = {document["id"]: document["title"] for document in documents}
    assert [titles[s["document"]] for s in through] == [s["title"] for s in through]
    (brought,) = chat(filled.url, "Why?", documents=[NOTES[0]["text"]])["sources"]
    assert (brought["document"], brought["score"], brought["cited_as"]) == (None, None, 1)
    body = {"messages": user("Why?"), "kb": "cluster", "k": 1, "stream": True, **GREEDY}
    reply = httpx.post(f"{filled.url}/v1/chat/completions", json=body, timeout=60).text
    events = [json.loads(e[6:]) for e in reply.split("\n\n") if e.startswith("data: {")]
    (told,) = [event["sources"] for event in events if "sources" in event]
    assert told[0]["document_id"] in titles
    where = f"{filled.url}/v1/kb/cluster/chunks/{through[0]['chunk']}"
    assert httpx.get(where, timeout=60).json()["asked"] > 0, "it was in a prompt"


def test_documents_without_a_knowledge_base_go_through(
    front: GatewayWorld, engine: KbServer
) -> None:
    documents = [note["text"] for note in NOTES]
    through = chat(front.url, "What is a probe?", documents=documents, reuse="prefix")
    direct = chat(engine.url, "What is a probe?", documents=documents, reuse="prefix")
    assert (said(through), counts(through)) == (said(direct), counts(direct))


def test_a_stream_has_the_same_text_in_pieces(filled: GatewayWorld) -> None:
    asked = {"kb": "cluster", "k": 1, "reuse": "prefix"}
    whole = said(chat(filled.url, "What is a quota?", **asked))
    with OpenAI(base_url=f"{filled.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=user("What is a quota?"),  # type: ignore[arg-type]
                stream=True,
                stream_options={"include_usage": True},
                temperature=0,
                max_tokens=8,
                extra_body=asked,
            )
        )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1, "not all at once"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_an_answer_that_is_closed_between_two_pieces_leaves_nothing_behind(
    front: GatewayWorld,
) -> None:
    (replica,) = front.gateway.fleet.replicas
    gc.disable()  # nothing is left for it to tidy up
    try:
        answer = front.gateway.chat(user("Say much."), sampling=front.gateway.sampling())
        assert next(iter(answer)).text is not None
        assert replica.load == 1
        answer.close()
        assert (replica.load, replica.exchanges) == (0, set())
    finally:
        gc.enable()


def test_completions_and_logprobs_are_passed_on(front: GatewayWorld, engine: KbServer) -> None:
    body = {"prompt": "The quick brown", "logprobs": 2, **GREEDY}
    through, direct = (
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        for url in (front.url, engine.url)
    )
    assert through["text"] == direct["text"]
    assert through["logprobs"]["tokens"] == direct["logprobs"]["tokens"]
    assert through["logprobs"]["top_logprobs"] == direct["logprobs"]["top_logprobs"]
    chatted = [chat(url, "Hi", logprobs=True, top_logprobs=2) for url in (front.url, engine.url)]
    one, other = (c["choices"][0]["logprobs"]["content"] for c in chatted)
    assert [token["token"] for token in one] == [token["token"] for token in other]
    for a, b in zip(one, other, strict=True):  # the second was answered beside an exact prefix
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
        assert [t["token"] for t in a["top_logprobs"]] == [t["token"] for t in b["top_logprobs"]]


def test_a_conversation_does_not_bring_a_chunk_twice(filled: GatewayWorld) -> None:
    asked = {"kb": "cluster", "k": 3, "conversation_id": "c1"}
    first = chat(filled.url, "How do I drain a node?", **asked)
    turns = [
        *user("How do I drain a node?"),
        {"role": "assistant", "content": said(first)},
        *user("How do I drain a node now?"),
    ]
    second = chat(filled.url, "", messages=turns, **asked)
    assert second["explain"]["left_out"] == 3
    assert len(second["explain"]["chunks"]) == 3, "they stand in the history, once"


def test_a_removed_document_stands_in_no_history(front: GatewayWorld) -> None:
    fill(front.url, "going")
    asked = {"kb": "going", "k": 1, "conversation_id": "c2"}
    first = chat(front.url, "What is a probe?", **asked)
    documents = httpx.get(f"{front.url}/v1/kb/going/documents", timeout=60).json()["data"]
    for document in documents:
        gone = httpx.delete(f"{front.url}/v1/kb/going/documents/{document['id']}", timeout=60)
        assert gone.status_code == 200
    turns = [
        *user("What is a probe?"),
        {"role": "assistant", "content": said(first)},
        *user("What else?"),
    ]
    second = chat(front.url, "", messages=turns, **asked)
    assert second["explain"]["chunks"] == []


def test_chunks_that_may_move_stand_where_more_is_exact(front: GatewayWorld) -> None:
    for number in range(3):  # every search finds all of them, in one order or another
        note = {"title": f"n{number}", "text": make_text(18, number)}
        sent = httpx.post(f"{front.url}/v1/kb/moved/documents", json=note, timeout=60)
        assert sent.status_code == 200, sent.text
    assert httpx.patch(f"{front.url}/v1/kb/moved", json={"order": "free"}).status_code == 200
    asked = {"kb": "moved", "k": 3}
    found = {
        question: [h["id"] for h in _search(front.url, "moved", question)]
        for question in ("drain a pod", "label a claim", "image registry", "secret volume quota")
    }
    # two questions that find the same chunks in another order
    pairs = [(a, b) for a in found for b in found if a != b and set(found[a]) == set(found[b])]
    first, second = next((a, b) for a, b in pairs if found[a] != found[b])
    chat(front.url, first, **asked)
    moved = chat(front.url, second, **asked)
    assert moved["explain"]["upstream"]["ordered_by"] == "tree"
    assert moved["explain"]["order"] == "free, says its knowledge base"
    chunk_tokens = sum(chunk["tokens"] for chunk in moved["explain"]["chunks"])
    assert moved["explain"]["tokens"]["exact"] >= chunk_tokens


def _search(url: str, name: str, query: str) -> list[dict[str, Any]]:
    body = {"query": query, "k": 3}
    found = httpx.post(f"{url}/v1/kb/{name}/search", json=body, timeout=60).json()["data"]
    return list(found)


def test_without_the_models_tokenizer_prompts_go_as_text(
    engine: KbServer, tmp_path: Path, chat_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the embedder's tokenizer, which cuts then, is not on a test machine: any other will do
    monkeypatch.setattr("kvweave.gateway.gateway.DEFAULT_EMBEDDER", str(chat_model_folder))
    with gateway_over([engine.url], tmp_path, tokenizer=None) as world:
        assert "text" in world.gateway.words
        fill(world.url, "cluster")
        reply = chat(world.url, "How do I drain a node?", kb="cluster", k=2)
        assert said(reply)
        assert reply["usage"]["prompt_tokens"] > 60, "with the passages"
        assert [source["span"] for source in reply["sources"]] == [None, None]
        turns = [*user("How?"), {"role": "assistant", "content": "So."}, *user("Why?")]
        asked = {"messages": turns, "kb": "cluster", "k": 2, "conversation_id": "t"}
        assert chat(world.url, "", **asked)["choices"]


def test_speculation_computes_the_prompt_before_the_search_is_over(filled: GatewayWorld) -> None:
    for number in range(40):
        note = {"title": f"n{number}", "text": make_text(20, number)}
        httpx.post(f"{filled.url}/v1/kb/wide/documents", json=note, timeout=60)
    asked = {"kb": "wide", "k": 2, "reuse": "prefix"}
    plain = chat(filled.url, "Which taint is a toleration for?", speculate="off", **asked)
    guessed = chat(filled.url, "Which taint is a toleration for?", speculate="on", **asked)
    assert said(plain) == said(guessed)
    assert guessed["explain"]["speculation"]["stages"] >= 1


def test_what_an_engine_refuses_is_refused_in_its_words(front: GatewayWorld) -> None:
    body = {"messages": user("word " * 3000), **GREEDY}
    reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "tokens" in reply.json()["error"]["message"]


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(
    front: GatewayWorld,
) -> None:
    body = {"messages": user("Why?"), "documents": ["x" * 33 * 512], **GREEDY}
    reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "characters, the model's context holds 512" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kb": "nowhere"}, "no knowledge base"),
        ({"model": "another"}, "no model"),
        ({"kv_transfer_params": {"kvweave": {"chunks": []}}}, "this is a gateway"),
    ],
)
def test_what_a_gateway_refuses(front: GatewayWorld, fields: dict[str, Any], words: str) -> None:
    body = {"messages": user("Hi"), **GREEDY, **fields}
    reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code in (400, 404)
    assert words in reply.json()["error"]["message"]


def test_waiting_for_chunk_kv_is_refused(front: GatewayWorld) -> None:
    where = f"{front.url}/v1/kb/waited/documents?wait_for_kv=true"
    reply = httpx.post(where, json=NOTES[0], timeout=60)
    assert reply.status_code == 400
    assert "a gateway makes no chunk KV" in reply.json()["error"]["message"]


def test_tenants_share_nothing(engine: KbServer, tmp_path: Path, chat_model_folder: Path) -> None:
    keys = parse_keys(["sk-one-long:one", "sk-two-long:two"])
    question = "What does the controller of a cluster schedule, and what does it evict?"
    with gateway_over([engine.url], tmp_path, tokenizer=chat_model_folder, keys=keys) as world:
        exact = []
        for key in ("sk-one-long", "sk-one-long", "sk-two-long"):
            headers = {"Authorization": f"Bearer {key}"}
            documents = [make_text(40, 7)]
            body = {"messages": user(question), "documents": documents, "explain": True, **GREEDY}
            body["reuse"] = "prefix"
            where = f"{world.url}/v1/chat/completions"
            reply = httpx.post(where, json=body, headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text
            exact.append(reply.json()["explain"]["tokens"]["exact"])
    assert exact[1] > exact[0], "its own prompt is found again"
    assert exact[2] == exact[0], "another's is not"


def test_metrics_tell_of_every_upstream(front: GatewayWorld, engine: KbServer) -> None:
    chat(front.url, "Say hello.")
    page = httpx.get(f"{front.url}/metrics", timeout=60).text
    assert f'kvweave_upstream_up{{upstream="{engine.url}"}} 1.0' in page
    assert 'outcome="answered"' in page
    assert "kvweave_upstream_retries_left 64.0" in page


def test_the_models_of_a_gateway_are_the_upstreams(front: GatewayWorld) -> None:
    card = httpx.get(f"{front.url}/v1/models", timeout=60).json()["data"][0]
    assert (card["id"], card["kv_transfer"]) == ("tiny", False)
    assert card["max_model_len"] == 512
    ready = httpx.get(f"{front.url}/readyz", timeout=60)
    assert json.loads(ready.text)["status"] == "ready"
