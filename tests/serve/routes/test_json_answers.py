"""JSON mode and JSON schema, with the official client: whatever the model, the answer is JSON."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from worlds.serving import KbServer, user

pytest.importorskip("llguidance", reason="make test installs it")
SCHEMA = {
    "type": "object",
    "properties": {"tool": {"enum": ["zorb", "blint"]}, "fits": {"type": "boolean"}},
    "required": ["tool", "fits"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "tool", "schema": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_keeps_the_schema(client: OpenAI, stream: bool, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": user("Which tool?"),
        "temperature": temperature,
        "max_tokens": 120,
        "response_format": FORMAT,
    }
    if stream:
        chunks = [c for c in client.chat.completions.create(**asked, stream=True) if c.choices]
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert reason == "stop"
    said = json.loads(text)
    assert said["tool"] in ("zorb", "blint")
    assert isinstance(said["fits"], bool)


def test_json_mode_begins_an_object(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=user("Say something as JSON."),
        max_tokens=12,
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert str(reply.choices[0].message.content).startswith("{")


def test_answers_from_a_knowledge_base_and_beside_others_keep_it_too(kb_server: KbServer) -> None:
    with OpenAI(base_url=f"{kb_server.url}/v1", api_key="none") as client:
        body = {"title": "Zorb", "text": "A zorb fits every hand."}
        client.post("/kb/shaped/documents", body=body, cast_to=dict)  # type: ignore[type-var]
        reply = client.chat.completions.create(
            model="tiny@shaped",
            messages=user("Which tool?"),
            n=3,
            max_tokens=120,
            response_format=FORMAT,
        )
    for choice in reply.choices:
        assert json.loads(str(choice.message.content))["tool"] in ("zorb", "blint")


@pytest.mark.parametrize(
    "schema", [{"type": "magic"}, {"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}], ids=str
)
def test_a_schema_that_no_answer_keeps_is_a_400(client: OpenAI, schema: dict[str, Any]) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="no answer can be held to this JSON schema"):
        client.chat.completions.create(
            model="tiny", messages=user("hello"), max_tokens=4, response_format=bad
        )
