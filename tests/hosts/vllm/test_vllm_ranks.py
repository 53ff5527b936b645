"""Two tensor-parallel ranks inside a real vLLM: what one of them cannot see, both agree about."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
from kvweave.text.tokenizer import Tokenizer
from worlds.own_pass import OwnPass
from worlds.tiny_models import make_chat_model_folder
from worlds.vllm_server import (
    CONTEXT,
    RANKS,
    apart,
    ask_until,
    running_vllm,
    valley_prompt,
    wish_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SAME = 2e-3  # of logprobs: see test_vllm_fusion.py
ORDER = (3, 5, 0, 2)
STRATEGIES = (("reuse", 0.0), ("weave", 0.15), ("weave-through", 0.5), ("cacheblend", 0.15))


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """Ratio 1 is full prefill; less is what kvweave's own pass makes of all heads together."""
    model = make_chat_model_folder(
        tmp_path, head_dim=32, num_hidden_layers=12, max_position_embeddings=CONTEXT
    )
    prompt = valley_prompt(Tokenizer(model), "Who keeps the bees?", ORDER)
    later = valley_prompt(Tokenizer(model), "Who keeps the bees?", (7, 8, 9, 1))
    tiers = (HostTierConfig(1 << 28, pinned=False),)
    flags = ("--enforce-eager", RANKS, "2")
    with (
        KVStore(StoreConfig(tiers=tiers)) as store,
        running_vllm(tmp_path / "vllm", model, {"making": "idle"}, *flags) as vllm,
    ):
        own = OwnPass(model, store)
        exact = vllm.ask(prompt.token_ids, cache_salt="cold")
        every = vllm.ask(prompt.token_ids, wish_of(prompt, ratio=1.0, missing="encode"))
        assert every.told["way"] == "fused", f"{every.told}\n{vllm.tail()}"
        assert apart(every.top, exact.top) < SAME
        assert every.tokens == exact.tokens
        for reuse, ratio in STRATEGIES:
            share = {} if reuse == "reuse" else {"ratio": ratio}
            wish = wish_of(prompt, reuse=reuse, missing="encode", **share)
            some = vllm.ask(prompt.token_ids, wish, cache_salt=reuse)
            assert some.told["way"] == "fused", some.told
            assert some.told["reused"] > 0
            assert apart(some.top, exact.top) > 10 * SAME, "it is not what full prefill gives"
            ours = own.first_token(prompt, reuse, ratio)
            assert apart({i: float(ours[i]) for i in some.top}, some.top) < SAME, reuse
        # what is not stored yet is made by both in idle steps, and found afterwards
        first = vllm.ask(later.token_ids, wish_of(later, ratio=0.15))
        assert first.told["missing"] == len(later.chunks)
        made = ask_until(vllm, later, lambda reply: reply.told["missing"] == 0, ratio=0.15)
        assert made.told["way"] == "fused", f"{made.told}\n{vllm.tail()}"
        # beside each other, and beside requests that are not fused, each gets what it gets alone
        jobs = [(each, wish_of(each, ratio=0.3)) for each in (prompt, later)]
        jobs = [*jobs, (prompt, None), (later, None)]
        alone = [
            vllm.ask(p.token_ids, w, 8, cache_salt=f"alone {i}") for i, (p, w) in enumerate(jobs)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            asked = [
                pool.submit(vllm.ask, p.token_ids, w, 8, cache_salt=f"together {i}")
                for i, (p, w) in enumerate(jobs)
            ]
            together = [each.result() for each in asked]
        for one, other in zip(alone, together, strict=True):
            assert one.told.get("way") == other.told.get("way")
            assert apart(one.top, other.top) < SAME
    with running_vllm(tmp_path / "vllm", model, None, *flags) as vllm:
        found = vllm.ask(later.token_ids, wish_of(later, ratio=0.15))
        assert (found.told["missing"], found.told["way"]) == (0, "fused")
        assert set(found.told["loaded_bytes"]) == {"disk"}
        assert apart(found.top, made.top) < SAME
