"""/v1/stats, /v1/tree and /v1/quality: what they tell, and to whom."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.libraries.libraries import Libraries
from kvweave.app.weave import Weave
from kvweave.serve.access.api_keys import parse_keys
from worlds.serving import KbServer, make_libraries, serving, user
from worlds.tiny_corpus import WordEmbedder, make_text

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
# of their own: other tests ask the same engine
KEYS = parse_keys(["sk-nobody", "sk-acme-1:watched", "sk-other:unwatched"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def get(url: str, path: str, key: str = "", status: int = 200) -> dict[str, Any]:
    reply = httpx.get(f"{url}/v1/{path}", headers=bearer(key), timeout=60)
    assert reply.status_code == status, reply.text
    return dict(reply.json())


def upload(url: str, kb: str, title: str, text: str, key: str = "") -> None:
    where = f"{url}/v1/kb/{kb}/documents?wait_for_kv=true"
    body = {"title": title, "text": text}
    assert httpx.post(where, json=body, headers=bearer(key), timeout=60).status_code == 200


def ask(url: str, kb: str, question: str, key: str = "", **fields: Any) -> dict[str, Any]:
    body = {"messages": user(question), "kb": kb, **GREEDY, "explain": True, **fields}
    chat = f"{url}/v1/chat/completions"
    reply = httpx.post(chat, json=body, headers=bearer(key), timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_stats_count_what_answers_did(kb_server: KbServer) -> None:
    url = kb_server.url
    upload(url, "counted", "Drain", "To drain a node, cordon it first, then evict its pods.")
    before = get(url, "stats")
    reply = ask(url, "counted", "drain the node", reuse="reuse", max_tokens=3)
    after = get(url, "stats")
    tokens, counts = after["totals"]["prompt_tokens"], before["totals"]["prompt_tokens"]
    grown = {source: tokens[source] - counts[source] for source in tokens}
    assert grown == reply["explain"]["tokens"]
    assert after["totals"]["answers"] - before["totals"]["answers"] == 1
    made = after["totals"]["completion_tokens"] - before["totals"]["completion_tokens"]
    assert made == reply["usage"]["completion_tokens"]
    series = after["series"]
    lengths = {name: len(series[name]) for name in series if name not in ("step_s", "t0")}
    assert set(lengths.values()) == {180}
    assert sum(series["answers"]) - sum(before["series"]["answers"]) == 1
    assert 0 < max(rate for rate in series["hit_rate"] if rate is not None) <= 1
    tiers = {(t["kb"], t["tier"]): t for t in after["tiers"]}
    host = tiers["counted", "host"]
    assert 0 < host["bytes"] <= host["capacity"]
    now = after["now"]
    assert now["pages"]["total"] >= now["pages"]["used"] >= 0
    assert now["rss_bytes"] > 1 << 20


def test_evictions_are_told_with_the_chunk_that_left(weave: Weave, tmp_path: Path) -> None:
    plain = make_libraries(weave, tmp_path)
    store = replace(plain.config.kv.store, disk_bytes=0)
    config = replace(plain.config, kv=replace(plain.config.kv, store=store), host_bytes=200_000)
    plain.close()
    libraries = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
    with serving(weave, libraries=libraries) as url:
        for number in range(12):
            upload(url, "tight", f"Doc {number}", make_text(40, seed=number))
        (tier,) = get(url, "stats")["tiers"]
        assert tier["bytes"] <= tier["capacity"]
        evictions = get(url, "stats")["evictions"]
        assert evictions, "twelve documents do not fit"
        assert evictions[0]["title"].startswith("Doc ")
        assert evictions[0]["kb"] == "tight"
        assert evictions[0]["bytes"] > 0
        times = [e["at"] for e in evictions]
        assert times == sorted(times, reverse=True)
        chunk = get(url, f"kb/tight/chunks/{evictions[0]['chunk']}")
        assert chunk["title"] == evictions[0]["title"]
    libraries.close()


def test_the_tree_is_walked_from_the_preamble_down(kb_server: KbServer) -> None:
    url = kb_server.url
    upload(url, "wood", "Oak", "An oak is a tree that drops acorns in autumn.")
    ask(url, "wood", "What is an oak?", reuse="prefix", k=1)
    ask(url, "wood", "And what drops acorns?", reuse="prefix", k=1)
    firsts = get(url, "tree")["nodes"]
    preambles = [node for node in firsts if node["chunk"] is None]
    assert preambles
    assert {node["title"] for node in preambles} == {"system prompt"}
    below = [
        child
        for node in preambles
        for child in get(url, f"tree?node={node['id']}&limit=1000")["nodes"]
    ]
    (oak,) = [node for node in below if node["title"] == "Oak"]
    assert oak["hits"] > 1
    assert oak["parent"] in {node["id"] for node in preambles}
    assert (oak["tier"], oak["bytes"] > 0, oak["tokens"] > 0) == ("device", True, True)
    assert oak["end"] > oak["tokens"]
    (parent,) = [node for node in preambles if node["id"] == oak["parent"]]
    assert parent["children"] >= 1
    assert len(get(url, "tree?limit=1")["nodes"]) == 1
    get(url, "tree?node=none", status=404)
    for bad in ("limit=0", "limit=1001", "limit=x"):
        get(url, f"tree?{bad}", status=400)


def test_quality_tells_that_a_model_was_never_calibrated(kb_server: KbServer) -> None:
    upload(kb_server.url, "judged", "Oak", "An oak is a tree.")
    for query in ("quality", "quality?kb=judged"):
        told = get(kb_server.url, query)
        assert (told["model"], told["calibrated"], told["strategies"]) == ("tiny", False, [])
        assert "kvweave calibrate" in told["why"]
        assert told["bound"] == 0.02
    get(kb_server.url, "quality?kb=none", status=404)
    get(kb_server.url, "quality?kb=..", status=400)


@pytest.fixture(scope="module")
def guarded(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("watched"))
    with serving(weave, libraries=libraries, keys=KEYS) as address:
        yield address
    libraries.close()


def test_a_tenant_is_told_of_its_own_alone(guarded: str) -> None:
    text = "The merger with Umbra closes on the ninth of May."
    upload(guarded, "notes", "Secret", text, "sk-acme-1")
    ask(guarded, "notes", "merger?", "sk-acme-1", reuse="prefix")
    for path in ("stats", "tree", "quality"):
        get(guarded, path, status=401)
    mine, others = get(guarded, "stats", "sk-acme-1"), get(guarded, "stats", "sk-other")
    assert mine["totals"]["answers"] == 1
    assert {t["kb"] for t in mine["tiers"]} == {"notes"}
    assert others["totals"]["answers"] == 0
    assert (others["tiers"], others["misses"], others["degradations"]) == ([], {}, {})
    assert (others["evictions"], sum(others["series"]["answers"])) == ([], 0)
    for told in (mine, others):
        system = ("waiting", "batch", "pages", "device_bytes", "host_bytes", "rss_bytes")
        assert {told["now"][name] for name in system} == {None}, "of the whole server"
    own = get(guarded, "tree", "sk-acme-1")["nodes"]
    assert own
    assert get(guarded, "tree", "sk-other")["nodes"] == []
    get(guarded, f"tree?node={own[0]['id']}", "sk-other", status=404)
    get(guarded, "quality?kb=notes", "sk-other", status=404)
    assert get(guarded, "stats", "sk-nobody")["now"]["pages"] is not None
