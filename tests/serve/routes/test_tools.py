"""Tool calls with the official client: asked for, made, streamed, answered, refused."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from kvweave.app.weave import Weave
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.serving import KbServer, make_libraries, serving, user
from worlds.tool_models import CALL, WEIGHT, WIDTH, TellingDecoder, make_tool_model_folder
from worlds.weaves import plain_weave

TOOLS: Any = [WIDTH, WEIGHT]
BODY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> TellingDecoder:
    folder = make_tool_model_folder(tmp_path_factory.mktemp("tools"))
    return TellingDecoder(load_decoder(folder, device="cpu"), Tokenizer(folder))


@pytest.fixture(scope="module")
def tool_weave(decoder: TellingDecoder) -> Weave:
    return plain_weave(decoder, decoder.tokenizer)


@pytest.fixture(scope="module")
def server(tool_weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    root = tmp_path_factory.mktemp("kbs")
    libraries = make_libraries(tool_weave, root)
    with serving(tool_weave, libraries=libraries) as address:
        yield KbServer(address, tool_weave, libraries, root)
    libraries.close()


@pytest.fixture
def tools(server: KbServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def silent(request: pytest.FixtureRequest) -> None:
    """No test hears what another told the decoder to say."""
    if "tools" in request.fixturenames:
        request.getfixturevalue("decoder").hush()


def streamed(client: OpenAI, **body: Any) -> tuple[str, list[tuple[str, Any]], str, list[str]]:
    """Words, calls by name and arguments, how it ended, ids of calls."""
    chunks = [c for c in client.chat.completions.create(**body, stream=True) if c.choices]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or ()]
    assert [part.index for part in parts] == list(range(len(parts)))
    calls = [(part.function.name, json.loads(part.function.arguments)) for part in parts]
    return text, calls, chunks[-1].choices[0].finish_reason, [part.id for part in parts]


def test_a_call_is_read_from_the_answer(tools: OpenAI, decoder: TellingDecoder) -> None:
    decoder.tell(f"Let me look.\n{CALL}")
    reply = tools.chat.completions.create(**BODY, messages=user("How wide?"), tools=TOOLS)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "width_of",
        {"thing": "zorb"},
    )
    decoder.tell(f"{CALL}\n{CALL}")
    text, calls, reason, ids = streamed(tools, **BODY, messages=user("How wide?"), tools=TOOLS)
    assert (text, calls, reason) == ("", [("width_of", {"thing": "zorb"})] * 2, "tool_calls")
    assert len(set(ids)) == 2


def test_an_answer_without_a_call_has_no_word_of_calls(
    tools: OpenAI, decoder: TellingDecoder
) -> None:
    decoder.tell("It is 14 cm wide.")
    reply = tools.chat.completions.with_raw_response.create(
        **BODY, messages=user("How wide?"), tools=TOOLS
    )
    choice = json.loads(reply.text)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It is 14 cm wide."}
    assert choice["finish_reason"] == "stop"


def test_one_call_at_a_time_if_that_is_wanted(tools: OpenAI, decoder: TellingDecoder) -> None:
    decoder.tell(f"{CALL}\n{CALL}")
    asked: dict[str, Any] = {**BODY, "messages": user("How wide?"), "tools": TOOLS}
    _, calls, reason, _ = streamed(tools, **asked, parallel_tool_calls=False)
    assert (len(calls), reason) == (1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_that_must_come_comes_whatever_the_model(
    tools: OpenAI, stream: bool, temperature: float
) -> None:
    pytest.importorskip("llguidance", reason="make test installs it")
    named: Any = {"type": "function", "function": {"name": "weight_of"}}
    for choice in ("required", named):
        asked: dict[str, Any] = {**BODY, "messages": user("?"), "tools": TOOLS}
        asked |= {"tool_choice": choice, "temperature": temperature}
        if stream:
            text, ((name, arguments),), reason, _ = streamed(tools, **asked)
        else:
            answer = tools.chat.completions.create(**asked).choices[0]
            (call,) = answer.message.tool_calls or ()
            text, reason = answer.message.content or "", answer.finish_reason
            name, arguments = call.function.name, json.loads(call.function.arguments)
        assert (text, reason) == ("", "tool_calls")
        assert arguments["thing"] in ("zorb", "blint", "gnarl")
        if choice is named:
            assert name == "weight_of"
            assert isinstance(arguments["grams"], bool)


def test_results_go_back_and_their_conversation_is_not_computed_again(
    tools: OpenAI, decoder: TellingDecoder
) -> None:
    messages: list[Any] = user("How wide is a zorb?")
    decoder.tell(CALL)
    first = tools.chat.completions.create(**BODY, messages=messages, tools=TOOLS)
    messages.append(first.choices[0].message)  # as the client has it
    call = (first.choices[0].message.tool_calls or [])[0]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 cm"})
    decoder.tell("14 cm.")
    second = tools.chat.completions.create(**BODY, messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "14 cm."
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert first.usage is not None
    assert cached > 0.8 * first.usage.prompt_tokens


def test_a_knowledge_base_and_tools_go_together(
    tools: OpenAI, decoder: TellingDecoder, server: KbServer
) -> None:
    body = {"title": "Zorb", "text": "A zorb fits every hand."}
    tools.post("/kb/handy/documents", body=body, cast_to=dict)  # type: ignore[type-var]
    asked: dict[str, Any] = {**BODY, "model": "tiny@handy", "tools": TOOLS}
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, *user("How wide is a zorb?")]
    decoder.tell(CALL)
    first = tools.chat.completions.create(**asked, messages=messages)
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.sources[0]["title"] == "Zorb"  # type: ignore[attr-defined]
    call = (first.choices[0].message.tool_calls or [])[0]
    messages += [first.choices[0].message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "14 cm"}]
    decoder.tell("14 cm.")
    second = tools.chat.completions.create(**asked, messages=messages)
    assert second.choices[0].message.content == "14 cm."
    assert second.sources[0]["title"] == "Zorb"  # type: ignore[attr-defined]
    messages += [second.choices[0].message, *user("And a blint?")]
    decoder.tell("No idea.")
    third = tools.chat.completions.create(**asked, messages=messages)
    assert third.choices[0].message.content == "No idea."


def test_none_shows_no_tools(tools: OpenAI, decoder: TellingDecoder) -> None:
    decoder.tell(CALL)
    asked: dict[str, Any] = {**BODY, "messages": user("How wide?"), "tools": TOOLS}
    told = tools.chat.completions.create(**asked, tool_choice="none")
    assert told.choices[0].message.content == CALL
    assert told.choices[0].message.tool_calls is None
    decoder.tell("so")
    plain = tools.chat.completions.create(**BODY, messages=user("How wide?"))
    assert told.usage is not None
    assert plain.usage is not None
    assert told.usage.prompt_tokens == plain.usage.prompt_tokens


CALLED = {"id": "a", "type": "function", "function": {"name": "width_of", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "14 cm"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "'tools.0.function' is missing"),
    ({"tools": [WIDTH, WIDTH]}, "two tools have the same name"),
    ({"tools": TOOLS, "tool_choice": "always"}, "'tool_choice' must be auto, none, required or"),
    ({"tool_choice": "required"}, "'required' needs tools; send some"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice names 'x', and no tool is called so",
    ),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "goes with no 'tools'"),
    ({"messages": [*user("?"), RESULT]}, "a 'tool' message answers a call"),
    ({"messages": [*user("?"), ASSISTANT]}, "'messages.1' calls tools; send their results"),
    ({"messages": [{**RESULT, "role": "user"}]}, "'messages.0.tool_call_id' goes with the role"),
    ({"messages": [{**ASSISTANT, "role": "user"}]}, "'messages.0.tool_calls' are an assistant's"),
    ({"messages": [{"role": "assistant"}, *user("?")]}, "'messages.0.content' is missing"),
    (
        {"tools": TOOLS, "documents": ["A zorb."], "messages": [*user("?"), ASSISTANT, *user("!")]},
        "user and assistant messages in turn",
    ),
]


@pytest.mark.parametrize(("sent", "says"), REFUSED)
def test_what_cannot_be_meant_is_a_400(tools: OpenAI, sent: dict[str, Any], says: str) -> None:
    body = {**BODY, "messages": user("?"), **{k: v for k, v in sent.items() if k != "documents"}}
    more = {"documents": sent["documents"]} if "documents" in sent else {}
    with pytest.raises(openai.BadRequestError) as seen:
        tools.chat.completions.create(**body, extra_body=more)
    assert says in str(seen.value)


def test_a_model_whose_template_has_no_tools_says_so(client: OpenAI, url: str) -> None:
    asked: dict[str, Any] = {**BODY, "messages": user("How wide?"), "tools": TOOLS}
    with pytest.raises(openai.BadRequestError, match="the chat template of llama shows no tools"):
        client.chat.completions.create(**asked)
    reply = client.chat.completions.create(**{**asked, "max_tokens": 2}, tool_choice="none")
    assert reply.choices[0].finish_reason == "length"
    body = {"documents": ["A zorb."]}
    with pytest.raises(openai.BadRequestError, match="shows no tools"):
        client.chat.completions.create(**asked, extra_body=body)
