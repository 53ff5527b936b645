"""Tools through a gateway: its upstream shows them and reads calls; not over chunks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.gateways import GatewayWorld, gateway_over
from worlds.serving import serving, user
from worlds.tool_models import CALL, WEIGHT, WIDTH, TellingDecoder, make_tool_model_folder
from worlds.weaves import plain_weave

BODY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200}
TOOLS: Any = [WIDTH, WEIGHT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model_folder(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> TellingDecoder:
    return TellingDecoder(load_decoder(folder, device="cpu"), Tokenizer(folder))


@pytest.fixture(scope="module")
def tool_front(
    folder: Path, decoder: TellingDecoder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayWorld]:
    root = tmp_path_factory.mktemp("kbs")
    with (
        plain_weave(decoder, decoder.tokenizer) as weave,
        serving(weave) as url,
        gateway_over([url], root, tokenizer=folder) as world,
    ):
        yield world


@pytest.fixture
def client(tool_front: GatewayWorld) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tool_front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_their_results_are_passed_on(
    client: OpenAI, decoder: TellingDecoder, stream: bool
) -> None:
    decoder.tell(f"{CALL}\n{CALL}")
    messages: list[Any] = user("How wide?")
    asked: dict[str, Any] = {**BODY, "tools": TOOLS, "messages": messages}
    if stream:
        chunks = [c for c in client.chat.completions.create(**asked, stream=True) if c.choices]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        calls = [part for c in chunks for part in c.choices[0].delta.tool_calls or ()]
        ids = [str(call.id) for call in calls]
        messages.append({"role": "assistant", "tool_calls": [c.model_dump() for c in calls]})
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        ids = [call.id for call in choice.message.tool_calls or ()]
        messages.append(choice.message)
    assert len(set(ids)) == 2
    messages += [{"role": "tool", "tool_call_id": each, "content": "14 cm"} for each in ids]
    decoder.tell("14 cm.")
    assert client.chat.completions.create(**asked).choices[0].message.content == "14 cm."


def test_a_call_that_must_come_is_the_upstreams_to_hold(
    client: OpenAI, decoder: TellingDecoder
) -> None:
    pytest.importorskip("llguidance", reason="make test installs it")
    decoder.hush()
    named: Any = {"type": "function", "function": {"name": "weight_of"}}
    choice = client.chat.completions.create(
        **BODY, messages=user("?"), tools=TOOLS, tool_choice=named
    ).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert (call.function.name, choice.finish_reason) == ("weight_of", "tool_calls")


def test_over_chunks_and_without_a_template_it_is_one_line(
    client: OpenAI, front: GatewayWorld
) -> None:
    asked: dict[str, Any] = {**BODY, "messages": user("?"), "tools": TOOLS}
    with pytest.raises(openai.BadRequestError, match="passes 'tools' and their calls on in plain"):
        client.chat.completions.create(**asked, extra_body={"documents": ["A zorb."]})
    refused = httpx.post(f"{front.url}/v1/chat/completions", json=asked, timeout=60)
    assert refused.status_code == 400
    assert "the chat template of llama shows no tools" in refused.json()["error"]["message"]
