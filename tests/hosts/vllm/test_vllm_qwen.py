"""Another family inside vLLM: Qwen2, whose projections have a bias; kvweave read its weights."""

from pathlib import Path

import pytest

from kvweave.errors import ModelNotFound
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from worlds.vllm_server import apart, running_vllm, valley_prompt, wish_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

MODEL = "qwen2.5-coder-0.5b"
SAME = 2e-3  # of logprobs: see test_vllm_fusion.py


@pytest.fixture(scope="module")
def qwen() -> Path:
    """2.5 GB as vLLM reads it, so it is not pulled for a test."""
    try:
        return locate(MODEL, pull=False)
    except ModelNotFound:
        pytest.skip(f"{MODEL} is not on this machine; kvweave models pull {MODEL}")


def test_qwen2_with_every_row_recomputed_is_vllms_own_cold_prefill(
    qwen: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(qwen)
    prompt = valley_prompt(tokenizer, "Who keeps the bees?", (3, 5, 0, 2))
    flags = ("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4")
    with running_vllm(tmp_path, qwen, None, *flags) as vllm:
        exact = vllm.ask(prompt.token_ids, max_tokens=6, cache_salt="cold")
        wish = wish_of(prompt, reuse="weave", ratio=1.0, missing="encode")
        fused = vllm.ask(prompt.token_ids, wish, 6)
        assert fused.told["way"] == "fused", fused.told
        assert fused.told["reused"] == 0
        assert apart(exact.top, fused.top) < SAME
        assert fused.tokens == exact.tokens
        some = vllm.ask(prompt.token_ids, wish_of(prompt, reuse="weave", ratio=0.15))
        assert some.told["reused"] > 0
        assert apart(exact.top, some.top) > 10 * SAME, "or the above would prove nothing"
        after = vllm.ask(prompt.token_ids, max_tokens=6)
        assert apart(exact.top, after.top) < SAME, "exact requests stay exact"
