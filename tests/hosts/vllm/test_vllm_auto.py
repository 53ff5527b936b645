"""The gate inside a real vLLM: what calibration lets through is fused, all else is exact."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvweave.calibrate.profiles import find_profile, save_profile
from kvweave.demo import PASSAGES
from kvweave.fuse.encode.preparation import Preparation
from kvweave.hosts.vllm.auto_reuse import AutoReuse
from kvweave.hosts.vllm.identity import ModelIdentity, ServedModel, identify
from kvweave.hosts.vllm.reuse_request import ReuseRequest
from kvweave.reasons import Reason
from kvweave.text.prompt import Prompt
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_models import make_chat_model_folder
from worlds.vllm_server import CONTEXT, VllmServer, apart, running_vllm, valley_prompt, wish_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

AUTO = {"reuse": "auto"}
QUESTIONS = ("Who keeps the bees?", "Which bridge is the oldest?", "When does the market open?")
ORDER = (3, 5, 0, 2, 9, 1)
KVWEAVE = shlex.quote(str(Path(sys.executable).with_name("kvweave")))
SAME = 2e-3  # of logprobs: see test_vllm_fusion.py


@pytest.fixture(autouse=True)
def packaged_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine's user."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def identity(smollm2: Path) -> ModelIdentity:
    served = ServedModel(str(smollm2), None, torch.float32, None)
    return identify(served, Preparation.parse("filler"), "raw")


def permitted(identity: ModelIdentity, prompt: Prompt) -> dict[str, float]:
    """What the packaged calibration lets through, by strategy."""
    spans = tuple((start, end) for start, end in wish_of(prompt)["chunks"])
    wish = ReuseRequest(len(prompt.preamble), spans, "auto", 0.0, bound=0.02)
    found = AutoReuse(identity).judge(wish, tuple(prompt.token_ids)).permitted
    return {each.wish.reuse: each.wish.ratio for each in found}


def make_forgiving_model(root: Path) -> Path:
    """A random model that hardly listens to its attention, so that fusing costs next to nothing."""
    folder = make_chat_model_folder(root, head_dim=32, max_position_embeddings=CONTEXT)
    path = folder / "model.safetensors"
    weights = load_file(path)
    quieter = {name: x * (0.01 if "o_proj" in name else 1.0) for name, x in weights.items()}
    save_file(quieter, path, metadata={"format": "pt"})
    return folder


def write_valley_records(path: Path, num_questions: int) -> Path:
    """Records for `--qa`, each of two passages of the demo."""
    texts = [each.read_text(encoding="utf-8") for each in sorted(PASSAGES.glob("*.md"))]
    lines = [
        {
            "question": f"{QUESTIONS[i % 3]} ({i})",
            "answers": [],
            "passages": [{"title": "", "text": texts[(i + j) % len(texts)]} for j in range(2)],
        }
        for i in range(num_questions)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def reason_count(vllm: VllmServer, why: str) -> float:
    return vllm.counted("vllm:kvweave_exact_total", why=why)


def test_auto_fuses_what_calibration_lets_through_and_says_what_it_did(
    smollm2: Path, tokenizer: Tokenizer, identity: ModelIdentity, tmp_path: Path
) -> None:
    prompts = [valley_prompt(tokenizer, question, ORDER) for question in QUESTIONS]
    with running_vllm(tmp_path, smollm2, AUTO) as vllm:
        assert re.search("reuse auto goes by the calibration of weights", vllm.log.read_text())
        told = []
        for prompt in prompts:
            cold = vllm.ask(prompt.token_ids, cache_salt="cold")
            reply = vllm.ask(prompt.token_ids, wish_of(prompt, missing="encode"))
            told.append(reply.told)
            if reply.told["way"] == "fused":
                expected = permitted(identity, prompt)
                assert expected[reply.told["reuse"]] == reply.told["ratio"] < 1
                assert reply.told["reused"] > 0
                assert {n: r for n, r in reply.told["gate"].items() if n in expected} == expected
            else:  # a first token that leads by little
                assert reply.told["why"] == Reason.CLOSE_CALL
                assert apart(reply.top, cold.top) < SAME
                assert reply.tokens == cold.tokens
        assert "fused" in {each["way"] for each in told}, told
        # the same server, a bound that nothing meets
        strict = vllm.ask(prompts[0].token_ids, wish_of(prompts[0], bound=1e-6), cache_salt="a")
        assert (strict.told["way"], strict.told["why"]) == ("exact", Reason.BOUND_NOT_MET)
        assert reason_count(vllm, Reason.BOUND_NOT_MET) == 1
        # by name nobody is asked
        wish = wish_of(prompts[0], reuse="weave", ratio=0.15)
        named = vllm.ask(prompts[0].token_ids, wish, cache_salt="b")
        assert (named.told["way"], named.told["ratio"]) == ("fused", 0.15)
        assert "gate" not in named.told


def test_a_close_call_is_computed_exactly(
    smollm2: Path, tokenizer: Tokenizer, identity: ModelIdentity, tmp_path: Path
) -> None:
    """With a calibration after which every first token is one."""
    profile = find_profile(identity.weights, identity.context.tokenizer)
    assert profile is not None
    tables = tuple(
        replace(
            table,
            kind="own",
            close_call=1e3,
            cells=tuple(replace(cell, close_call=None) for cell in table.cells),
        )
        for table in profile.calibration
        if table.kind == "multi-hop" and table.most_prompt_tokens < 2000
    )
    path = tmp_path / "home/profiles" / f"{identity.weights}.json"
    save_profile(path, replace(profile, calibration=tables))
    prompts = [valley_prompt(tokenizer, question, ORDER) for question in QUESTIONS]
    with running_vllm(tmp_path, smollm2, AUTO) as vllm:
        for number, prompt in enumerate(prompts):
            cold = vllm.ask(prompt.token_ids, max_tokens=8, cache_salt=f"cold {number}")
            # again with the same blocks: what was computed lies under the names of the plan
            for _ in range(2):
                reply = vllm.ask(prompt.token_ids, wish_of(prompt, missing="encode"), 8)
                assert (reply.told["way"], reply.told["why"]) == ("exact", Reason.CLOSE_CALL)
                assert apart(reply.top, cold.top) < SAME
                assert reply.tokens == cold.tokens
        assert reason_count(vllm, Reason.CLOSE_CALL) == 2 * len(prompts)
        assert vllm.counted("vllm:kvweave_requests_total", way="exact") == 2 * len(prompts)
        plain = vllm.ask(prompts[0].token_ids, max_tokens=8)
        assert plain.tokens == vllm.ask(prompts[0].token_ids, max_tokens=8).tokens


def test_what_was_never_calibrated_is_exact_and_says_so_once(
    smollm2: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The tables of SmolLM2 are of chunks behind a filler."""
    prompt = valley_prompt(tokenizer, QUESTIONS[0], ORDER)
    with running_vllm(tmp_path, smollm2, {**AUTO, "encoding": "isolated"}) as vllm:
        cold = vllm.ask(prompt.token_ids, cache_salt="cold")
        for _ in range(2):
            reply = vllm.ask(prompt.token_ids, wish_of(prompt, missing="encode"))
            assert (reply.told["way"], reply.told["why"]) == ("exact", Reason.NO_PROFILE)
            assert apart(reply.top, cold.top) < SAME
        assert reason_count(vllm, Reason.NO_PROFILE) == 2
        assert vllm.log.read_text().count("reuse auto computes every prompt exactly") == 1


def test_the_command_that_the_log_names_makes_the_tables_that_let_it_fuse(tmp_path: Path) -> None:
    """Refused, the very line of the log run by a shell, fused."""
    folder = make_forgiving_model(tmp_path)
    prompt = valley_prompt(Tokenizer(folder), QUESTIONS[0], (3, 5))
    wish = wish_of(prompt, missing="encode")
    with running_vllm(tmp_path, folder, AUTO) as vllm:
        refused = vllm.ask(prompt.token_ids, wish)
        assert (refused.told["way"], refused.told["why"]) == ("exact", Reason.NO_PROFILE)
        (command,) = re.findall("To make tables: (.*)", vllm.log.read_text())
    records = write_valley_records(tmp_path / "qa.jsonl", num_questions=20)
    command = command.replace("FILE", str(records)).replace("kvweave ", f"{KVWEAVE} ", 1)
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # small products: threads wait for each other
    subprocess.run(["sh", "-c", command], check=True, timeout=1200, env=alone)
    with running_vllm(tmp_path, folder, AUTO) as vllm:
        assert "reuse auto goes by the calibration of weights" in vllm.log.read_text()
        allowed = vllm.ask(prompt.token_ids, wish)
        assert allowed.told["way"] == "fused", f"{allowed.told}\n{vllm.tail()}"
        assert allowed.told["reused"] > 0
