"""Several answers to one prompt, and plain completions."""

import math
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.app.weave import Sampling, Weave
from kvweave.serve.routes.sampling import seeds
from worlds.serving import user

HOT: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "seed": 7}


def by_choice(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (said or "")
    return texts


def test_n_answers_differ_and_the_first_is_that_of_one(client: OpenAI) -> None:
    one = client.chat.completions.create(messages=user("hello"), **HOT)
    three = client.chat.completions.create(messages=user("hello"), n=3, **HOT)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in three.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 30
    again = client.chat.completions.create(messages=user("hello"), n=3, **HOT)
    assert [choice.message.content for choice in again.choices] == texts


def test_streamed_choices_join_to_the_plain_ones(client: OpenAI) -> None:
    plain = client.chat.completions.create(messages=user("hello"), n=3, **HOT)
    chunks = list(
        client.chat.completions.create(
            messages=user("hello"),
            n=3,
            stream=True,
            stream_options={"include_usage": True},
            **HOT,
        )
    )
    assert by_choice(chunks) == {c.index: c.message.content for c in plain.choices}
    ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens


def test_seeds_are_derived_and_stay_in_range() -> None:
    assert seeds(None, 3) == [None] * 3
    many = seeds(2**63 - 1, 16)
    assert many[0] == 2**63 - 1
    assert len(set(many)) == 16
    assert all(seed is not None and 0 <= seed < 2**63 for seed in many)
    assert seeds(5, 4) == seeds(5, 16)[:4]


def test_a_completion_goes_on_from_the_text_itself(client: OpenAI, weave: Weave) -> None:
    answer = weave.complete("The quick brown", sampling=Sampling(max_tokens=16)).finish()
    reply = client.completions.create(model="tiny", prompt="The quick brown", temperature=0)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == answer.text
    assert reply.usage.completion_tokens == 16  # OpenAI's default of plain completions
    assert answer.prompt_tokens < weave.chat(user("The quick brown")).finish().prompt_tokens


def test_several_prompts_have_several_answers_each(client: OpenAI) -> None:
    prompts = ["The quick", "Drain the"]
    both = client.completions.create(prompt=prompts, n=2, **HOT)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, n=2, **HOT)
        pair = [choice.text for choice in both.choices[2 * place : 2 * place + 2]]
        assert pair == [choice.text for choice in alone.choices]
    chunks = list(client.completions.create(prompt=prompts, n=2, stream=True, **HOT))
    assert by_choice(chunks) == {choice.index: choice.text for choice in both.choices}


def test_token_ids_are_a_prompt_too(client: OpenAI, weave: Weave) -> None:
    ids = weave.build_prompt("hello").token_ids
    answer = weave.complete(ids, sampling=Sampling(max_tokens=5)).finish()
    for prompt in (ids, [ids]):
        reply = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=5)
        assert reply.choices[0].text == answer.text
        assert reply.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_logprobs_of_the_older_shape(client: OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "The", "temperature": 0, "logprobs": 2}
    if stream:
        parts = [c.choices[0].logprobs for c in client.completions.create(stream=True, **request)]
        parts = [part for part in parts if part is not None]
    else:
        parts = [client.completions.create(**request).choices[0].logprobs]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert len(tokens) == 16
    assert offsets == [sum(map(len, tokens[:i])) for i in range(16)]
    for part in parts:
        for logprob, top in zip(part.token_logprobs, part.top_logprobs, strict=True):
            assert logprob == max(top.values())
            assert sum(math.exp(value) for value in top.values()) <= 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"prompt": []}, "'prompt' must be a string, a list of token ids"),
        ({"prompt": [1, "a"]}, "'prompt' must be a string, a list of token ids"),
        ({"prompt": [10**9]}, "token ids outside the vocabulary"),
        ({"prompt": [-1]}, "token ids outside the vocabulary"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["a"] * 17}, "'prompt' must be at most 16 prompts, got 17"),
        ({"prompt": ["a"] * 8, "n": 3}, "'n' must be between 1 and 2, got 3"),
        ({"echo": True}, "'echo' is not supported other than false"),
        ({"best_of": 2}, "'best_of' is not supported other than 1"),
        ({"suffix": "x"}, "'suffix' is not supported other than \"\", got 'x'"),
        ({"kb": "notes"}, "'kb' is not supported"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20"),
    ],
)
def test_a_completion_that_makes_no_sense_is_refused(
    url: str, fault: dict[str, Any], says: str
) -> None:
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1, **fault})
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]


def test_a_request_of_more_answers_than_fit_is_admitted_whole_or_not(
    chat_model_folder: Any,
) -> None:
    from kvweave.serve.access.limits import Limits
    from worlds.serving import health, make_weave, serving

    limits = Limits(running=1, waiting=1)
    with (
        serving(make_weave(chat_model_folder), limits) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(messages=user("hello"), n=3, **HOT)
        assert len(client.chat.completions.create(messages=user("hi"), n=2, **HOT).choices) == 2
        assert health(address)["finished"] == 2
