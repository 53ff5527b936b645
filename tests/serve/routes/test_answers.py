"""Kept answers: which there are, and what is told of one."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.routes.context import PageConfig
from worlds.serving import KbServer, make_libraries, serving, user
from worlds.tiny_corpus import make_text

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def filled(kb_server: KbServer) -> KbServer:
    for number in range(3):
        document = {"title": f"Part {number}", "text": make_text(16, seed=number)}
        url = f"{kb_server.url}/v1/kb/kept/documents?wait_for_kv=true"
        assert httpx.post(url, json=document, timeout=60).status_code == 200
    return kb_server


def ask(url: str, question: str = "What of pods?", key: str = "", **fields: Any) -> dict[str, Any]:
    body = {"messages": user(question), "explain": True, **GREEDY, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def details(url: str, answer_id: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/v1/answers/{answer_id}", timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_fused_answer_is_told_token_by_token_and_layer_by_layer(filled: KbServer) -> None:
    reply = ask(filled.url, kb="kept", k=3, reuse={"strategy": "weave", "ratio": 0.3})
    told = details(filled.url, reply["id"])
    explained, tokens = reply["explain"], told["tokens"]
    total = reply["usage"]["prompt_tokens"]
    assert told["answer"] == reply["choices"][0]["message"]["content"]
    assert (told["question"], told["kb"]) == ("What of pods?", "kept")
    assert told["sources"] == reply["sources"]
    assert told["explain"]["strategy"] == explained["strategy"] == "weave"
    # a letter, a text and a score for each token, in agreement with the runs of explain
    assert len(tokens["states"]) == len(tokens["texts"]) == len(tokens["scores"]) == total
    letters = {"exact": "e", "reused": "r", "recomputed": "n", "computed": "c"}
    spelled = "".join(letters[s] * (end - start) for s, start, end in explained["states"])
    assert tokens["states"] == spelled
    # the first chunk is taken as it is stored: reused, and none of its rows is up for the choice
    behind = tokens["parts"][1]["end"]
    up_for_it = [i for i, s in enumerate(tokens["states"]) if s in "rn" and i >= behind]
    assert up_for_it
    assert [i for i, score in enumerate(tokens["scores"]) if score is not None] == up_for_it
    scores = [s for s in tokens["scores"] if s is not None]
    chosen = [tokens["scores"][i] for i, state in enumerate(tokens["states"]) if state == "n"]
    assert len(chosen) == explained["tokens"]["recomputed"] > 0
    assert sorted(chosen) == sorted(scores)[-len(chosen) :], "the highest were recomputed"
    # parts cover the prompt
    parts = tokens["parts"]
    assert [p["name"] for p in parts] == ["preamble", "chunk", "chunk", "chunk", "question"]
    assert parts[0]["start"] == 0
    assert parts[-1]["end"] == total
    assert all(a["end"] == b["start"] for a, b in pairwise(parts))
    assert {p["chunk"] for p in parts if p["chunk"]} == {s["chunk"] for s in told["sources"]}
    # layers
    layers = told["layers"]
    assert [each["layer"] for each in layers] == list(range(len(layers)))
    assert layers[0]["rows"] >= explained["tokens"]["recomputed"]
    for this, following in pairwise(layers):
        assert this["started_ms"] <= this["loaded_ms"] <= this["ended_ms"]
        assert this["ended_ms"] <= following["started_ms"]
        assert this["rows"] - this["left_rows"] == following["rows"]
    assert told["selection"]["selector"] == "weave"
    assert told["selection"]["ratio"] == 0.3
    assert told["selection"]["layers"]
    # its times
    times = explained["timeline_ms"]
    parts_ms = [times[each] for each in ("waiting", "searching", "loading", "computing")]
    assert min(parts_ms[1:]) > 0, times
    assert sum(parts_ms) == pytest.approx(times["queue"] + times["first_token"], abs=0.01)
    # the time line
    lanes = {entry["lane"] for entry in told["timeline"]}
    assert {"queue", "search", "plan", "probe", "load", "recompute", "decode"} <= lanes
    for entry in told["timeline"]:
        assert -0.001 <= entry["start_ms"] <= entry["end_ms"] <= told["total_ms"] + 10_000
    starts = [entry["start_ms"] for entry in told["timeline"]]
    assert starts == sorted(starts)


def test_an_exact_answer_has_no_layers_and_no_scores(filled: KbServer) -> None:
    reply = ask(filled.url, "And of nodes?", kb="kept", reuse="full")
    told = details(filled.url, reply["id"])
    assert (told["layers"], told["selection"]) == ([], None)
    assert set(told["tokens"]["scores"]) == {None}
    assert set(told["tokens"]["states"]) == {"c"}
    assert "compute" in {entry["lane"] for entry in told["timeline"]}


def test_a_plain_chat_is_kept_too(url: str) -> None:
    reply = ask(url, "Say it.")
    told = details(url, reply["id"])
    assert (told["question"], told["kb"], told["sources"]) == ("Say it.", None, [])
    assert "Say it." in "".join(told["tokens"]["texts"])


def test_the_texts_are_the_prompt_control_tokens_by_their_names(filled: KbServer) -> None:
    reply = ask(filled.url, "Where <b>is</b> it?", kb="kept", reuse="prefix")
    texts = details(filled.url, reply["id"])["tokens"]["texts"]
    joined = "".join(texts)
    assert "Where <b>is</b> it?" in joined
    assert make_text(16, seed=0).split(".")[0] in joined


def test_the_list_is_newest_first_and_names_what_was_done(filled: KbServer) -> None:
    first = ask(filled.url, "One?", kb="kept", reuse="prefix")
    second = ask(filled.url, "Two?", kb="kept", reuse="reuse")
    listed = httpx.get(f"{filled.url}/v1/answers", timeout=60).json()["answers"]
    assert [a["id"] for a in listed[:2]] == [second["id"], first["id"]]
    assert [a["question"] for a in listed[:2]] == ["Two?", "One?"]
    assert [a["strategy"] for a in listed[:2]] == ["reuse", "prefix"]
    assert listed[0]["ttft_ms"] > 0
    assert listed[0]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_streamed_answers_are_kept_under_the_id_that_the_stream_has(filled: KbServer) -> None:
    body = {"messages": user("Stream?"), "kb": "kept", "stream": True, **GREEDY}
    with httpx.stream("POST", f"{filled.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if '"id"' in line]
    name = lines[0].split('"id":"')[1].split('"')[0]
    assert details(filled.url, name)["question"] == "Stream?"


def test_an_answer_that_is_not_kept_is_a_404_in_one_line(url: str) -> None:
    for name in ("chatcmpl-none", "x" * 300, "%2e%2e"):
        reply = httpx.get(f"{url}/v1/answers/{name}")
        assert reply.status_code == 404, name
        assert "\n" not in reply.json()["error"]["message"]


def test_an_answer_from_a_deleted_document_is_no_longer_told(kb_server: KbServer) -> None:
    base = f"{kb_server.url}/v1/kb/gone/documents"
    note = {"title": "Secret", "text": "The merger with Umbra closes on the ninth of May."}
    assert httpx.post(base, json=note, timeout=60).status_code == 200
    reply = ask(kb_server.url, "When is the merger?", kb="gone")
    assert "Umbra" in "".join(details(kb_server.url, reply["id"])["tokens"]["texts"])
    httpx.delete(f"{base}/{reply['sources'][0]['document']}", timeout=60).raise_for_status()
    assert httpx.get(f"{kb_server.url}/v1/answers/{reply['id']}").status_code == 404
    listed = httpx.get(f"{kb_server.url}/v1/answers").json()["answers"]
    assert reply["id"] not in {a["id"] for a in listed}


def test_nor_is_one_whose_document_another_process_deleted(kb_server: KbServer) -> None:
    """Until something was asked of the knowledge base, this one had not heard of it."""
    base = f"{kb_server.url}/v1/kb/elsewhere/documents"
    note = {"title": "Secret", "text": "The merger with Penumbra closes on the tenth of May."}
    assert httpx.post(base, json=note, timeout=60).status_code == 200
    replies = [ask(kb_server.url, "When is the merger?", kb="elsewhere") for _ in range(2)]
    with KnowledgeBase.open(kb_server.root / "elsewhere") as other:
        other.remove_documents([d.id for d in other.documents()])
    address = f"{kb_server.url}/v1/answers"
    assert httpx.get(f"{address}/{replies[0]['id']}", timeout=60).status_code == 404
    listed = httpx.get(address, timeout=60).json()["answers"]
    assert replies[1]["id"] not in {a["id"] for a in listed}


KEYS = parse_keys(["sk-nobody", "sk-acme-1:acme", "sk-other:other"])


@pytest.fixture(scope="module")
def guarded(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("kept"))
    with serving(weave, libraries=libraries, keys=KEYS, page=PageConfig(2)) as address:
        yield address
    libraries.close()


def get(url: str, key: str) -> httpx.Response:
    return httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_a_tenant_sees_its_own_answers_alone(guarded: str) -> None:
    reply = ask(guarded, "Mine?", key="sk-acme-1")
    path = f"{guarded}/v1/answers"
    assert httpx.get(path).status_code == 401
    assert httpx.get(f"{path}/{reply['id']}").status_code == 401
    assert [a["id"] for a in get(path, "sk-acme-1").json()["answers"]] == [reply["id"]]
    for key in ("sk-other", "sk-nobody"):
        assert get(path, key).json()["answers"] == []
        assert get(f"{path}/{reply['id']}", key).status_code == 404


def test_deletions_of_one_tenant_hide_its_own_answers_alone(guarded: str) -> None:
    note = {"title": "Secret", "text": "The merger with Umbra closes on the tenth of May."}
    asked: dict[str, dict[str, Any]] = {}
    for key in ("sk-acme-1", "sk-other"):
        headers = {"Authorization": f"Bearer {key}"}
        base = f"{guarded}/v1/kb/gone/documents"
        assert httpx.post(base, json=note, headers=headers, timeout=60).status_code == 200
        asked[key] = ask(guarded, "When is the merger?", key=key, kb="gone")
    document = asked["sk-acme-1"]["sources"][0]["document"]
    headers = {"Authorization": "Bearer sk-acme-1"}
    httpx.delete(f"{base}/{document}", headers=headers, timeout=60).raise_for_status()
    path = f"{guarded}/v1/answers"
    assert get(f"{path}/{asked['sk-acme-1']['id']}", "sk-acme-1").status_code == 404
    assert get(f"{path}/{asked['sk-other']['id']}", "sk-other").status_code == 200


def test_only_the_last_ones_are_kept(guarded: str) -> None:
    ids = [ask(guarded, f"Number {i}?", key="sk-other")["id"] for i in range(3)]
    listed = get(f"{guarded}/v1/answers", "sk-other").json()["answers"]
    assert [a["id"] for a in listed] == [ids[2], ids[1]]
    assert get(f"{guarded}/v1/answers/{ids[0]}", "sk-other").status_code == 404


def test_none_is_kept_where_that_is_turned_off(weave: Weave) -> None:
    with serving(weave, page=PageConfig(0)) as address:
        reply = ask(address)
        assert httpx.get(f"{address}/v1/answers").json()["answers"] == []
        assert httpx.get(f"{address}/v1/answers/{reply['id']}").status_code == 404
