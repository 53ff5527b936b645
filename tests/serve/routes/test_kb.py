"""Knowledge bases over HTTP: upload, list, search, delete, and answers from stored chunk KV."""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kvweave.app.libraries.libraries import SEARCHERS, Libraries, LibrariesConfig, LibraryKey
from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.serve.access.limits import Limits
from kvweave.serve.server import ServerLifecycle
from worlds.serving import KbServer, make_libraries, make_weave, serving, user
from worlds.tiny_corpus import WordEmbedder, make_text

DRAIN = {"title": "Drain", "text": "To drain a node, cordon it first, then evict its pods."}
QUOTA = {"title": "Quota", "text": "A quota limits the pods and volumes of a namespace."}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def post(url: str, path: str, **how: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/kb/{path}", timeout=60, **how)


def ask(url: str, question: str = "How do I drain a node?", **fields: Any) -> dict[str, Any]:
    body = {"messages": user(question), "explain": True, **GREEDY, **fields}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.fixture(scope="module")
def filled(kb_server: KbServer) -> KbServer:
    where = "cluster/documents?wait_for_kv=true"
    for document in (DRAIN, QUOTA):
        assert post(kb_server.url, where, json=document).status_code == 200
    return kb_server


def test_the_usual_order_of_a_knowledge_base_is_changed(kb_server: KbServer) -> None:
    assert post(kb_server.url, "ordered/documents", json=DRAIN).status_code == 200
    where = f"{kb_server.url}/v1/kb/ordered"
    assert httpx.get(where).json()["order"] is None
    changed = httpx.patch(where, json={"order": "free"}).json()
    assert changed.get("order") == "free", changed
    assert httpx.get(where).json()["order"] == "free"
    ways = ({}, {"order": "auto"}, {"reuse": "full"})
    said = [ask(kb_server.url, kb="ordered", explain=True, **of) for of in ways]
    assert said[2]["explain"]["order"] == "as_found: all is computed"
    assert said[0]["explain"]["order"] == "free, says its knowledge base"
    assert said[1]["explain"]["order"] == "auto, says the question"
    assert httpx.patch(where, json={"order": "any"}).status_code == 400
    assert httpx.patch(f"{where}-not", json={"order": "free"}).status_code == 404
    assert httpx.patch(where, json={"order": "configured"}).json()["order"] is None
    again = ask(kb_server.url, kb="ordered", explain=True)
    assert again["explain"]["order"] == "auto, says the configuration"


def test_an_uploaded_text_is_listed_found_and_removed(kb_server: KbServer) -> None:
    report = post(kb_server.url, "life/documents", json=DRAIN).json()
    assert (report["added"], report["new_chunks"], report["skipped"]) == (1, 1, [])
    (document,) = httpx.get(f"{kb_server.url}/v1/kb/life/documents").json()["data"]
    assert (document["title"], document["chunks"]) == ("Drain", 1)
    (hit,) = post(kb_server.url, "life/search", json={"query": "cordon a node"}).json()["data"]
    assert hit["title"] == "Drain"
    assert "evict its pods" in hit["text"]
    again = post(kb_server.url, "life/documents", json=DRAIN).json()
    assert (again["added"], again["unchanged"]) == (0, 1)
    gone = httpx.delete(f"{kb_server.url}/v1/kb/life/documents/{document['id']}").json()
    assert gone == {
        "id": document["id"],
        "object": "document.deleted",
        "deleted": True,
        "chunks": 1,
    }
    assert httpx.get(f"{kb_server.url}/v1/kb/life/documents").json()["data"] == []
    assert post(kb_server.url, "life/search", json={"query": "cordon"}).json()["data"] == []
    twice = httpx.delete(f"{kb_server.url}/v1/kb/life/documents/{document['id']}")
    assert twice.status_code == 404


def test_files_of_a_form_are_parsed_by_their_ending(kb_server: KbServer) -> None:
    files = [
        ("file", ("a.md", b"# Taints\n\nA taint keeps pods off a node.")),
        ("file", ("rows.csv", b"title,text\nOne,First row of pods.\nTwo,Second row of nodes.\n")),
        ("file", ("bad.exe", b"MZ")),
    ]
    report = post(kb_server.url, "files/documents", files=files).json()
    assert report["added"] == 3
    (skipped,) = report["skipped"]
    assert skipped["source"] == "upload:bad.exe"
    assert "no parser for .exe" in skipped["reason"]
    titles = {
        d["title"] for d in httpx.get(f"{kb_server.url}/v1/kb/files/documents").json()["data"]
    }
    assert titles == {"Taints", "One", "Two"}
    fewer = [("file", ("rows.csv", b"title,text\nOne,First row of pods.\n"))]
    report = post(kb_server.url, "files/documents", files=fewer).json()
    assert (report["unchanged"], report["removed"]) == (1, 1)  # an update of the same file


@pytest.mark.parametrize("name", ["../../evil.md", "/etc/evil.md", "..\\evil.md", "a/b/evil.md"])
def test_a_file_name_never_becomes_a_path(kb_server: KbServer, name: str) -> None:
    before = set(kb_server.root.parent.rglob("*evil*"))
    form = {"file": (name, b"# Evil\n\nSome text about pods.")}
    assert post(kb_server.url, "names/documents", files=form).status_code == 200
    sources = [
        d["source"] for d in httpx.get(f"{kb_server.url}/v1/kb/names/documents").json()["data"]
    ]
    assert sources == ["upload:evil.md"]
    assert set(kb_server.root.parent.rglob("*evil*")) == before
    assert not Path("/etc/evil.md").exists()


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ({"json": {"text": " "}}, 400, "'text' is empty"),
        ({"json": {"title": "t"}}, 400, "'text' is missing"),
        ({"json": {"text": "t", "url": "u"}}, 400, "'url' is not supported"),
        ({"json": ["t"]}, 400, "must be a JSON object"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "not valid JSON"),
        ({"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415, "is no upload"),
        ({"files": {"file": ("..", b"x")}}, 400, "is no name of a file"),
        ({"files": {"file": ("x.md", b" ")}}, 400, "nothing was taken in"),
        ({"data": {"a": "b"}, "files": {"file": ("x.md", b"x")}}, 400, "'a' is no file"),
        (
            {"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}},
            400,
            "does not parse",
        ),
    ],
    ids=lambda v: str(v)[:30],
)
def test_an_upload_that_is_none_is_refused(
    kb_server: KbServer, how: dict[str, Any], status: int, says: str
) -> None:
    reply = post(kb_server.url, "bad/documents", **how)
    assert reply.status_code == status, reply.text
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["..", ".hidden", "a.b", "@acme", "a%2Fb", "a" * 65, "%00"])
def test_a_name_that_could_be_a_path_is_refused(kb_server: KbServer, name: str) -> None:
    assert post(kb_server.url, f"{name}/documents", json=DRAIN).status_code in (400, 404, 405)
    assert not (kb_server.root / name).exists() or name == ".."


def test_progress_comes_as_events_and_ends_with_the_outcome(kb_server: KbServer) -> None:
    document = {"title": "Long", "text": make_text(400, seed=3)}
    headers = {"Accept": "text/event-stream"}
    where = "slow/documents?wait_for_kv=true"
    reply = post(kb_server.url, where, json=document, headers=headers)
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {e["object"] for e in events[:-1]} == {"ingest.progress"}
    assert "encode" in {e["phase"] for e in events[:-1]}
    last = events[-2]  # of the phases
    assert last["chunks"] == last["total_chunks"] == events[-1]["kv_chunks"]
    assert last["kv_bytes"] == events[-1]["kv_bytes"] > 0
    assert last["eta_s"] == 0
    assert events[-1]["object"] == "ingest"
    assert events[-1]["added"] == 1


def test_an_upload_does_not_wait_for_kv_which_appears_and_is_told_of(
    weave: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    libraries = make_libraries(weave, tmp_path, BackgroundKV())
    encode = ChunkEncoder.encode

    def slow(*args: Any, **kwargs: Any) -> None:
        assert held.wait(60)
        encode(*args, **kwargs)

    monkeypatch.setattr(ChunkEncoder, "encode", slow)
    with serving(weave, libraries=libraries) as url:
        reports = [post(url, "own/documents", json=document).json() for document in (DRAIN, QUOTA)]
        assert [report["kv_chunks"] for report in reports] == [0, 0]
        hits = post(url, "own/search", json={"query": "drain a node"}).json()["data"]
        assert len(hits) == 2, "it is found before it has KV"
        told = httpx.get(f"{url}/v1/kb/own").json()
        assert told["documents"] == told["chunks"] == 2
        assert (told["kv"]["state"], told["kv"]["chunks_done"]) == ("making", 0)
        assert told["kv"]["chunks_total"] == 2
        held.set()
        deadline = time.monotonic() + 60
        while told["kv"]["state"] != "ready" and time.monotonic() < deadline:
            told = httpx.get(f"{url}/v1/kb/own").json()
        assert told["kv"]["chunks_done"] == 2
        assert told["kv"]["bytes"] > 0
        assert httpx.get(f"{url}/v1/kb").json()["data"] == [told]
        metrics = httpx.get(f"{url}/metrics").text
        assert 'kvweave_kv_chunks_done{kb="own",tenant=""} 2.0' in metrics
        assert 'kvweave_kv_chunks_left{kb="own",tenant=""} 0.0' in metrics
        assert (
            f'kvweave_kv_chunks_bytes{{kb="own",tenant=""}} {float(told["kv"]["bytes"])}' in metrics
        )
        missing = httpx.get(f"{url}/v1/kb/none")
        assert missing.status_code == 404
        assert "known: own" in missing.json()["error"]["message"]
    libraries.close()


def test_prepare_makes_the_kv_that_is_missing_though_answers_are_in_the_making(
    weave: Any, tmp_path: Path
) -> None:
    libraries = make_libraries(weave, tmp_path, BackgroundKV(share=0.0))
    with serving(weave, libraries=libraries) as url, weave.runtime.client.answers.one():
        for document in (DRAIN, QUOTA):
            assert post(url, "own/documents", json=document).status_code == 200
        where = f"{url}/v1/kb/own"
        time.sleep(1.0)
        told = httpx.get(where).json()["kv"]
        assert (told["state"], told["chunks_done"], told["hurried"]) == ("making", 0, False)
        begun = post(url, "own/prepare")
        assert begun.status_code == 202, begun.text
        assert begun.json()["name"] == "own"
        deadline = time.monotonic() + 60
        while told["state"] != "ready" or told["hurried"]:
            assert time.monotonic() < deadline, told
            told = httpx.get(where).json()["kv"]
        assert told["chunks_done"] == 2
        assert post(url, "none/prepare").status_code == 404
    libraries.close()


def test_prepare_says_what_to_do_where_no_kv_is_made_in_the_background(filled: KbServer) -> None:
    refused = post(filled.url, "cluster/prepare")
    assert refused.status_code == 400
    assert "kvweave ingest --kv" in refused.json()["error"]["message"]


def test_an_upload_beyond_the_limit_is_a_413_and_other_bodies_have_their_own(
    weave: Any, tmp_path: Path
) -> None:
    libraries = make_libraries(weave, tmp_path)
    limits = Limits(body_bytes=1000, upload_bytes=20_000, upload_files=2)
    with serving(weave, limits, libraries=libraries) as url:
        text = {"title": "t", "text": make_text(300, seed=1)}
        assert post(url, "x/documents", json=text).status_code == 200
        assert post(url, "x/search", json={"query": "pod " * 400}).status_code == 413
        large = {"file": ("a.md", b"pods " * 10_000)}
        assert post(url, "x/documents", files=large).status_code == 413
        many = [("file", (f"{i}.md", b"pods")) for i in range(3)]
        refused = post(url, "x/documents", files=many)
        assert refused.status_code == 400
        assert "Too many files" in refused.json()["error"]["message"]
    libraries.close()


def test_an_answer_from_a_knowledge_base_reuses_its_chunk_kv(filled: KbServer) -> None:
    reply = ask(filled.url, kb="cluster", k=2, reuse={"strategy": "reuse"})
    told = reply["explain"]
    assert told["strategy"] == "reuse"
    assert told["tokens"]["reused"] > 0
    assert {chunk["tier"] for chunk in told["chunks"]} <= {"host", "disk"}
    assert sum(told["tokens"].values()) == reply["usage"]["prompt_tokens"]
    assert told["states"][0][1] == 0
    assert told["states"][-1][2] == reply["usage"]["prompt_tokens"]
    assert told["timeline_ms"]["total"] >= told["timeline_ms"]["first_token"] > 0
    with filled.libraries.use("", "cluster") as over:
        answer = over.ask("How do I drain a node?", k=2, reuse="reuse", sampling=_greedy())
    assert reply["choices"][0]["message"]["content"] == answer.text


def test_auto_is_the_default_of_a_knowledge_base_and_says_why(filled: KbServer) -> None:
    told = ask(filled.url, kb="cluster", reuse="auto")["explain"]  # which measures the machine
    told = ask(filled.url, kb="cluster")["explain"]
    assert told["decision"]["chosen"] in {o["name"] for o in told["decision"]["options"]}
    assert all(option["reason"] for option in told["decision"]["options"])
    for option in told["decision"]["options"]:
        assert (option["load_ms"] is None) == (option["load_share"] is None), option
        assert option["load_bytes"] == 0 or option["load_ms"] > 0, option
    other = [{"role": "system", "content": "Be exact."}, *user("How do I drain a node?")]
    told = ask(filled.url, kb="cluster", messages=other)["explain"]
    assert (told["strategy"], told["decision"]) == ("prefix", None)
    assert "behind this system prompt" in told["why"]


def test_explain_comes_in_the_last_chunk_of_a_stream(filled: KbServer) -> None:
    ask(filled.url, kb="cluster", reuse="prefix")  # from here on it is in the knowledge tree
    whole = ask(filled.url, kb="cluster", reuse="prefix")["explain"]
    with OpenAI(base_url=f"{filled.url}/v1", api_key="none") as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=user("How do I drain a node?"),
                stream=True,
                extra_body={"kb": "cluster", "reuse": "prefix", "explain": True},
                **GREEDY,
            )
        )
    told = chunks[-1].model_extra["explain"]
    assert told["tokens"] == whole["tokens"]
    assert told["chunks"] == whole["chunks"]


def test_documents_beside_a_knowledge_base_find_its_chunk_kv(filled: KbServer) -> None:
    hits = post(filled.url, "cluster/search", json={"query": "quota", "k": 2}).json()["data"]
    documents = [{"text": hit["text"]} for hit in hits]
    told = ask(filled.url, kb="cluster", documents=documents, reuse="reuse")["explain"]
    assert len(told["chunks"]) == 2
    assert all(chunk["tier"] for chunk in told["chunks"]), "its text is the chunk's own"


def test_a_conversation_keeps_its_chunks_where_they_stood_and_never_twice(filled: KbServer) -> None:
    def turn(messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        fields = {"kb": "cluster", "k": 1, "reuse": "reuse", "messages": messages, **more}
        return ask(filled.url, **fields)

    first = user("How do I drain a node?")
    one = turn(first, conversation_id="c1")
    said = {"role": "assistant", "content": one["choices"][0]["message"]["content"]}
    other = turn([*first, said, *user("What does a quota limit?")], conversation_id="c1")
    chunk, words, new = other["explain"]["chunks"]
    assert [chunk["start"], chunk["tokens"]] == [
        one["explain"]["chunks"][0][name] for name in ("start", "tokens")
    ], "the chunk of the first turn stands where it stood"
    assert words["start"] == chunk["start"] + chunk["tokens"]
    assert new["tokens"] > 0
    same = [*first, said, *user("And how do I drain a node again?")]
    again = turn(same, conversation_id="c1")
    assert len(again["explain"]["chunks"]) == 2, "what the history holds is not sent twice"
    for strangers in ({"recognise": False}, {"conversation_id": "c2"}):
        words, new = turn(same, **strangers)["explain"]["chunks"]
        assert new["tokens"] == chunk["tokens"], "nothing is known of another conversation"


def test_a_client_that_names_no_conversation_is_recognised(filled: KbServer) -> None:
    first = user("How do I drain the very first node?")
    asked = {"kb": "cluster", "k": 1, "reuse": "prefix"}
    one = ask(filled.url, messages=first, **asked)
    said = {"role": "assistant", "content": "As it says."}  # clients may trim what was answered
    turn = {"messages": [*first, said, *user("And how do I drain it again?")], **asked}
    again = ask(filled.url, **turn)
    plain = ask(filled.url, recognise=False, **turn)
    held, front = again["explain"]["chunks"][0], one["explain"]["chunks"][0]
    assert [held[name] for name in ("start", "tokens")] == [
        front[name] for name in ("start", "tokens")
    ], "the chunk of the first turn stands where it stood"
    assert held["state"] == "exact"
    assert len(again["explain"]["chunks"]) == 2, "and is not sent twice"
    counts = [reply["explain"]["tokens"]["exact"] for reply in (plain, again)]
    assert counts[1] >= counts[0] + front["tokens"]
    nothing = ask(filled.url, filter={"nobody": "has this"}, **turn)
    assert nothing["nothing_found"], "chunks of earlier turns do not stand in for what is found"


def test_the_list_has_every_knowledge_base(filled: KbServer) -> None:
    listed = httpx.get(f"{filled.url}/v1/kb").json()["data"]
    notes = next(kb for kb in listed if kb["name"] == "cluster")
    assert (notes["documents"], notes["chunks"]) == (2, 2)
    assert notes["tokens"] > 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"query": " "}, "'query' is empty"),
        ({"query": "x", "k": 0}, "'k' must be between 1 and 1000"),
        ({"query": "x", "retrieval": "magic"}, "'retrieval' must be 'vector'"),
        ({"query": "x", "filter": {"a b": 1}}, "'a b' is no key of metadata"),
        ({"query": "x", "filter": {"a": True}}, "metadata 'a' must be a text or a number"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(
    filled: KbServer, body: dict[str, Any], says: str
) -> None:
    reply = post(filled.url, "cluster/search", json=body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_a_second_start_serves_its_first_fused_answer_without_encoding(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    """Two lives of a server, each with its own model. What is computed is saved, and counted."""
    question, fields = "How do I drain a node?", {"kb": "notes", "k": 2, "reuse": "reuse"}
    answers = []
    for life in (1, 2):
        weave = make_weave(chat_model_folder)
        libraries = make_libraries(weave, tmp_path)
        with serving(weave, libraries=libraries) as url:
            if life == 1:
                for document in (DRAIN, QUOTA):
                    post(url, "notes/documents?wait_for_kv=true", json=document)
            told = ask(url, question, **fields)
            answers.append(told["choices"][0]["message"]["content"])
            with libraries.use("", "notes") as over:
                saved = over.library.store.metrics.value("kv_saves_total", tier="disk")
            assert saved == (2 if life == 1 else 0), "chunk KV is computed once, in the first life"
            assert {c["tier"] for c in told["explain"]["chunks"]} == {("host", "disk")[life - 1]}
            assert all(c["why"] is None for c in told["explain"]["chunks"])
        libraries.close()
        weave.close()
    assert answers[0] == answers[1]


def test_tenants_have_other_keys_for_the_same_chunk(weave: Any, tmp_path: Path) -> None:
    libraries = make_libraries(weave, tmp_path)
    ids = tuple(range(10, 20))
    names = [
        LibraryKey("", "a"),
        LibraryKey("", "b"),
        LibraryKey("acme", "a"),
        LibraryKey("other", "a"),
    ]
    keys = []
    for place in names:
        with libraries.use(place.tenant, place.name, create=True) as over:
            keys.append(over.library.encoder.key(ids))
    assert keys[0] == keys[1], "no tenant: they share"
    assert len(set(keys)) == 3
    assert (tmp_path / "@acme" / "a").is_dir()
    assert libraries.folders.names("acme") == ["a"]
    assert libraries.folders.names("") == ["a", "b"]
    libraries.close()


def _greedy() -> Any:
    from kvweave.app.weave import Sampling

    return Sampling(max_tokens=6)


@pytest.fixture(autouse=True)
def _nothing_stays_leased(kb_server: KbServer) -> Iterator[None]:
    yield
    assert kb_server.libraries.num_pinned() == 0


def handles_below(folder: Path) -> int:
    """File handles of this process that are open in a folder."""
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and str(folder) in os.readlink(link) for link in links)


def test_many_who_ask_at_once_do_not_each_open_the_catalogue(filled: KbServer) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("open files are counted in /proc; Linux has it, as CI does")
    with ThreadPoolExecutor(24) as clients:
        asked = [
            clients.submit(ask, filled.url, f"Who drains {n}?", kb="cluster") for n in range(48)
        ]
        assert all(reply.result() for reply in asked)
    assert handles_below(filled.root / "cluster") <= 3 * (SEARCHERS + Limits().tasks + 1)


def test_opening_one_knowledge_base_holds_up_no_other_request(weave: Any, tmp_path: Path) -> None:
    opening, go_on = threading.Event(), threading.Event()

    def slow_embedder(name: str) -> WordEmbedder:
        opening.set()
        assert go_on.wait(60)
        return WordEmbedder()

    config = LibrariesConfig(root=tmp_path, embedder="words", kv=KVOptions("isolated"))
    libraries = Libraries(weave, config, open_embedder=slow_embedder)
    with serving(weave, libraries=libraries) as url, ThreadPoolExecutor(1) as client:
        upload = client.submit(post, url, "slow/documents", json=DRAIN)
        try:
            assert opening.wait(60)
            assert httpx.get(f"{url}/healthz", timeout=5).status_code == 200
            assert httpx.get(f"{url}/metrics", timeout=5).status_code == 200
        finally:
            go_on.set()
        assert upload.result().status_code == 200
    libraries.close()


def test_a_server_that_stops_does_not_wait_for_a_whole_upload(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    weave = make_weave(chat_model_folder)
    begun, stopped = threading.Event(), threading.Event()

    class Waiting(WordEmbedder):
        def embed_passages(self, texts: Sequence[str]) -> Any:
            begun.set()
            stopped.wait(3)  # one batch goes to its end
            return super().embed_passages(texts)

    config = LibrariesConfig(root=tmp_path, embedder="words", kv=KVOptions("isolated"))
    libraries = Libraries(weave, config, open_embedder=lambda name: Waiting())
    impatient = ServerLifecycle(patience_s=0.2)
    with ThreadPoolExecutor(1) as client:
        with serving(weave, libraries=libraries, lifecycle=impatient) as url:
            upload = client.submit(post, url, "big/documents", json=DRAIN)
            assert begun.wait(60)
        reply = upload.result()
    assert reply.status_code == 503, reply.text
    assert "send it again" in reply.json()["error"]["message"]
    stopped.set()
    with serving(weave, libraries=make_libraries(weave, tmp_path)) as url:
        assert post(url, "big/documents", json=DRAIN).status_code == 200
        assert post(url, "big/search", json={"query": "node"}).json()["data"]


def test_explain_says_what_was_guessed_while_searching(filled: KbServer) -> None:
    def guessed(mode: str) -> Any:
        return ask(filled.url, kb="cluster", k=1, speculate=mode)["explain"]["speculation"]

    assert guessed("off") is None
    told = guessed("on")
    assert (told["stages"], told["guesses"]) == (2, 1)  # one stage for each of its two chunks
    assert told["saved_tokens"] >= 0


def test_a_way_of_speculating_that_there_is_none_of_is_refused(filled: KbServer) -> None:
    body = {"messages": user("drain?"), "kb": "cluster", "speculate": "maybe"}
    reply = httpx.post(f"{filled.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "speculate"
