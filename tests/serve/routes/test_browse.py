"""Looking around in a knowledge base, and deleting one."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig, LibraryKey
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Weave
from kvweave.serve.access.api_keys import parse_keys
from worlds.serving import (
    GatedDecoder,
    KbServer,
    make_libraries,
    make_weave,
    serving,
    user,
    wait_for_health,
)
from worlds.tiny_corpus import WordEmbedder, make_text

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3}


def upload(url: str, kb: str, title: str, text: str, *, kv: bool = True, key: str = "") -> None:
    wait = "?wait_for_kv=true" if kv else ""
    reply = httpx.post(
        f"{url}/v1/kb/{kb}/documents{wait}",
        json={"title": title, "text": text, "key": title},
        headers=bearer(key),
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def get(url: str, path: str, key: str = "") -> httpx.Response:
    return httpx.get(f"{url}/v1/kb/{path}", headers=bearer(key), timeout=60)


@pytest.fixture(scope="module")
def filled(kb_server: KbServer) -> KbServer:
    for number in range(5):
        upload(kb_server.url, "shelf", f"Doc {number}", make_text(20, seed=number), kv=number < 2)
    long = "\n\n".join(make_text(400, seed=number) for number in range(10, 13))
    upload(kb_server.url, "shelf", "Long", long, kv=False)
    return kb_server


def test_documents_come_in_pages_that_together_are_all(filled: KbServer) -> None:
    whole = get(filled.url, "shelf/documents").json()
    assert (len(whole["data"]), whole["next"]) == (6, None)
    assert whole["data"][0]["kv"] is None
    seen, after = [], ""
    while True:
        page = get(filled.url, f"shelf/documents?limit=4{after}").json()
        seen += page["data"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert [d["id"] for d in seen] == [d["id"] for d in whole["data"]]
    by_title = {d["title"]: d for d in seen}
    ready = by_title["Doc 0"]["kv"]
    assert (ready["state"], ready["chunks_done"]) == ("ready", by_title["Doc 0"]["chunks"])
    assert ready["bytes"]["host"] > 0
    assert ready["bytes"]["disk"] > 0
    assert by_title["Long"]["kv"] == {"state": "none", "chunks_done": 0, "bytes": {}}


@pytest.mark.parametrize(
    ("query", "status"),
    [("limit=0", 400), ("limit=501", 400), ("limit=x", 400), ("after=none", 404)],
)
def test_a_page_that_cannot_be_is_refused(filled: KbServer, query: str, status: int) -> None:
    reply = get(filled.url, f"shelf/documents?{query}")
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_a_document_shows_its_chunks_and_a_chunk_its_neighbours(filled: KbServer) -> None:
    listed = get(filled.url, "shelf/documents").json()["data"]
    (long,) = [d for d in listed if d["title"] == "Long"]
    document = get(filled.url, f"shelf/documents/{long['id']}").json()
    pieces = document["pieces"]
    assert document["chunks"] == len(pieces) > 2
    assert [p["index"] for p in pieces] == list(range(len(pieces)))
    assert sum(p["tokens"] for p in pieces) == document["tokens"]
    middle = get(filled.url, f"shelf/chunks/{pieces[1]['id']}").json()
    assert (middle["previous"], middle["next"]) == (pieces[0]["id"], pieces[2]["id"])
    assert (middle["document"], middle["index"]) == (long["id"], 1)
    assert middle["tokens"] == pieces[1]["tokens"]
    assert middle["text"]
    near = [n["id"] for n in middle["neighbours"]]
    assert len(near) == len(set(near)) == 5
    assert middle["id"] not in near
    scores = [n["score"] for n in middle["neighbours"]]
    assert scores == sorted(scores, reverse=True)
    first = get(filled.url, f"shelf/chunks/{pieces[0]['id']}").json()
    assert first["previous"] is None
    last = get(filled.url, f"shelf/chunks/{pieces[-1]['id']}").json()
    assert last["next"] is None


def test_what_is_not_there_is_a_404(filled: KbServer) -> None:
    for path in (
        "shelf/documents/none",
        "shelf/chunks/none",
        "none/documents",
        "none/chunks/x",
        "none/hottest",
    ):
        assert get(filled.url, path).status_code == 404, path
    assert get(filled.url, "shelf/hottest?limit=0").status_code == 400


def test_the_hottest_are_those_in_most_prompts(kb_server: KbServer) -> None:
    upload(kb_server.url, "heat", "Drain", "To drain a node, cordon it first.", kv=False)
    upload(kb_server.url, "heat", "Quota", "A quota limits volumes of a namespace.", kv=False)
    assert get(kb_server.url, "heat/hottest").json()["data"] == []
    for question, times in (("drain the node", 3), ("quota of a namespace", 1)):
        for _ in range(times):
            body = {"messages": user(question), "kb": "heat", "k": 1, **GREEDY}
            chat = f"{kb_server.url}/v1/chat/completions"
            assert httpx.post(chat, json=body, timeout=60).status_code == 200
    hot = get(kb_server.url, "heat/hottest").json()["data"]
    assert [(h["heading"], h["asked"]) for h in hot] == [("Drain", 3), ("Quota", 1)]
    assert hot[0]["summary"] == "To drain a node, cordon it first."
    pieces = get(kb_server.url, f"heat/documents/{hot[0]['document']}").json()["pieces"]
    assert [each["summary"] for each in pieces] == [hot[0]["summary"]]
    assert len(get(kb_server.url, "heat/hottest?limit=1").json()["data"]) == 1
    chunk = get(kb_server.url, f"heat/chunks/{hot[0]['id']}").json()
    assert (chunk["asked"], chunk["document"]) == (3, hot[0]["document"])


# ── deleting ─────────────────────────────────────────────────────────────────


def test_a_deleted_knowledge_base_is_gone_in_every_way(kb_server: KbServer) -> None:
    url = kb_server.url
    upload(url, "doomed", "Secret", "The merger with Umbra closes on the ninth of May.")
    body = {"messages": user("When is the merger?"), "kb": "doomed", **GREEDY, "explain": True}
    chat = f"{url}/v1/chat/completions"
    asked = httpx.post(chat, json=body, timeout=60).json()
    folder = kb_server.root / "doomed"
    assert folder.is_dir()
    gone = httpx.delete(f"{url}/v1/kb/doomed", timeout=60)
    assert gone.json() == {"name": "doomed", "object": "kb.deleted", "deleted": True}
    assert not folder.exists()
    assert not list(kb_server.root.glob(".deleted*"))
    names = [kb["name"] for kb in httpx.get(f"{url}/v1/kb", timeout=60).json()["data"]]
    assert "doomed" not in names
    assert httpx.post(chat, json=body, timeout=60).status_code == 404
    assert get(url, "doomed/documents").status_code == 404
    assert httpx.get(f"{url}/v1/answers/{asked['id']}").status_code == 404
    assert httpx.delete(f"{url}/v1/kb/doomed", timeout=60).status_code == 404
    # a new one of that name knows nothing of the old one
    upload(url, "doomed", "Other", "Whales sing.", kv=False)
    assert [d["title"] for d in get(url, "doomed/documents").json()["data"]] == ["Other"]
    exact = httpx.post(chat, json={**body, "reuse": "prefix"}, timeout=60).json()
    assert {c["state"] for c in exact["explain"]["chunks"]} == {"computed"}


def test_one_that_answers_use_is_a_409_and_stays_as_it_is(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    decoders: list[GatedDecoder] = []

    def gated(decoder: Any) -> GatedDecoder:
        decoders.append(GatedDecoder(decoder))
        return decoders[0]

    weave = make_weave(chat_model_folder, gated)
    config = LibrariesConfig(root=tmp_path, embedder="words", kv=KVOptions("isolated"), wait_s=0.3)
    libraries = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
    (decoder,) = decoders
    with serving(weave, libraries=libraries) as url:
        upload(url, "busy", "Drain", "To drain a node, cordon it first.", kv=False)
        body = {"messages": user("drain?"), "kb": "busy", **GREEDY}
        chat = f"{url}/v1/chat/completions"
        replies: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(chat, json=body, timeout=60))
        )
        asking.start()
        wait_for_health(url, lambda seen: seen["running"] == 1)
        time.sleep(0.2)  # until it has borrowed the knowledge base
        refused = httpx.delete(f"{url}/v1/kb/busy", timeout=60)
        assert refused.status_code == 409, refused.text
        assert refused.json()["error"]["code"] == "in_use"
        assert refused.headers["retry-after"]
        decoder.permits.release(1000)
        asking.join()
        assert replies[0].status_code == 200
        assert len(get(url, "busy/documents").json()["data"]) == 1, "nothing of it went"
        assert httpx.delete(f"{url}/v1/kb/busy", timeout=60).status_code == 200
    libraries.close()
    weave.close()


def test_one_that_was_named_at_the_start_is_not_deleted(weave: Weave, tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    plain = make_libraries(weave, tmp_path / "root")
    config = replace(plain.config, folders={LibraryKey("", "named"): kept})
    plain.close()
    libraries = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
    with serving(weave, libraries=libraries) as url:
        upload(url, "named", "Drain", "To drain a node, cordon it first.", kv=False)
        refused = httpx.delete(f"{url}/v1/kb/named", timeout=60)
        assert refused.status_code == 400
        assert "--kb" in refused.json()["error"]["message"]
        assert (kept / "kb.json").is_file()
    libraries.close()


KEYS = parse_keys(["sk-nobody", "sk-acme-1:acme", "sk-other:other"])


@pytest.fixture(scope="module")
def guarded(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("browsed"))
    with serving(weave, libraries=libraries, keys=KEYS) as address:
        yield address
    libraries.close()


def test_a_tenant_looks_at_and_deletes_its_own_alone(guarded: str) -> None:
    text = "The merger with Umbra closes on the ninth of May."
    for key in ("sk-acme-1", "sk-other"):
        upload(guarded, "notes", "Secret", text, kv=False, key=key)
    listed = get(guarded, "notes/documents?limit=9", "sk-acme-1").json()["data"]
    (piece,) = get(guarded, f"notes/documents/{listed[0]['id']}", "sk-acme-1").json()["pieces"]
    body = {"messages": user("merger?"), "kb": "notes", **GREEDY}
    chat = f"{guarded}/v1/chat/completions"
    assert httpx.post(chat, json=body, headers=bearer("sk-acme-1"), timeout=60).status_code == 200
    assert get(guarded, "notes/hottest", "sk-acme-1").json()["data"][0]["asked"] == 1
    assert get(guarded, "notes/hottest", "sk-other").json()["data"] == []
    for path in ("notes/documents", "notes/hottest", f"notes/chunks/{piece['id']}"):
        assert get(guarded, path).status_code == 401
        assert get(guarded, path, "sk-nobody").status_code == 404
    assert httpx.delete(f"{guarded}/v1/kb/notes").status_code == 401
    nobody = httpx.delete(f"{guarded}/v1/kb/notes", headers=bearer("sk-nobody"), timeout=60)
    assert nobody.status_code == 404
    gone = httpx.delete(f"{guarded}/v1/kb/notes", headers=bearer("sk-acme-1"), timeout=60)
    assert gone.status_code == 200
    assert get(guarded, "notes/documents", "sk-acme-1").status_code == 404
    assert len(get(guarded, "notes/documents", "sk-other").json()["data"]) == 1


def test_exact_kv_of_a_deleted_knowledge_base_goes_with_its_tenant_alone(guarded: str) -> None:
    text = "The bridge over the Liss opens to carts in the week behind the harvest."

    def state(key: str) -> set[str]:
        body = {"messages": user("bridge?"), "kb": "bridges", "reuse": "prefix", **GREEDY}
        chat, own = f"{guarded}/v1/chat/completions", bearer(key)
        reply = httpx.post(chat, json={**body, "explain": True}, headers=own, timeout=60).json()
        return {chunk["state"] for chunk in reply["explain"]["chunks"]}

    for key in ("sk-nobody", "sk-acme-1"):
        upload(guarded, "bridges", "Bridge", text, kv=False, key=key)
        assert (state(key), state(key)) == ({"computed"}, {"exact"})
    gone = httpx.delete(f"{guarded}/v1/kb/bridges", headers=bearer("sk-acme-1"), timeout=60)
    assert gone.status_code == 200
    upload(guarded, "bridges", "Bridge", text, kv=False, key="sk-acme-1")
    assert state("sk-acme-1") == {"computed"}, "nothing is left of what was deleted"
    assert state("sk-nobody") == {"exact"}, "what one deletes is there for another"
