"""No request, however it is made, keeps the server from answering others."""

import json

import httpx
import pytest

from worlds.serving import user
from worlds.watching import DEAF_S, listening

BOMBS = {
    "messages": ({"messages": user("hi") * 20_000}, "'messages' must be at most 2048 messages"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}]},
        "'messages' must be at most 4096 parts of text",
    ),
    "values": ({"messages": user("hi") * 180_000}, "more than 125,000 commas, brackets"),
    "fields": ({f"a{i}": 1 for i in range(60_000)}, "the body must have at most 64 fields"),
    "stops": ({"messages": user("hi"), "stop": ["a"] * 60_000}, "'stop' must be at most 4 strings"),
    "one long message": ({"messages": user("word " * 1_400_000)}, "the model's context holds 512"),
    "documents": (
        {"messages": user("hi"), "documents": ["a"] * 60_000},
        "'documents' must be at most 1000 documents",
    ),
    "long documents": (
        {"messages": user("hi"), "documents": ["word " * 1000] * 900},
        "the model's context holds 512",
    ),
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_chat_that_is_too_much_is_refused_while_others_are_served(url: str, name: str) -> None:
    body, wanted = BOMBS[name]
    data = json.dumps(body).encode()
    with listening(url) as heard:
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            content=data,
            headers={"Content-Type": "application/json"},
            timeout=120,
        )
    assert reply.status_code == 400
    assert wanted in reply.json()["error"]["message"]
    assert heard.longest_s < DEAF_S


def test_a_long_query_is_refused(url: str) -> None:
    reply = httpx.post(f"{url}/v1/kb/notes/search", json={"query": "word " * 10_000}, timeout=60)
    assert reply.status_code == 400
    assert "'query' must be at most 32,768 characters" in reply.json()["error"]["message"]


def test_a_fault_quotes_no_more_than_it_shows(url: str) -> None:
    with listening(url) as heard:
        body = {"messages": {"a": ["x" * 50] * 100_000}}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert len(reply.json()["error"]["message"]) < 300
    assert heard.longest_s < DEAF_S
