"""POST /v1/compare: answers of several ways, and how far each is from full prefill."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.serve.access.api_keys import parse_keys
from worlds.serving import KbServer, make_libraries, serving, user, wait_for_health
from worlds.tiny_corpus import make_text

WAYS = [{"reuse": "full"}, {"reuse": "weave", "ratio": 0.3}, {"reuse": "reuse"}]
KEYS = parse_keys(["sk-acme-1:acme", "sk-other:other"])


@pytest.fixture(scope="module")
def filled(kb_server: KbServer) -> KbServer:
    for number in range(4):
        document = {"title": f"Part {number}", "text": make_text(16, seed=number)}
        url = f"{kb_server.url}/v1/kb/compared/documents?wait_for_kv=true"
        assert httpx.post(url, json=document, timeout=60).status_code == 200
    return kb_server


def compare(url: str, key: str = "", **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": user("What of pods?"), "kb": "compared", "k": 3, "ways": WAYS}
    body |= {"max_tokens": 8, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.stream(
        "POST", f"{url}/v1/compare", json=body, headers=headers, timeout=120
    ) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def test_every_way_answers_in_turn_and_is_then_measured(filled: KbServer) -> None:
    events = compare(filled.url)
    ways = [event["way"] for event in events]
    done = [event for event in events if "done" in event]
    assert [event["way"] for event in done] == [0, 1, 2]
    quality = [event for event in events if "quality" in event]
    assert [event["way"] for event in quality] == [0, 1, 2]
    assert ways == [*sorted(ways[: -len(quality)]), 0, 1, 2], "one after another, then the figures"
    for way, event in enumerate(done):
        text = "".join(e["delta"] for e in events if e["way"] == way and "delta" in e)
        assert event["done"]["answer"] == text
        assert event["done"]["ttft_ms"] > 0
        assert {s["title"] for s in event["done"]["sources"]} <= {f"Part {i}" for i in range(4)}
    strategies = [event["done"]["explain"]["strategy"] for event in done]
    assert strategies == ["full", "weave", "reuse"]
    figures = [event["quality"] for event in quality]
    assert {figure["positions"] for figure in figures} == {8}
    assert figures[0] == {"kl_nats": 0.0, "same_first_token": True, "positions": 8}
    assert figures[2]["kl_nats"] > figures[1]["kl_nats"] > 1e-4, "the fewer rows, the further off"


def test_a_named_strategy_is_shown_by_itself_whatever_the_tree_has(filled: KbServer) -> None:
    """The path was computed exactly before: an ordinary request would find all of it."""
    compare(filled.url, ways=[{"reuse": "prefix"}, {"reuse": "full"}])
    (_, fused) = [e for e in compare(filled.url, ways=WAYS[:2]) if "done" in e]
    tokens = fused["done"]["explain"]["tokens"]
    assert tokens["reused"] > 0
    ordinary = {"messages": user("What of pods?"), "kb": "compared", "k": 3, "reuse": "weave"}
    chat = f"{filled.url}/v1/chat/completions"
    reply = httpx.post(chat, json={**ordinary, "explain": True, "max_tokens": 2}, timeout=60)
    assert reply.json()["explain"]["tokens"]["reused"] == 0


def test_the_order_of_the_knowledge_base_holds_where_the_tree_is_read(filled: KbServer) -> None:
    ways = [{"reuse": "auto"}, {"reuse": "prefix"}, {"reuse": "reuse"}]
    kb = f"{filled.url}/v1/kb/compared"
    assert httpx.patch(kb, json={"order": "free"}, timeout=60).status_code == 200
    try:
        done = [e["done"] for e in compare(filled.url, ways=ways) if "done" in e]
        body = {"messages": user("What of pods?"), "kb": "compared", "explain": True}
        said = httpx.post(f"{filled.url}/v1/chat/completions", json=body, timeout=60).json()
    finally:
        httpx.patch(kb, json={"order": "configured"}, timeout=60)
    orders = [each["explain"]["order"] for each in done]
    assert said["explain"]["order"] == "free, says its knowledge base", "as for any request"
    assert orders[:2] == ["free, says its knowledge base"] * 2
    assert orders[2] == "as_found: nothing is read of the knowledge tree"


def test_without_full_among_the_ways_it_is_computed_behind_them(filled: KbServer) -> None:
    ways = [{"reuse": "prefix"}, {"reuse": {"strategy": "weave", "ratio": 1.0}}]
    events = compare(filled.url, ways=ways)
    figures = [event["quality"] for event in events if "quality" in event]
    assert [event["way"] for event in events if "done" in event] == [0, 1]
    for figure in figures:
        assert figure["same_first_token"]
        assert figure["kl_nats"] < 1e-4, "all rows computed is full prefill"


def test_the_figure_is_what_the_audit_would_find(filled: KbServer) -> None:
    """Against full prefill's own answer, computed by another road: forced upon the library."""
    import torch

    from kvweave.app.libraries.libraries import LibraryKey
    from kvweave.app.libraries.quality_view import WATCHED, measure_quality

    def watched(reuse: str, forced: tuple[int, ...] = ()) -> Any:
        place = LibraryKey("", "compared")
        sampling = filled.weave.sampling({"temperature": 0, "max_tokens": 8})
        stream = filled.libraries.stream(
            place,
            "What of pods?",
            k=3,
            reuse=reuse,
            sampling=sampling,
            watched=WATCHED,
            forced=forced,
            alone=True,
        )
        answer = stream.finish()
        stream.close()
        return answer.watched

    full = watched("full")
    way = watched("reuse", full.token_ids)
    assert way.token_ids == full.token_ids
    p, q = torch.stack(full.distributions), torch.stack(way.distributions)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert measure_quality(full, way).kl == pytest.approx(kl, rel=1e-4)
    (figure,) = [e["quality"] for e in compare(filled.url) if e["way"] == 2 and "quality" in e]
    assert figure["kl_nats"] == pytest.approx(kl, rel=1e-3)


def test_each_way_can_be_looked_at_closer(filled: KbServer) -> None:
    done = [event["done"] for event in compare(filled.url) if "done" in event]
    for each in done:
        told = httpx.get(f"{filled.url}/v1/answers/{each['id']}", timeout=60).json()
        assert told["answer"] == each["answer"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ways": WAYS[:1]}, "'ways' must be 2 to 3"),
        ({"ways": [*WAYS, *WAYS]}, "'ways' must be 2 to 3"),
        ({"ways": [{"reuse": "full"}, {"reuse": "magic"}]}, "magic"),
        ({"ways": [{"reuse": "full"}, {"reuse": "weave", "ratio": 2}]}, "ratio 2"),
        ({"kb": None}, "'kb' or 'documents' is missing"),
        ({"max_tokens": 0}, "'max_tokens'"),
        ({"max_tokens": 100_000}, "'max_tokens'"),
        ({"k": 0}, "'k' must be"),
        ({"messages": []}, "'messages' is empty"),
        ({"stream": True}, "'stream' is not supported"),
    ],
)
def test_what_cannot_be_meant_is_a_400(filled: KbServer, fields: Any, says: str) -> None:
    body = {"messages": user("pods?"), "kb": "compared", "ways": WAYS, **fields}
    reply = httpx.post(f"{filled.url}/v1/compare", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]


def test_an_unknown_knowledge_base_is_a_404(filled: KbServer) -> None:
    body = {"messages": user("pods?"), "kb": "nowhere", "ways": WAYS}
    assert httpx.post(f"{filled.url}/v1/compare", json=body, timeout=60).status_code == 404


def test_a_client_that_leaves_stops_it(filled: KbServer) -> None:
    body = {"messages": user("pods?"), "kb": "compared", "ways": WAYS, "max_tokens": 300}
    with httpx.stream("POST", f"{filled.url}/v1/compare", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    wait_for_health(filled.url, lambda seen: seen["running"] == 0)


@pytest.fixture(scope="module")
def guarded(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("compared"))
    with serving(weave, libraries=libraries, keys=KEYS) as address:
        yield address
    libraries.close()


def test_a_tenant_compares_over_its_own_alone(guarded: str) -> None:
    headers = {"Authorization": "Bearer sk-acme-1"}
    document = {"title": "Secret", "text": "The merger with Umbra closes on the ninth of May."}
    upload = f"{guarded}/v1/kb/compared/documents?wait_for_kv=true"
    assert httpx.post(upload, json=document, headers=headers, timeout=60).status_code == 200
    body = {"messages": user("merger?"), "kb": "compared", "ways": WAYS}
    assert httpx.post(f"{guarded}/v1/compare", json=body).status_code == 401
    other = {"Authorization": "Bearer sk-other"}
    reply = httpx.post(f"{guarded}/v1/compare", json=body, headers=other, timeout=60)
    assert reply.status_code == 404
    events = compare(guarded, "sk-acme-1", k=1)
    name = events[-1 - len(WAYS)]["done"]["id"]
    mine = httpx.get(f"{guarded}/v1/answers/{name}", headers=headers, timeout=60)
    theirs = httpx.get(f"{guarded}/v1/answers/{name}", headers=other, timeout=60)
    assert (mine.status_code, theirs.status_code) == (200, 404)
