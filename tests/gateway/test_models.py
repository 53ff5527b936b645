"""Upstreams with different models: a request goes to those alone that have its model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from worlds.gateways import FaultyUpstream, GatewayWorld, gateway_over
from worlds.serving import KbServer, make_weave, serving, user

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "explain": True}


@pytest.fixture(scope="module")
def other(chat_model_folder: Path) -> Iterator[str]:
    """A server whose model has another name."""
    with make_weave(chat_model_folder, name="other") as weave, serving(weave) as url:
        yield url


@pytest.fixture
def mixed(
    engine: KbServer, other: str, chat_model_folder: Path, tmp_path: Path
) -> Iterator[tuple[GatewayWorld, FaultyUpstream]]:
    """ "tiny" first, "other" behind a front that can be taken away; requests take turns."""
    away = FaultyUpstream(other)
    how: dict[str, Any] = {"routing": "round_robin", "wait_s": 0.5}
    urls = [engine.url, away.url]
    with gateway_over(urls, tmp_path, tokenizer=chat_model_folder, **how) as world:
        yield world, away
    away.close()


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"messages": user("Say it."), **GREEDY, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def upstream(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["explain"]["upstream"]["upstream"])


def test_a_request_goes_to_replicas_that_have_its_model(
    mixed: tuple[GatewayWorld, FaultyUpstream], engine: KbServer
) -> None:
    world, away = mixed
    for _ in range(3):  # in turns, one of two would be the wrong one
        named = ask(world.url, model="other")
        assert upstream(named) == away.url
        assert named.json()["model"] == "other"
        assert upstream(ask(world.url, model="tiny")) == engine.url
        assert upstream(ask(world.url)) == engine.url, "the first upstream's model is the usual one"


def test_every_model_is_listed_and_no_other_is_served(
    mixed: tuple[GatewayWorld, FaultyUpstream],
) -> None:
    world, _ = mixed
    listed = httpx.get(f"{world.url}/v1/models", timeout=60).json()["data"]
    models = [card["id"] for card in listed if card["kind"] == "model"]
    assert models == ["tiny", "other"], "not the knowledge bases and embedders of upstreams"
    assert httpx.get(f"{world.url}/v1/models/other", timeout=60).status_code == 200
    for path in ("chat/completions", "completions"):
        body = {"model": "third", "messages": user("Hi"), "prompt": "Hi"}
        body.pop("prompt" if path.startswith("chat") else "messages")
        reply = httpx.post(f"{world.url}/v1/{path}", json=body, timeout=60)
        assert reply.status_code == 404
        assert "'tiny', 'other'" in reply.json()["error"]["message"]
    assert httpx.get(f"{world.url}/v1/models/third", timeout=60).status_code == 404


def test_a_model_whose_replicas_are_down_is_not_answered_by_another(
    mixed: tuple[GatewayWorld, FaultyUpstream],
) -> None:
    world, away = mixed
    assert upstream(ask(world.url, model="other")) == away.url
    away.close()
    reply = ask(world.url, model="other")
    assert reply.status_code == 503, reply.text
    assert away.url in reply.json()["error"]["message"]
    assert ask(world.url, model="tiny").status_code == 200


def test_chunks_go_to_another_model_as_text(
    mixed: tuple[GatewayWorld, FaultyUpstream], engine: KbServer
) -> None:
    world, away = mixed
    where = f"{world.url}/v1/kb/mixed/documents"
    note = {"title": "Drain", "text": "To drain a node, cordon it first, then evict its pods."}
    assert httpx.post(where, json=note, timeout=60).status_code == 200
    replies = [ask(world.url, kb="mixed", k=1, model=name) for name in ("tiny", "other")]
    assert [upstream(reply) for reply in replies] == [engine.url, away.url]
    tokens = [reply.json()["usage"]["prompt_tokens"] for reply in replies]
    assert min(tokens) > 30, "with the passage"
    spans = [reply.json()["sources"][0]["span"] for reply in replies]
    assert spans[0] is not None
    assert spans[1] is None, "its tokenizer is not here"


def test_a_strategy_is_refused_for_a_model_that_no_fusing_upstream_has(
    engine: KbServer, other: str, chat_model_folder: Path, tmp_path: Path
) -> None:
    urls = [engine.url, other]
    with gateway_over(urls, tmp_path, tokenizer=chat_model_folder) as world:
        replica = world.gateway.fleet.replicas[1]
        assert replica.card is not None
        assert world.gateway.fleet.can_fuse("other")
        assert not world.gateway.fleet.can_fuse("third")
