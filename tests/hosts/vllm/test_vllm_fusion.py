"""Inside a real vLLM: fused prompts against its own cold ones and against kvweave's own pass."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
from kvweave.text.prompt import Prompt
from kvweave.text.tokenizer import Tokenizer
from worlds.own_pass import OwnPass
from worlds.vllm_server import VllmServer, apart, valley_prompt, wish_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

# of logprobs: two ways to the same sum in float32, over 30 layers
SAME = 2e-3
QUESTIONS = ("Who keeps the bees?", "Which bridge is the oldest?", "When does the market open?")
ORDERS = ((0, 1, 2, 3, 4, 5), (3, 5, 0, 2, 9, 1), (7, 2, 8, 0, 4, 3))


@pytest.fixture(scope="module")
def own(smollm2: Path) -> Iterator[OwnPass]:
    with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 30, pinned=False),))) as store:
        yield OwnPass(smollm2, store)


def cold(vllm: VllmServer, prompt: Prompt, name: str, max_tokens: int = 2):  # type: ignore[no-untyped-def]
    """vLLM's own prefill, with nothing cached."""
    return vllm.ask(prompt.token_ids, max_tokens=max_tokens, cache_salt=f"cold {name}")


@pytest.mark.parametrize(("question", "order"), list(zip(QUESTIONS, ORDERS, strict=True)))
def test_with_every_row_recomputed_it_is_vllms_own_cold_prefill(
    vllm: VllmServer, tokenizer: Tokenizer, question: str, order: tuple[int, ...]
) -> None:
    prompt = valley_prompt(tokenizer, question, order)
    exact = cold(vllm, prompt, f"one {question}", 8)
    wish = wish_of(prompt, reuse="weave", ratio=1.0, missing="encode")
    fused = vllm.ask(prompt.token_ids, wish, 8)
    assert fused.told["way"] == "fused", fused.told
    assert fused.told["reused"] == 0
    assert fused.cached == len(prompt.token_ids) - 1
    assert apart(exact.top, fused.top) < SAME
    assert fused.tokens == exact.tokens


@pytest.mark.parametrize(
    ("reuse", "ratio"),
    [("reuse", 0.0), ("weave", 0.15), ("weave-through", 0.5), ("cacheblend", 0.15), ("epic", 0.2)],
)
def test_a_strategy_gives_what_it_gives_in_kvweave(
    vllm: VllmServer, tokenizer: Tokenizer, own: OwnPass, reuse: str, ratio: float
) -> None:
    prompt = valley_prompt(tokenizer, "What is carried over the pass?", (4, 6, 1, 8, 3))
    wish = wish_of(prompt, reuse=reuse, missing="encode")
    if reuse != "reuse":
        wish["ratio"] = ratio
    fused = vllm.ask(prompt.token_ids, wish)
    assert fused.told["way"] == "fused", fused.told
    assert fused.told["reused"] > 0
    ours = own.first_token(prompt, reuse, ratio)
    assert apart({i: float(ours[i]) for i in fused.top}, fused.top) < SAME


def test_fused_kv_differs_from_exact_kv(vllm: VllmServer, tokenizer: Tokenizer) -> None:
    """Or the tests beside this one would prove nothing."""
    prompt = valley_prompt(tokenizer, QUESTIONS[0], ORDERS[1])
    fused = vllm.ask(prompt.token_ids, wish_of(prompt, reuse="reuse", missing="encode"))
    assert apart(cold(vllm, prompt, "differs").top, fused.top) > 10 * SAME


def test_exact_requests_stay_exact_after_fused_traffic(
    vllm: VllmServer, tokenizer: Tokenizer
) -> None:
    """The prefix cache is never poisoned, and goes on being used."""
    prompts = [valley_prompt(tokenizer, q, (9, 8, 7, 6, 5, 4)) for q in QUESTIONS]
    truth = [cold(vllm, prompt, f"pure {i}", 6) for i, prompt in enumerate(prompts)]
    for prompt in prompts:
        for reuse in ("reuse", "weave"):
            wish = wish_of(prompt, reuse=reuse, missing="encode")
            told = vllm.ask(prompt.token_ids, wish, 6).told
            assert told["way"] == "fused", told
            assert told["reused"] > 0
    first = vllm.ask(prompts[0].token_ids, max_tokens=6)
    assert first.cached == 0, "fused blocks were taken for exact ones"
    assert apart(first.top, truth[0].top) < SAME
    for prompt, exact in zip(prompts, truth, strict=True):
        again = vllm.ask(prompt.token_ids, max_tokens=6)
        assert again.cached > 0, "the prefix cache is off"
        assert apart(again.top, exact.top) < SAME
        assert again.tokens == exact.tokens


def test_what_vllm_has_exactly_is_used_and_not_fused(
    vllm: VllmServer, tokenizer: Tokenizer
) -> None:
    prompt = valley_prompt(tokenizer, QUESTIONS[1], (2, 0, 1, 3))
    vllm.ask(prompt.token_ids)
    reply = vllm.ask(prompt.token_ids, wish_of(prompt))
    assert reply.told["way"] == "exact"
    assert reply.cached > 0


def test_fused_chunks_follow_exact_ones(vllm: VllmServer, tokenizer: Tokenizer) -> None:
    """What vLLM has of the front is read where it lies: with every row behind it recomputed the
    answer is exact."""
    front = valley_prompt(tokenizer, QUESTIONS[2], (6, 2, 9))
    whole = valley_prompt(tokenizer, QUESTIONS[2], (6, 2, 9, 0, 7, 1, 8))
    vllm.ask(front.token_ids)
    exact = cold(vllm, whole, "follow")
    warm = wish_of(whole, reuse="weave", ratio=1.0, missing="encode")
    fused = vllm.ask(whole.token_ids, warm)
    assert fused.told["way"] == "fused", fused.told
    assert fused.told["exact"] > len(front.preamble) + len(front.chunks[0]), fused.told
    assert apart(fused.top, exact.top) < SAME


def test_a_second_ask_finds_its_own_fused_blocks(vllm: VllmServer, tokenizer: Tokenizer) -> None:
    prompt = valley_prompt(tokenizer, "Who repairs the mill?", (1, 4, 0, 9, 3, 8))
    wish = wish_of(prompt, missing="encode")
    one, two = vllm.ask(prompt.token_ids, wish, 4), vllm.ask(prompt.token_ids, wish, 4)
    assert two.tokens == one.tokens
    assert apart(one.top, two.top) < 0.1, "only what no full block holds is fused again"


def test_gaps_between_chunks_are_computed(vllm: VllmServer, tokenizer: Tokenizer) -> None:
    prompt = valley_prompt(tokenizer, QUESTIONS[0], (5, 3, 1, 0))
    wish = wish_of(prompt, reuse="weave", ratio=1.0, missing="encode")
    (start, end), *rest = wish["chunks"]
    wish["chunks"] = [[start + 7, end], *rest[1:]]
    wish["preamble"] = start
    fused = vllm.ask(prompt.token_ids, wish)
    assert fused.told["way"] == "fused", fused.told
    assert apart(fused.top, cold(vllm, prompt, "gaps").top) < SAME


def test_many_requests_at_once_get_what_each_gets_alone(
    vllm: VllmServer, tokenizer: Tokenizer
) -> None:
    prompts = [valley_prompt(tokenizer, q, o) for q in QUESTIONS for o in ORDERS]
    jobs = []
    for i, prompt in enumerate(prompts):
        wish = wish_of(prompt, reuse="weave", ratio=0.3, missing="encode")
        jobs.append((prompt.token_ids, wish, 8, {"cache_salt": f"at once {i}"}))
        jobs.append((prompt.token_ids, None, 8, {"cache_salt": f"plain {i}"}))
    alone = [
        vllm.ask(ids, wish, n, cache_salt=f"alone {i}") for i, (ids, wish, n, _) in enumerate(jobs)
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: vllm.ask(*job[:3], **job[3]), jobs))
    for one, other in zip(alone, together, strict=True):
        assert other.told.get("way") == one.told.get("way")
        assert apart(one.top, other.top) < SAME


def test_what_cannot_be_meant_is_said_answered_and_counted(
    vllm: VllmServer, tokenizer: Tokenizer
) -> None:
    prompt = valley_prompt(tokenizer, QUESTIONS[0], (0, 1))
    reply = vllm.ask(prompt.token_ids, {"chunks": [[5, 100_000]]})
    assert reply.told["way"] == "refused"
    assert "question" in reply.told["why"]
    vllm.ask(prompt.token_ids, wish_of(prompt, reuse="reuse", missing="encode"))
    series = vllm.http.get("/metrics").text
    assert re.search(r'^vllm:kvweave_requests_total\{.*way="refused"\} [1-9]', series, re.M)
    assert re.search(r'^vllm:kvweave_tokens_total\{.*state="reused"\} [1-9]', series, re.M)
    assert apart(reply.top, cold(vllm, prompt, "refused").top) < SAME
