"""`sources` in replies: which chunks an answer was made from, where they stand, what became of
them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Document, Sampling, Weave
from worlds.serving import KbServer, make_libraries, make_weave, serving, user

# texts of their own: other tests ask the same engine, whose tree would hold their paths
DRAIN = {"title": "Drain", "text": "To drain this node, cordon it; only then evict its pods."}
QUOTA = {"title": "Quota", "text": "This quota limits pods and volumes of the one namespace."}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
# streamed: the page of Open WebUI takes a "document" for a list of texts, and breaks
STREAMED = {"cited_as", "document_id", "title", "chunk", "score", "span", "tier", "fate"}
FIELDS = {"document", *STREAMED}


@pytest.fixture(scope="module")
def filled(kb_server: KbServer) -> KbServer:
    for document in (DRAIN, QUOTA):
        url = f"{kb_server.url}/v1/kb/sourced/documents?wait_for_kv=true"
        assert httpx.post(url, json=document, timeout=60).status_code == 200
    return kb_server


def ask(url: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": user("How do I drain a node?"), **GREEDY, **fields}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_reply_names_its_chunks_where_they_stand_and_what_became_of_them(
    filled: KbServer,
) -> None:
    reply = ask(filled.url, kb="sourced", reuse="reuse", explain=True)
    first, second = reply["sources"]
    assert set(first) == FIELDS
    assert first["document"] == first["document_id"]
    assert (first["title"], second["title"]) == ("Drain", "Quota")
    assert (first["cited_as"], second["cited_as"]) == (1, 2)
    assert first["score"] >= second["score"]
    documents = httpx.get(f"{filled.url}/v1/kb/sourced/documents").json()["data"]
    assert {d["id"]: d["title"] for d in documents} == {
        first["document_id"]: "Drain",
        second["document_id"]: "Quota",
    }
    explained = {(c["start"], c["start"] + c["tokens"]): c for c in reply["explain"]["chunks"]}
    for source in (first, second):
        chunk = explained[tuple(source["span"])]
        assert (source["fate"], source["tier"]) == (chunk["state"], chunk["tier"])
    assert "reused" in {first["fate"], second["fate"]}
    chunk = httpx.get(f"{filled.url}/v1/kb/sourced/chunks/{first['chunk']}").json()
    assert "evict its pods" in chunk["text"]
    span = first["span"]
    assert span[1] - span[0] == chunk["tokens"]


def test_the_span_holds_the_very_tokens_of_the_chunk(filled: KbServer) -> None:
    reply = ask(filled.url, kb="sourced", reuse="reuse")
    details = httpx.get(f"{filled.url}/v1/answers/{reply['id']}", timeout=60).json()
    for source, document in zip(reply["sources"], (DRAIN, QUOTA), strict=True):
        start, end = source["span"]
        assert document["text"] in "".join(details["tokens"]["texts"][start:end])


def test_a_stream_has_them_in_the_chunk_that_ends_the_answer(filled: KbServer) -> None:
    body = {"messages": user("Drain?"), "kb": "sourced", "stream": True, **GREEDY}
    url = f"{filled.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    with_sources = [c for c in chunks if "sources" in c]
    assert len(with_sources) == 1
    assert with_sources[0]["choices"][0]["finish_reason"] is not None
    assert {s["title"] for s in with_sources[0]["sources"]} == {"Drain", "Quota"}
    assert {frozenset(s) for s in with_sources[0]["sources"]} == {frozenset(STREAMED)}


def test_documents_of_the_request_are_sources_without_an_id_or_a_score(url: str) -> None:
    documents = [{"title": "Ports", "text": "A port is open."}, "Whales sing.", "Whales sing."]
    sources = ask(url, documents=documents)["sources"]
    assert [s["title"] for s in sources] == ["Ports", "", ""]
    assert {s["document_id"] for s in sources} == {s["score"] for s in sources} == {None}
    assert sources[1]["chunk"] == sources[2]["chunk"]
    assert sources[1]["span"] != sources[2]["span"], "brought twice, it stands there twice"


def test_a_chat_without_chunks_says_nothing_of_them(url: str) -> None:
    """Open WebUI puts its own `sources` beside what a reply has, and a reply's go before."""
    assert not {"sources", "nothing_found", "query"} & set(ask(url))


def test_questions_that_were_not_answered_are_one_with_the_next(url: str) -> None:
    """Open WebUI leaves an answer out that failed, or was stopped before its first word."""
    unanswered = [{"role": "user", "content": text} for text in ("How do I drain?", "And a port?")]
    before = [*user("Hello?"), {"role": "assistant", "content": "Hello!"}]
    documents = [{"title": "Ports", "text": "A port is open."}]
    for history in ([], before):
        apart = ask(url, documents=documents, messages=[*history, *unanswered])
        joined = [*history, *user("How do I drain?\n\nAnd a port?")]
        whole = ask(url, documents=documents, messages=joined)
        assert apart["choices"] == whole["choices"]
        assert apart["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_chunk_that_the_history_holds_is_a_source_where_it_stands(filled: KbServer) -> None:
    talk = {"kb": "sourced", "conversation_id": "sourced-1", "k": 1, "reuse": "prefix"}
    first = ask(filled.url, **talk)
    messages = [
        *user("How do I drain a node?"),
        {"role": "assistant", "content": "Cordon it."},
        *user("How do I drain a node, again?"),
    ]
    again = ask(filled.url, **{**talk, "messages": messages}, explain=True)
    assert again["explain"]["left_out"] == 1
    (source,) = again["sources"]
    assert source["chunk"] == first["sources"][0]["chunk"]
    assert source["span"] == first["sources"][0]["span"], "right behind the preamble, as before"
    assert source["fate"] == "exact"


def test_search_hits_name_their_document(filled: KbServer) -> None:
    url = f"{filled.url}/v1/kb/sourced/search"
    hits = httpx.post(url, json={"query": "drain a node"}, timeout=60).json()["data"]
    (drain,) = [
        d for d in httpx.get(f"{filled.url}/v1/kb/sourced/documents").json()["data"]
        if d["title"] == "Drain"
    ]  # fmt: skip
    assert hits[0]["document"] == drain["id"]


def test_python_has_them_too(weave: Weave) -> None:
    answer = weave.ask(
        "how?", documents=[Document("A port is open.", "Ports")], sampling=Sampling(max_tokens=2)
    )
    (source,) = answer.sources
    assert (source.title, source.fate, source.cited_as) == ("Ports", source.fate, 1)
    assert answer.explain is not None
    assert source.span[0] == answer.explain.chunks[0].start


def test_full_ms_is_null_until_the_machine_was_measured(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    weave = make_weave(chat_model_folder)
    libraries = make_libraries(weave, tmp_path / "kbs")
    with serving(weave, libraries=libraries) as url:
        upload = f"{url}/v1/kb/sourced/documents"
        assert httpx.post(upload, json=DRAIN, timeout=60).status_code == 200
        fused = {"kb": "sourced", "reuse": "prefix", "explain": True}
        assert ask(url, **fused)["explain"]["full_ms"] is None
        weave.measure()
        assert ask(url, **fused)["explain"]["full_ms"] > 0
        assert ask(url, explain=True)["explain"]["full_ms"] > 0, "plain chats too"
    libraries.close()
    weave.close()
