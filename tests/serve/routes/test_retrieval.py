"""How chunks are found for a chat, over HTTP: by vector, words or both, with a least score, among
documents with some metadata; and what is said where nothing is."""

import json
from typing import Any

import httpx
import pytest

from kvweave.app.answer.submitting import NOTHING_TEXT
from worlds.serving import KbServer, user

DRAIN = {"title": "Drain", "text": "The drain of node nine: cordon it, evict its pods.", "key": "d"}
QUOTA = {"title": "Quota", "text": "The quota of team nine limits pods and volumes.", "key": "q"}
LAMP = {"title": "Lamp", "text": "The lamp of room nine is 31 cm high.", "key": "l"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
NAME = "found"


@pytest.fixture(scope="module")
def filled(kb_server: KbServer) -> KbServer:
    meta = [{"part": "ops", "year": 2023}, {"part": "ops", "year": 2024}, {"part": "home"}]
    for document, said in zip((DRAIN, QUOTA, LAMP), meta, strict=True):
        url = f"{kb_server.url}/v1/kb/{NAME}/documents"
        reply = httpx.post(url, json={**document, "metadata": said}, timeout=60)
        assert reply.status_code == 200, reply.text
    return kb_server


def ask(url: str, question: str = "pods of nine", **fields: Any) -> dict[str, Any]:
    body = {"messages": user(question), "kb": NAME, **GREEDY, **fields}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def titles(reply: dict[str, Any]) -> list[str]:
    return [source["title"] for source in reply["sources"]]


def search(url: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"query": "pods of nine", **fields}
    reply = httpx.post(f"{url}/v1/kb/{NAME}/search", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"])


@pytest.mark.parametrize("retrieval", ["vector", "words", "hybrid"])
def test_a_chat_is_made_from_what_a_search_finds(filled: KbServer, retrieval: str) -> None:
    hits = search(filled.url, retrieval=retrieval, k=2)
    sources = ask(filled.url, retrieval=retrieval, k=2)["sources"]
    assert [s["chunk"] for s in sources] == [h["id"] for h in hits]
    assert [s["score"] for s in sources] == pytest.approx([h["score"] for h in hits], abs=1e-6)
    if retrieval == "words":
        assert "Lamp" not in titles(ask(filled.url, "pods", retrieval=retrieval, k=3))


def test_guesses_are_for_searches_that_have_stages(filled: KbServer) -> None:
    for how in ({"retrieval": "words"}, {"filter": {"part": "ops"}}):
        told = ask(filled.url, speculate="on", explain=True, **how)["explain"]
        assert told["speculation"] is None
        assert told["not_guessed"].startswith("this search has no stages: ")
    for retrieval in ("vector", "hybrid"):
        told = ask(filled.url, speculate="on", explain=True, retrieval=retrieval)["explain"]
        assert told["speculation"] is not None


def test_a_filter_and_a_least_score_choose_the_chunks(filled: KbServer) -> None:
    assert sorted(titles(ask(filled.url, filter={"part": "ops"}))) == ["Drain", "Quota"]
    assert titles(ask(filled.url, filter={"part": "ops", "year": {"gte": 2024}})) == ["Quota"]
    scores = [hit["score"] for hit in search(filled.url, k=3)]
    assert len(ask(filled.url, min_score=scores[1], k=3)["sources"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_found_is_said_and_no_model_is_asked(filled: KbServer, stream: bool) -> None:
    body = {"messages": user("pods?"), "kb": NAME, "filter": {"part": "moon"}, "stream": stream}
    reply = httpx.post(f"{filled.url}/v1/chat/completions", json={**body, **GREEDY}, timeout=60)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        end = next(e for e in events if "nothing_found" in e)
        assert end["choices"][0]["finish_reason"] == "stop"
    else:
        end = reply.json()
        text = end["choices"][0]["message"]["content"]
        assert end["usage"]["prompt_tokens"] == end["usage"]["completion_tokens"] == 0
    assert text == NOTHING_TEXT
    assert (end["nothing_found"], end["sources"]) == (True, [])
    page = httpx.get(f"{filled.url}/metrics", timeout=60).text
    assert "kvweave_nothing_found_total 0.0" not in page


def test_who_wants_an_answer_from_nothing_gets_one(filled: KbServer) -> None:
    reply = ask(filled.url, filter={"part": "moon"}, nothing_found="answer")
    assert reply["nothing_found"] is False
    assert reply["usage"]["prompt_tokens"] > 0
    assert reply["choices"][0]["message"]["content"] != NOTHING_TEXT


def test_a_conversation_that_holds_chunks_goes_on_without_new_ones(filled: KbServer) -> None:
    how = {"conversation_id": "holds"}
    first = ask(filled.url, "lamp of nine", k=1, **how)
    said = first["choices"][0]["message"]["content"] or "…"
    messages = [*user("lamp of nine"), {"role": "assistant", "content": said}, *user("And?")]
    again = ask(filled.url, messages=messages, filter={"part": "moon"}, **how)
    assert again["nothing_found"] is False
    alone = ask(filled.url, messages=messages, filter={"part": "moon"})
    assert alone["nothing_found"] is True, "no conversation, no chunks in it"


def test_a_follow_up_is_searched_for_as_the_model_puts_it(filled: KbServer) -> None:
    messages = [*user("lamp?"), {"role": "assistant", "content": "31 cm."}, *user("And pods?")]
    plain = ask(filled.url, messages=messages)
    assert plain["query"] is None
    reply = ask(filled.url, messages=messages, rewrite=True)
    # a tiny model of random weights says anything, and that is searched for
    library = filled.libraries.lend("", NAME)
    try:
        hits = library.thing.kb.search(reply["query"] or "And pods?", 5)
    finally:
        library.give_back()
    assert [s["chunk"] for s in reply["sources"]] == [hit.chunk.id for hit in hits]
    assert ask(filled.url, rewrite=True)["query"] is None, "a first question is no follow-up"
    same = reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert same, "three chunks there are in all: the prompt has the question as it was asked"


def test_cited_sentences_reach_the_client(filled: KbServer) -> None:
    plain = ask(filled.url, max_tokens=16)["choices"][0]["message"]["content"]
    reply = ask(filled.url, max_tokens=16, cite=True)
    text = reply["choices"][0]["message"]["content"]
    for source in reply["sources"]:
        text = text.replace(f" [{source['cited_as']}]", "")
    assert text == plain


def test_hits_say_where_they_are_and_what_would_become_of_them(kb_server: KbServer) -> None:
    url = f"{kb_server.url}/v1/kb/fated"
    httpx.post(f"{url}/documents?wait_for_kv=true", json=DRAIN, timeout=60)
    httpx.post(f"{url}/documents", json=QUOTA, timeout=60)
    body = {"query": "nine pods", "k": 2}
    found = httpx.post(f"{url}/search", json=body, timeout=60).json()["data"]
    hits = {hit["title"]: hit for hit in found}
    assert hits["Drain"]["fate"] == "reused"
    assert hits["Drain"]["tier"] is not None
    assert (hits["Quota"]["fate"], hits["Quota"]["tier"]) == ("computed", None)
    for document in (DRAIN, QUOTA):
        start, end = hits[document["title"]]["chars"]
        assert document["text"][start:end].strip() == document["text"]


def test_a_long_text_keeps_its_metadata(kb_server: KbServer) -> None:
    """Its JSON is read in another process."""
    url = f"{kb_server.url}/v1/kb/long-with-metadata/documents"
    said = {f"key{i}": f"{'x' * 40}{i}" for i in range(32)}
    body = {"title": "Long", "text": "pods and nodes. " * 20_000, "metadata": said}
    assert httpx.post(url, json=body, timeout=120).status_code == 200
    (document,) = httpx.get(url, timeout=60).json()["data"]
    assert document["metadata"] == said


def test_files_of_a_form_have_the_metadata_of_the_query(kb_server: KbServer) -> None:
    url = f"{kb_server.url}/v1/kb/forms/documents"
    files = {"file": ("a.md", b"A file about pods.")}
    said = json.dumps({"year": 2020, "team": "nine"})
    assert httpx.post(url, files=files, params={"metadata": said}, timeout=60).status_code == 200
    (document,) = httpx.get(url, timeout=60).json()["data"]
    assert document["metadata"] == {"year": 2020, "team": "nine"}
    whole = httpx.get(f"{url}/{document['id']}", timeout=60).json()
    assert whole["metadata"] == document["metadata"]
    for bad in ("[]", "{", '{"a": null}', "5"):
        reply = httpx.post(url, files=files, params={"metadata": bad}, timeout=60)
        assert reply.status_code == 400, bad
