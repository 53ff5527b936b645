"""The official client, over real HTTP, against a tiny model: what goes in and what comes out."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kvweave.app.weave import Document, Sampling, Weave
from worlds.serving import user

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 24}


def streamed(client: OpenAI, **request: Any) -> list[Any]:
    with client.chat.completions.create(stream=True, **request) as stream:
        return list(stream)


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_a_reply_is_what_weave_answers(client: OpenAI, weave: Weave) -> None:
    answer = weave.chat(user("hello"), sampling=Sampling(max_tokens=24)).finish()
    reply = client.chat.completions.create(messages=user("hello"), **GREEDY)
    assert reply.object == "chat.completion"
    assert reply.model == "tiny"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == answer.text
    assert reply.choices[0].finish_reason == answer.finish_reason == "length"
    assert reply.choices[0].logprobs is None
    assert reply.usage.prompt_tokens == answer.prompt_tokens
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == answer.prompt_tokens + 24


def test_a_stream_joins_to_the_plain_reply(client: OpenAI) -> None:
    plain = client.chat.completions.create(messages=user("hello"), **GREEDY)
    chunks = streamed(client, messages=user("hello"), **GREEDY)
    assert text_of(chunks) == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1
    assert all(c.object == "chat.completion.chunk" and c.usage is None for c in chunks)


def counts(usage: Any) -> tuple[int, int]:
    """Of a usage, what does not depend on what was asked before."""
    return usage.prompt_tokens, usage.completion_tokens


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: OpenAI) -> None:
    plain = client.chat.completions.create(messages=user("hello"), **GREEDY)
    options = {"include_usage": True}
    chunks = streamed(client, messages=user("hello"), stream_options=options, **GREEDY)
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(plain.usage)
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_ends_in_front_of_a_stop_string(client: OpenAI, stream: bool) -> None:
    free = client.chat.completions.create(messages=user("hello"), **GREEDY)
    text = free.choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    request = {"messages": user("hello"), "stop": [stop, "never said"], **GREEDY}
    if stream:
        chunks = streamed(client, **request)
        got, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**request).choices[0]
        got, reason = choice.message.content, choice.finish_reason
    assert got == text[: text.find(stop)]
    assert reason == "stop"


def test_stop_may_be_one_string(client: OpenAI) -> None:
    both = [
        client.chat.completions.create(messages=user("hi"), stop=stop, **GREEDY).choices[0]
        for stop in ("a", ["a"])
    ]
    assert both[0].message.content == both[1].message.content


def test_a_seed_repeats_an_answer_and_another_seed_does_not(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        reply = client.chat.completions.create(
            model="tiny", messages=user("hello"), max_tokens=16, seed=seed
        )
        return str(reply.choices[0].message.content)

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


def test_extensions_reach_the_sampler(client: OpenAI, weave: Weave) -> None:
    reply = client.chat.completions.create(
        messages=user("hello"), extra_body={"repetition_penalty": 1.7, "top_k": 5}, **GREEDY
    )
    sampling = Sampling(max_tokens=24, repetition_penalty=1.7)
    assert (
        reply.choices[0].message.content
        == weave.chat(user("hello"), sampling=sampling).finish().text
    )
    hot = {**GREEDY, "temperature": 50.0}
    reply = client.chat.completions.create(
        messages=user("hello"), extra_body={"top_k": 1}, **hot
    )  # one token to draw from is greedy at any temperature
    greedy = client.chat.completions.create(messages=user("hello"), **GREEDY)
    assert reply.choices[0].message.content == greedy.choices[0].message.content


def test_min_p_and_logit_bias_reach_the_sampler(client: OpenAI, weave: Weave) -> None:
    greedy = client.chat.completions.create(messages=user("hello"), **GREEDY)
    hot = {**GREEDY, "temperature": 50.0}
    one_left = client.chat.completions.create(
        messages=user("hello"), extra_body={"min_p": 1.0}, **hot
    )  # the likeliest alone has all of its own probability
    assert one_left.choices[0].message.content == greedy.choices[0].message.content
    token_id = weave.runtime.tokenizer.encode("node")[0]
    biased = client.chat.completions.create(
        messages=user("hello"), logit_bias={str(token_id): 100}, **{**GREEDY, "max_tokens": 3}
    )
    assert biased.choices[0].message.content == weave.runtime.tokenizer.decode([token_id] * 3)


def test_logprobs_are_the_models(client: OpenAI, weave: Weave) -> None:
    answer = weave.chat(user("hello"), sampling=Sampling(max_tokens=24, logprobs=3)).finish()
    request: dict[str, Any] = {"messages": user("hello"), "logprobs": True, "top_logprobs": 3}
    reply = client.chat.completions.create(**request, **GREEDY)
    content = reply.choices[0].logprobs.content
    assert [(t.token, t.logprob) for t in content] == [
        (t.token, t.logprob) for t in answer.logprobs
    ]
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob  # greedy took the likeliest
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    chunks = streamed(client, **request, **GREEDY)
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [t for part in parts for t in part] == content


def test_logprobs_without_alternatives(client: OpenAI) -> None:
    reply = client.chat.completions.create(messages=user("hello"), logprobs=True, **GREEDY)
    assert all(t.top_logprobs == [] for t in reply.choices[0].logprobs.content)


def test_text_parts_are_joined(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = client.chat.completions.create(messages=user("hello"), **GREEDY)
    reply = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **GREEDY)
    assert reply.choices[0].message.content == whole.choices[0].message.content
    assert reply.usage.prompt_tokens == whole.usage.prompt_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens > 0, "the very same prompt"


def test_a_conversation_goes_on_with_the_message_that_came_back(client: OpenAI) -> None:
    first = client.chat.completions.create(messages=user("hello"), **GREEDY)
    messages = [*user("hello"), first.choices[0].message, *user("and then?")]
    second = client.chat.completions.create(messages=messages, **GREEDY)
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_documents_stand_in_front_of_the_question(client: OpenAI, weave: Weave) -> None:
    documents = ["Drain the node.", {"title": "fox", "text": "The quick brown fox."}]
    reply = client.chat.completions.create(
        messages=user("how?"), extra_body={"documents": documents}, **GREEDY
    )
    texts = [Document("Drain the node."), Document("The quick brown fox.", "fox")]
    answer = weave.ask("how?", documents=texts, sampling=Sampling(max_tokens=24))
    assert reply.choices[0].message.content == answer.text
    assert reply.usage.prompt_tokens == answer.prompt_tokens


def test_a_system_message_takes_the_place_of_the_own_one(client: OpenAI, weave: Weave) -> None:
    messages = [{"role": "developer", "content": "Be exact."}, *user("how?")]
    reply = client.chat.completions.create(
        messages=messages, extra_body={"documents": ["Drain the node."]}, **GREEDY
    )
    sampling = Sampling(max_tokens=24)
    answer = weave.ask("how?", documents=["Drain the node."], sampling=sampling, system="Be exact.")
    assert reply.choices[0].message.content == answer.text
    own = weave.ask("how?", documents=["Drain the node."], sampling=sampling)
    assert own.prompt_tokens != answer.prompt_tokens or own.text != answer.text


def test_no_documents_found_is_still_a_question(client: OpenAI, weave: Weave) -> None:
    reply = client.chat.completions.create(
        messages=user("how?"), extra_body={"documents": []}, **GREEDY
    )
    answer = weave.ask("how?", sampling=Sampling(max_tokens=24))
    assert reply.choices[0].message.content == answer.text


def test_requests_side_by_side_get_the_answers_they_get_alone(client: OpenAI) -> None:
    def ask(i: int) -> str:
        chunks = streamed(client, messages=user(f"question {i}"), **GREEDY)
        return text_of(chunks)

    alone = [ask(i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(6)))
    assert together == alone
    assert len(set(alone)) > 1


def test_the_served_model_is_listed(client: OpenAI, weave: Weave) -> None:
    card, embedder = client.models.list().data
    assert (card.id, embedder.id) == ("tiny", "minilm")
    assert client.models.retrieve("tiny") == card
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == weave.max_context


def test_the_model_may_be_left_out_and_null_means_absent(url: str) -> None:
    body = {"messages": user("hello"), "max_tokens": 2, "tools": None, "seed": None, "user": "me"}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    assert reply.json()["model"] == "tiny"


def test_a_stream_is_events_that_end_with_done(url: str) -> None:
    body = {"messages": user("hello"), "max_tokens": 2, "stream": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]
