"""What the server says no to: the right status, OpenAI's shape, one line that names the thing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.app.weave import Weave
from kvweave.serve.access.limits import Limits
from worlds.serving import serving, user

HELLO: dict[str, Any] = {"messages": user("hello"), "max_tokens": 1}
SYSTEM = {"role": "system", "content": "s"}
HI = {"role": "assistant", "content": "Hi."}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}

# what is sent on top of HELLO → what the message must say
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"five": 1}}, "'logit_bias' must have token ids as its keys, got 'five'"),
    ({"logit_bias": {"5": 101}}, "logit_bias must be made of numbers between -100 and 100"),
    ({"logit_bias": {"5": "1"}}, "'logit_bias.5' must be a valid number, got '1'"),
    ({"logit_bias": {"99999": 1}}, "logit_bias has token ids outside the vocabulary of"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "must be at most 1024 token ids, got 1025"),
    ({"logit_bias": []}, "'logit_bias' must be a valid dictionary"),
    ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
    ({"tools": [{"type": "function"}]}, "'tools.0.function' is missing"),
    ({"tool_choice": "always"}, "'tool_choice' must be auto, none, required or one function"),
    ({"response_format": {"type": "xml"}}, "'response_format.type' must be 'text', 'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "goes with type 'json_schema', and only with"),
    ({"modalities": ["audio"]}, "'modalities' is not supported other than [\"text\"]"),
    ({"prediction": {}}, "'prediction' is not supported"),
    ({"a": 1, "b": 2}, "'a' is not supported; 'b' is not supported"),
    ({"messages": []}, "'messages' is empty; send at least one"),
    ({"messages": None}, "'messages' is missing"),
    ({"messages": "hello"}, "'messages' must be a valid list, got 'hello'"),
    ({"messages": user("  \n")}, "'messages.0.content' is empty; say something"),
    ({"messages": [{"role": "user"}]}, "'messages.0.content' is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "'messages.0.content' must be a string or"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'messages.0.content.0.type' must be"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "'messages.0.role' must be 'system'"),
    ({"messages": [{**SYSTEM, "name": "bob"}]}, "'messages.0.name' is not supported"),
    ({"messages": user("word " * 3000)}, "the model's context holds 512"),
    ({"messages": user("\ud800")}, "must be valid Unicode text"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": "5"}, "'max_tokens' must be a valid integer, got '5'"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "'max_completion_tokens' differ"),
    ({"temperature": -1}, "temperature must be between 0 and 100, got -1.0"),
    ({"temperature": "hot"}, "'temperature' must be a valid number, got 'hot'"),
    ({"temperature": True}, "'temperature' must be a valid number, got True"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1"),
    ({"top_k": -1}, "top_k must be 0 (off) or more, got -1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100"),
    ({"seed": -1}, "seed must be between 0 and 2**63 - 1"),
    ({"seed": 10**400}, "seed must be between 0 and 2**63 - 1"),
    ({"stop": ["a"] * 5}, "'stop' must be at most 4 strings, got 5"),
    ({"stop": ""}, "stop must be made of non-empty strings"),
    ({"stop": 5}, "'stop' must be a string or a list of strings, got 5"),
    ({"stop": ["a", 5]}, "'stop.1' must be a valid string, got 5"),
    ({"n": 0}, "'n' must be between 1 and 16, got 0"),
    ({"n": 17}, "'n' must be between 1 and 16, got 17"),
    ({"kb": "nowhere"}, "no knowledge base 'nowhere' here; known: none yet"),
    ({"kb": "../etc"}, "'../etc' cannot name a knowledge base; use letters"),
    ({"kb": "a" * 65}, "cannot name a knowledge base"),
    ({"k": 3}, "'k' needs 'kb' or 'documents'"),
    ({"kb": "x", "k": 0}, "'k' must be between 1 and 1000, got 0"),
    ({"kb": "x", "documents": ["a"], "k": 3}, "'k' chooses among a knowledge base"),
    ({"conversation_id": "c"}, "'conversation_id' needs 'kb' or 'documents'"),
    ({"documents": ["a"], "conversation_id": "c"}, "'conversation_id' needs 'kb'"),
    ({"kb": "x", "conversation_id": ""}, "'conversation_id' must have 1 to 256 characters"),
    ({"reuse": "weave"}, "'reuse' 'weave' needs 'kb' or 'documents'; else: auto, prefix, full"),
    ({"reuse": 5}, "'reuse' must be a string or an object with a strategy, got 5"),
    ({"kb": "x", "reuse": {"ratios": 1}}, "'reuse.ratios' is not supported"),
    ({"retrieval": "hybrid"}, "'retrieval' needs 'kb'"),
    ({"cite": True}, "'cite' needs 'kb' or 'documents'"),
    ({"documents": ["a"], "min_score": 1}, "'min_score' is about a search of 'kb'"),
    ({"kb": "x", "retrieval": "magic"}, "'retrieval' must be 'vector', 'words' or 'hybrid'"),
    ({"order": "shuffle"}, "'order' must be 'as_found', 'free' or 'auto', got 'shuffle'"),
    ({"explain": "yes"}, "'explain' must be a valid boolean"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, got -3"),
    ({"store": True}, "'store' is not supported other than false"),
    ({"store": 0}, "'store' is not supported other than false, got 0"),
    ({"model": "tiny@notes", "kb": "other"}, "'model' 'tiny@notes' and 'kb' 'other' differ"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
    ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs': true"),
    ({"stream_options": {"x": 1}}, "'stream_options.x' is not supported"),
    ({"documents": [" "]}, "'documents.0' is empty; leave it out"),
    ({"documents": ["a", 5]}, "'documents.1' must be a string or an object with text and title"),
    ({"documents": [{"title": "t"}]}, "'documents.0.text' is missing"),
    ({"documents": [{"text": "t", "url": "u"}]}, "'documents.0.url' is not supported"),
    ({"documents": ["a"], "messages": [HI, *user("a")]}, "got assistant, user"),
    ({"documents": ["a"], "messages": [SYSTEM, SYSTEM, *user("a")]}, "at most one system message"),
    (
        {"documents": ["a"], "messages": [SYSTEM]},
        "'documents' and 'kb' go with user and assistant messages in turn",
    ),
    ({"documents": ["word " * 3000]}, "send less text or fewer documents"),
]


def post(url: str, body: Any = None, **how: Any) -> httpx.Response:
    if body is not None:
        how["content"] = json.dumps(body)
    headers = how.pop("headers", {"Content-Type": "application/json"})
    return httpx.post(f"{url}/v1/chat/completions", headers=headers, timeout=60, **how)


def refusal(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a reply, checked for OpenAI's shape."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 700
    return dict(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=[says[:40] for _, says in FAULTS])
def test_a_fault_is_a_400_that_names_it(
    url: str, fault: dict[str, Any], says: str, stream: bool
) -> None:
    status = 404 if fault.get("kb") == "nowhere" else 400
    error = refusal(post(url, {"stream": stream, **HELLO, **fault}), status)
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def test_stream_options_need_a_stream(url: str) -> None:
    error = refusal(post(url, {**HELLO, "stream_options": {"include_usage": True}}), 400)
    assert error["message"] == "'stream_options' needs 'stream': true"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=lambda c: repr(c[:20]) + str(len(c)),
)
def test_a_body_that_is_no_request_is_a_400(url: str, content: bytes) -> None:
    refusal(post(url, content=content), 400)


def test_a_body_of_another_type_is_told_which_one_to_send(url: str) -> None:
    reply = post(url, HELLO, headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in refusal(reply, 400)["message"]


def test_malformed_json_says_where(url: str) -> None:
    error = refusal(post(url, content=b'{"messages": oops}'), 400)
    assert error["message"] == "the body is not valid JSON: Expecting value at 13"


def test_an_unknown_model_is_a_404_that_names_the_served_one(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"no model 'gpt-5' .* has 'tiny'") as seen:
        client.chat.completions.create(model="gpt-5", messages=user("hi"))
    assert (seen.value.code, seen.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="'org/gpt-5'"):
        client.models.retrieve("org/gpt-5")


def test_the_client_raises_bad_request_with_our_words(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'logit_bias' must have token ids") as seen:
        client.chat.completions.create(model="tiny", messages=user("hi"), logit_bias={"a": 1})
    assert seen.value.param == "logit_bias"


def test_a_prompt_that_the_context_does_not_hold_has_openais_code(client: OpenAI) -> None:
    for text in ("word " * 600, "word " * 300_000):  # found out by tokens, and before them
        with pytest.raises(openai.BadRequestError, match="context holds 512") as seen:
            client.chat.completions.create(model="tiny", messages=user(text))
        assert seen.value.code == "context_length_exceeded"


def test_unknown_paths_and_methods_have_the_same_shape(url: str) -> None:
    message = refusal(httpx.get(f"{url}/v1/nothing"), 404)["message"]
    assert message == "GET /v1/nothing is not served here"
    refusal(httpx.get(f"{url}/v1/chat/completions"), 405)


@pytest.mark.parametrize("size", [3_000, 200_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_a_413_whatever_its_headers_say(
    small_url: str, size: int, chunked: bool
) -> None:
    content = json.dumps({"messages": user("x" * size)}).encode()

    def in_chunks() -> Iterator[bytes]:
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    reply = post(small_url, content=in_chunks() if chunked else content)
    assert "larger than" in refusal(reply, 413)["message"]
    assert post(small_url, HELLO).status_code == 200  # it goes on


@pytest.fixture(scope="module")
def small_url(weave: Weave) -> Iterator[str]:
    with serving(weave, Limits(body_bytes=2048)) as address:
        yield address
