"""Prompts for upstreams: the same ids as the engine's own, with the spans of the chunks."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.app.answer.question import KVTransfer
from kvweave.engine.sampling import Sampling
from kvweave.errors import RequestError
from kvweave.gateway.bodies import UpstreamRequest, body_of
from kvweave.gateway.cards import UpstreamCard, UpstreamKind
from kvweave.gateway.prompts import TextPrompts, TokenPrompts, UpstreamPrompt, UpstreamWords
from kvweave.text.prompt import PastMessage, lay_out, spanned_prompt
from kvweave.text.tokenizer import Tokenizer

VLLM = UpstreamCard(UpstreamKind.VLLM, "m", 4096, fuses=True)


@pytest.fixture
def tokenizer(chat_model_folder: Path) -> Tokenizer:
    return Tokenizer(chat_model_folder)


def chunk(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_text(text))


def made(tokenizer: Tokenizer) -> tuple[UpstreamPrompt, UpstreamWords]:
    old, new = chunk(tokenizer, "An old passage.\n\n"), chunk(tokenizer, "A new one.\n\n")
    past = [PastMessage("user", "Why?", (old,)), PastMessage("assistant", "So.")]
    words = UpstreamWords("And how?", (new,), "Be brief.", past)
    return TokenPrompts(tokenizer).make(words, str), words


def test_spans_name_the_chunks_in_the_history_and_behind_it(tokenizer: Tokenizer) -> None:
    prompt, words = made(tokenizer)
    ids = prompt.content["prompt"]
    expected = lay_out(tokenizer, words.question, words.chunks, words.system, words.history)
    assert ids == expected.token_ids
    old, new = words.history[0].chunks[0], words.chunks[0]
    assert [tuple(ids[start:end]) for start, end in prompt.spans] == [old, new]
    assert tuple(ids[: prompt.preamble]) == expected.preamble
    assert prompt.asked is not None
    start, end = prompt.asked
    assert tokenizer.decode(ids[start:end]).strip() == "And how?"
    assert sum(part.num_tokens for part in prompt.routed.parts) == len(ids)


def test_an_engine_reads_the_spans_as_the_prompt_was_laid_out(tokenizer: Tokenizer) -> None:
    prompt, words = made(tokenizer)
    expected = lay_out(tokenizer, words.question, words.chunks, words.system, words.history)
    read = spanned_prompt(prompt.content["prompt"], prompt.spans, prompt.preamble, prompt.asked)
    assert read == expected


@pytest.mark.parametrize("spans", [[(3, 2)], [(2, 5), (4, 6)], [(5, 6), (1, 2)], [(2, 2)]])
def test_spans_that_cannot_be_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(RequestError, match="half-open spans"):
        KVTransfer(tuple(spans))


@pytest.mark.parametrize("spans", [[(0, 3)], [(3, 10)], [(3, 12)]])
def test_a_prompt_has_tokens_around_its_chunks(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(RequestError, match="in front of them and a question behind"):
        spanned_prompt(list(range(10)), spans)


def test_a_question_stands_behind_the_chunks() -> None:
    with pytest.raises(RequestError, match="does not stand behind"):
        spanned_prompt(list(range(10)), [(2, 5)], asked=(4, 8))


def test_what_an_engine_with_the_connector_is_told(tokenizer: Tokenizer) -> None:
    prompt, _ = made(tokenizer)
    request = UpstreamRequest(prompt, Sampling(max_tokens=5), "acme", "weave", 0.15)
    body = body_of(request, VLLM)
    told = body["kv_transfer_params"]["kvweave"]
    assert told["chunks"] == [list(span) for span in prompt.spans]
    assert (told["reuse"], told["ratio"], told["tenant"]) == ("weave", 0.15, "acme")
    assert set(told) == {"chunks", "preamble", "reuse", "ratio", "asked", "tenant"}
    assert len(body["cache_salt"]) == 64, "exact blocks are the tenant's own as well"
    assert (body["max_tokens"], body["stream"]) == (5, True)
    assert body_of(request.prefill_only(), VLLM)["max_tokens"] == 1
    chooses = replace(request, reuse=None, ratio=None, bound=0.01)
    told = body_of(chooses, VLLM)["kv_transfer_params"]["kvweave"]
    assert told["bound"] == 0.01
    assert "reuse" not in told, "the engine's gate chooses"


def test_an_engine_without_it_gets_a_plain_prompt(tokenizer: Tokenizer) -> None:
    prompt, _ = made(tokenizer)
    plain = UpstreamCard(UpstreamKind.LLAMACPP, "m")
    body = body_of(UpstreamRequest(prompt, Sampling(temperature=0.5)), plain)
    assert set(body) == {
        *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options"),
    }
    bent = Sampling(min_p=0.1, logit_bias=((7, -100.0),))
    told = body_of(UpstreamRequest(prompt, bent), plain)
    assert (told["min_p"], told["logit_bias"]) == (0.1, {"7": -100.0})
    full = body_of(UpstreamRequest(prompt, Sampling(), reuse="full"), VLLM)
    assert "kv_transfer_params" not in full, "an engine that hears of no chunks computes them"


def test_text_prompts_hold_the_same_words(tokenizer: Tokenizer) -> None:
    _, words = made(tokenizer)
    prompt = TextPrompts().make(words, tokenizer.decode)
    assert [m["role"] for m in prompt.content["messages"]] == [
        *("system", "user", "assistant", "user"),
    ]
    assert prompt.content["messages"][-1]["content"] == "A new one.\n\nQuestion: And how?"
    assert [part.is_chunk for part in prompt.routed.parts].count(True) == 2
