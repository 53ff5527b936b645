"""Packed weights inside a real vLLM: its own products compute them, and chunk KV is theirs."""

from pathlib import Path

import pytest
import torch

from kvweave.fuse.encode.preparation import Preparation
from kvweave.hosts.vllm.identity import ServedModel, identify
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from worlds.gptq import make_gptq_folder
from worlds.vllm_server import apart, running_vllm, valley_prompt, wish_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SAME = 0.1  # of logprobs: float16 rounds what 30 layers hand on


def test_packed_weights_are_fused_and_named_apart(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = make_gptq_folder(smollm2, tmp_path / "gptq")
    prompt = valley_prompt(tokenizer, "Who mends the nets?", (3, 5, 0, 2, 9, 1))
    flags = ("--enforce-eager", "--dtype", "float16")
    with running_vllm(tmp_path, folder, None, *flags) as vllm:
        exact = vllm.ask(prompt.token_ids, cache_salt="cold")
        every = vllm.ask(prompt.token_ids, wish_of(prompt, ratio=1.0, missing="encode"))
        assert every.told["way"] == "fused", f"{every.told}\n{vllm.tail()}"
        assert apart(every.top, exact.top) < SAME
        some = vllm.ask(prompt.token_ids, wish_of(prompt, ratio=0.15))
        assert some.told["reused"] > 0
        auto = vllm.ask(prompt.token_ids, wish_of(prompt, reuse="auto"), cache_salt="auto")
        assert (auto.told["way"], auto.told["why"]) == ("exact", Reason.NO_PROFILE)
    stored = {p.name for p in (tmp_path / "kv").rglob("*") if p.stat().st_size > 100_000}
    packed, plain = (
        identify(
            ServedModel(str(where), None, torch.float16, quantization),
            Preparation.parse("filler"),
            "raw",
        )
        for where, quantization in ((folder, "auto_gptq"), (smollm2, None))
    )
    assert packed.context.model != plain.context.model
    assert stored, "chunk KV of the packed weights is kept"
