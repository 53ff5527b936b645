"""Lives of a vLLM with kvweave: restarts, replicas, damage, little memory, compiled models."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvweave.text.tokenizer import Tokenizer
from worlds.vllm_server import (
    StartFailed,
    VllmServer,
    apart,
    ask_until,
    running_vllm,
    valley_prompt,
    wish_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

SAME = 2e-3  # of logprobs: see test_vllm_fusion.py


def test_chunks_are_made_in_idle_time_and_outlive_a_restart(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = valley_prompt(tokenizer, "Who rings the bell?", (0, 3, 6, 9))
    with running_vllm(tmp_path, smollm2, {"making": "idle"}) as vllm:
        first = vllm.ask(prompt.token_ids, wish_of(prompt))
        assert first.told["way"] == "exact"
        assert first.told["missing"] == 4
        later = ask_until(vllm, prompt, lambda reply: reply.told["missing"] == 0)
        assert later.told["way"] == "fused", f"{later.told}\n{vllm.tail()}"
    other = valley_prompt(tokenizer, "What does the bell weigh?", (0, 9, 6, 3))
    with running_vllm(tmp_path, smollm2, {"making": "never"}) as vllm:
        reply = vllm.ask(other.token_ids, wish_of(other))
        assert reply.told["missing"] == 0
        assert reply.told["way"] == "fused"
        assert set(reply.told["loaded_bytes"]) == {"disk"}

        # damage: flip a byte in every object; what was promised does not come, and is computed
        for path in (tmp_path / "kv").rglob("*"):
            if path.is_file() and path.stat().st_size > 100_000:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
    with running_vllm(tmp_path, smollm2, {"making": "never"}) as vllm:
        exact = vllm.ask(other.token_ids, max_tokens=4, cache_salt="cold")
        hurt = vllm.ask(other.token_ids, wish_of(other), 4)
        assert hurt.told["way"] == "fused"
        assert hurt.told["lost"] == ["corrupt"] * 4
        assert hurt.told["reused"] == 0
        assert apart(hurt.top, exact.top) < SAME
        assert hurt.tokens == exact.tokens
        after = vllm.ask(other.token_ids, max_tokens=4)
        assert apart(after.top, exact.top) < SAME


def test_a_second_replica_finds_what_the_first_has_encoded(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path, redis_url: str
) -> None:
    prompt = valley_prompt(tokenizer, "Where do the goats sleep?", (2, 5, 8))
    with running_vllm(tmp_path / "a", smollm2, {"redis_url": redis_url}) as vllm:
        made = vllm.ask(prompt.token_ids, wish_of(prompt, missing="encode"))
        assert made.told["way"] == "fused"
    with running_vllm(tmp_path / "b", smollm2, {"redis_url": redis_url}) as vllm:
        found = vllm.ask(prompt.token_ids, wish_of(prompt))
        assert found.told["way"] == "fused"
        assert found.told["missing"] == 0
        assert set(found.told["loaded_bytes"]) == {"redis"}
        assert apart(found.top, made.top) < SAME


def test_requests_that_are_preempted_and_prefills_in_pieces_answer_alike(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Room for two prompts and hardly for their answers, and steps of 256 tokens."""
    orders = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 0, 2)]
    prompts = [valley_prompt(tokenizer, "Who was there, and why?", order) for order in orders]
    longest = max(-(-len(prompt.token_ids) // 128) for prompt in prompts)
    flags = ["--enforce-eager", "--num-gpu-blocks-override", str(2 * longest + 1)]
    flags += ["--max-model-len", str(128 * longest + 256)]
    flags += ["--max-num-batched-tokens", "256", "--max-num-seqs", "4"]
    with running_vllm(tmp_path, smollm2, None, *flags) as vllm:
        # with every row recomputed an answer is exact, whenever its prompt is filled again
        alone = [vllm.ask(p.token_ids, None, 140, cache_salt="alone") for p in prompts]
        assert not preemptions(vllm)
        wishes = [wish_of(p, ratio=1.0, missing="encode") for p in prompts]
        jobs = [*zip(prompts, wishes, strict=True), (prompts[0], None)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            asked = [pool.submit(vllm.ask, p.token_ids, wish, 140) for p, wish in jobs]
            together = [each.result() for each in asked]
        assert preemptions(vllm), "nothing was preempted: give it less room"
    for one, other in zip([*alone, alone[0]], together, strict=True):
        assert apart(one.top, other.top) < SAME
        assert other.tokens == one.tokens
    assert [reply.told.get("way") for reply in together] == ["fused"] * 3 + [None]


def preemptions(vllm: VllmServer) -> float:
    return vllm.counted("vllm:num_preemptions_total")


def test_a_compiled_model_is_fused_alike(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = valley_prompt(tokenizer, "Who carries the lamps?", (3, 0, 7, 1))
    with running_vllm(tmp_path, smollm2, None, "--max-num-seqs", "8") as vllm:
        exact = vllm.ask(prompt.token_ids, max_tokens=6, cache_salt="cold")
        wish = wish_of(prompt, ratio=1.0, missing="encode")
        fused = vllm.ask(prompt.token_ids, wish, 6)
        assert fused.told["way"] == "fused"
        assert apart(fused.top, exact.top) < SAME
        assert fused.tokens == exact.tokens
        some = vllm.ask(prompt.token_ids, wish_of(prompt, ratio=0.15))
        assert some.told["reused"] > 0


def test_what_cannot_be_fused_ends_the_start_with_its_name(smollm2: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(StartFailed, match="the KV cache is 'fp8'"),
        running_vllm(tmp_path, smollm2, None, "--enforce-eager", "--kv-cache-dtype", "fp8"),
    ):
        pass
    with (
        pytest.raises(StartFailed, match="has no 'disk'; known: host_bytes"),
        running_vllm(tmp_path, smollm2, {"disk": "here"}),
    ):
        pass
