"""What requests may call the model: its name, aliases, and a knowledge base with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.app.weave import Weave
from kvweave.errors import ConfigError
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.routes.model_names import RequestDefaults
from worlds.serving import KbServer, make_libraries, serving, user

ZORB = {"title": "Zorbs", "text": "A zorb is a small round tool. It is 14 cm wide."}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
KEYS = parse_keys(["sk-of-nobody", "sk-of-acme:acme"])


@pytest.fixture(scope="module")
def named(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    """A server with an alias, keys, and a knowledge base of those without a tenant."""
    root = tmp_path_factory.mktemp("named")
    libraries = make_libraries(weave, root)
    usual = RequestDefaults(aliases=("gpt-4o-mini", "tiny"))
    with serving(weave, libraries=libraries, keys=KEYS, usual=usual) as address:
        with make_client(address) as client:
            client.post("/kb/handbook/documents", body=ZORB, cast_to=httpx.Response)
        yield KbServer(address, weave, libraries, root)
    libraries.close()


def make_client(url: str, key: str = "sk-of-nobody") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def test_the_list_has_model_alias_knowledge_base_and_embedder(named: KbServer) -> None:
    with make_client(named.url) as client:
        kinds = {card.id: card.kind for card in client.models.list()}  # type: ignore[attr-defined]
        assert kinds == {
            "tiny": "model",
            "gpt-4o-mini": "alias",
            "tiny@handbook": "kb",
            "words": "embedder",
        }
        assert next(iter(kinds)) == "tiny", "who takes the first one gets the model"
        for name in (*kinds, "gpt-4o-mini@handbook"):
            assert client.models.retrieve(name).id == name
        for name in ("tiny@nowhere", "other@handbook", "tiny@", "handbook"):
            with pytest.raises(openai.NotFoundError, match="no model"):
                client.models.retrieve(name)


def test_tenants_see_their_own_knowledge_bases_alone(named: KbServer) -> None:
    with make_client(named.url, "sk-of-acme") as client:
        assert "tiny@handbook" not in [card.id for card in client.models.list()]
        with pytest.raises(openai.NotFoundError, match="no knowledge base 'handbook'"):
            client.chat.completions.create(model="tiny@handbook", messages=user("How wide?"))


@pytest.mark.parametrize("name", ["tiny@handbook", "gpt-4o-mini@handbook"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_such_a_model_answers_from_the_knowledge_base(
    named: KbServer, name: str, stream: bool
) -> None:
    with make_client(named.url) as client:
        chats: Any = client.chat.completions
        asked = chats.create(model="tiny", messages=user("How wide?"), **GREEDY, extra_body=OVER)
        assert [s["title"] for s in asked.sources] == ["Zorbs"]
        got = chats.create(model=name, messages=user("How wide?"), stream=stream, **GREEDY)
        if stream:
            chunks = list(got)
            assert {chunk.model for chunk in chunks} == {name}
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            sources = next(c.sources for c in chunks if hasattr(c, "sources"))
        else:
            assert got.model == name
            text, sources = got.choices[0].message.content, got.sources
        assert text == asked.choices[0].message.content
        assert [s["title"] for s in sources] == ["Zorbs"]


OVER = {"kb": "handbook"}


def test_the_same_knowledge_base_twice_is_no_contradiction(named: KbServer) -> None:
    with make_client(named.url) as client:
        reply: Any = client.chat.completions.create(
            model="tiny@handbook", messages=user("How wide?"), extra_body=OVER, **GREEDY
        )
        assert [s["title"] for s in reply.sources] == ["Zorbs"]


def test_a_text_goes_on_without_a_knowledge_base(named: KbServer) -> None:
    with make_client(named.url) as client:
        reply = client.completions.create(model="gpt-4o-mini", prompt="Drain", max_tokens=2)
        assert reply.model == "gpt-4o-mini"
        with pytest.raises(openai.BadRequestError, match="is for /v1/chat/completions"):
            client.completions.create(model="tiny@handbook", prompt="Drain")


def test_an_alias_is_a_word_without_an_at() -> None:
    for alias in ("", "a@b"):
        with pytest.raises(ConfigError, match=r"server\.aliases: .* cannot name a model"):
            RequestDefaults(aliases=(alias,))


NEUTRAL: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "store": False,
    "metadata": {"chat": "1"},
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "mine",
    "modalities": ["text"],
    "service_tier": "auto",
    "reasoning_effort": "none",
    "verbosity": "medium",
    "n": 1,
    "top_logprobs": None,
}


def test_fields_that_ask_for_nothing_change_nothing(client: OpenAI) -> None:
    greedy = {"model": "tiny", "temperature": 0, "max_tokens": 8, "messages": user("hello")}
    plain = client.chat.completions.create(**greedy)
    assert client.chat.completions.create(**greedy, **NEUTRAL).choices == plain.choices
    whole = plain.choices[0].message.model_dump()  # refusal: None, tool_calls: None, …
    back = [{**whole, "tool_calls": [], "annotations": []}, *user("and?")]
    messages = [*user("hello"), *back]
    again = client.chat.completions.create(**{**greedy, "messages": messages}, **NEUTRAL)
    assert again.choices[0].message.content


def test_penalties_reach_the_sampler_and_make_words_rarer(client: OpenAI, weave: Weave) -> None:
    greedy = {"model": "tiny", "temperature": 0, "max_tokens": 32, "messages": user("hello")}
    off = {"extra_body": {"stop_loops": False}}
    plain = client.chat.completions.create(**greedy, **off).choices[0].message.content
    rare = client.chat.completions.create(
        **greedy, **off, presence_penalty=1.0, frequency_penalty=2.0
    )
    assert rare.choices[0].message.content != plain
    sampling = weave.sampling(
        {
            "max_tokens": 32,
            "stop_loops": False,
            "presence_penalty": 1.0,
            "frequency_penalty": 2.0,
        }
    )
    wanted = weave.chat(user("hello"), sampling=sampling).finish().text
    assert rare.choices[0].message.content == wanted


def test_what_was_cached_is_in_the_usage(kb_server: KbServer, tmp_path: Path) -> None:
    url = f"{kb_server.url}/v1"
    text = {"title": "Cached", "text": "The cached lamp of the usage test is 31 cm high."}
    httpx.post(f"{url}/kb/usage/documents?wait_for_kv=true", json=text, timeout=60)
    body = {"messages": user("How high is the lamp?"), "kb": "usage", "explain": True, **GREEDY}
    for reuse in ("full", "reuse"):
        reply = httpx.post(f"{url}/chat/completions", json={**body, "reuse": reuse}, timeout=60)
        tokens, usage = reply.json()["explain"]["tokens"], reply.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == tokens["exact"] + tokens["reused"]
        assert (cached > 0) == (reuse == "reuse")
