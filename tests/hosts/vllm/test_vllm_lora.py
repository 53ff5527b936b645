"""Adapters inside a real vLLM: each is fused with its own chunk KV, and so is the bare model."""

from pathlib import Path

import pytest

from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from worlds.lora import make_adapter
from worlds.vllm_server import apart, running_vllm, valley_prompt, wish_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SAME = 2e-3  # of logprobs: see test_vllm_fusion.py
MODELS = ("m", "one", "two")


def test_each_adapter_is_fused_with_its_own_chunk_kv(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    seeds = {"one": 1, "two": 2}
    paths = {n: make_adapter(smollm2, tmp_path / f"lora-{n}", seed) for n, seed in seeds.items()}
    flags = ["--enforce-eager", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    flags += ["--lora-modules", *(f"{name}={path}" for name, path in paths.items())]
    prompt = valley_prompt(tokenizer, "Who mends the nets?", (3, 5, 0, 2, 9, 1))
    with running_vllm(tmp_path, smollm2, None, *flags) as vllm:

        def ask(model: str, salt: str = "", **wish: object):  # type: ignore[no-untyped-def]
            salted = {"cache_salt": salt} if salt else {}
            told = wish_of(prompt, **wish) if wish else None
            return vllm.ask(prompt.token_ids, told, 4, model=model, **salted)

        exact = {model: ask(model, "cold") for model in MODELS}
        assert apart(exact["m"].top, exact["one"].top) > 10 * SAME, "the adapter does nothing"
        assert apart(exact["one"].top, exact["two"].top) > 10 * SAME
        for model in MODELS:
            looked = ask(model, f"look {model}", reuse="weave", ratio=0.15)
            assert looked.told["missing"] == 6, "what another made is not its own"
            every = ask(model, reuse="weave", ratio=1.0, missing="encode")
            assert every.told["way"] == "fused", f"{every.told}\n{vllm.tail()}"
            assert apart(every.top, exact[model].top) < SAME
            assert every.tokens == exact[model].tokens
            some = ask(model, reuse="weave", ratio=0.15)
            assert (some.told["missing"], some.told["way"]) == (0, "fused")
            assert some.told["reused"] > 0
        auto = ask("one", "auto", reuse="auto")
        assert (auto.told["way"], auto.told["why"]) == ("exact", Reason.NOT_CALIBRATED)
        again = {model: ask(model, "again") for model in MODELS}
        assert all(again[model].tokens == exact[model].tokens for model in MODELS)
