"""What calibration lets through inside vLLM: its tables, its bound and its reasons."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.calibrate.gate import Table
from kvweave.calibrate.profiles import Profile, save_profile, user_path
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.fuse.encode.preparation import Preparation
from kvweave.hosts.vllm.auto_reuse import AutoReuse, shape_of
from kvweave.hosts.vllm.identity import ModelIdentity, ServedModel, identify
from kvweave.hosts.vllm.reuse_request import ReuseRequest
from kvweave.plan.plan import PromptShape
from kvweave.reasons import Reason
from worlds.auto import make_cell

PREAMBLE = tuple(range(3, 11))
IDS = (*PREAMBLE, *range(20, 140), *range(200, 210))
WISH = ReuseRequest(8, ((8, 68), (68, 128)), "auto", 0.0, bound=0.02)
CELLS = (("weave", 0.3, 0.03), ("weave", 0.5, 0.01), ("weave-through", 0.4, 0.015))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def served(chat_model_folder: Path) -> ServedModel:
    return ServedModel(str(chat_model_folder), None, torch.float32, None)


@pytest.fixture(scope="module")
def identity(served: ServedModel) -> ModelIdentity:
    return identify(served, Preparation.parse("isolated"), "raw")


def calibrate(identity: ModelIdentity, *cells: tuple[str, float, float], **changes: object) -> None:
    """Write the profile of a user who measured these cells (strategy, ratio, KL)."""
    table = Table(
        encoding="isolated",
        context=identity.encoding_context,
        preamble=digest_ids(PREAMBLE),
        revision=identity.context.model,
        dtype="float32",
        data="made up",
        data_hash="0",
        date="2026-01-01",
        num_questions=150,
        num_with_answers=0,
        num_chunk_tokens=90000,
        mean_prompt_tokens=1000.0,
        noise=0.0,
        full_f1=None,
        full_em=None,
        cells=tuple(replace(make_cell(*cell), close=0.05) for cell in cells),
        close_call=0.2,
    )
    table = replace(table, **changes)  # type: ignore[arg-type]
    tokenizer = identity.context.tokenizer
    save_profile(
        user_path(identity.weights), Profile("tiny", identity.weights, tokenizer, None, (table,))
    )


def test_every_strategy_passes_at_the_least_ratio_that_was_measured_within_the_bound(
    identity: ModelIdentity,
) -> None:
    calibrate(identity, *CELLS)
    auto = AutoReuse(identity)
    found = auto.judge(WISH, IDS)
    assert auto.doubt is None
    assert (found.why, found.gate) == ("", {"weave": 0.5, "weave-through": 0.4})
    for permitted in found.permitted:
        wish = permitted.wish
        assert (wish.reuse, wish.ratio) in (("weave", 0.5), ("weave-through", 0.4))
        assert (wish.bound, wish.close_call, permitted.close) == (None, 0.2, 0.05)
        assert wish.chunks == WISH.chunks
    loose = auto.judge(replace(WISH, bound=0.04), IDS)
    assert loose.gate == {"weave": 0.3, "weave-through": 0.4}


def test_what_is_over_the_bound_does_not_pass_and_is_said(identity: ModelIdentity) -> None:
    calibrate(identity, *CELLS)
    found = AutoReuse(identity).judge(replace(WISH, bound=0.001), IDS)
    assert (found.permitted, found.why) == ((), Reason.BOUND_NOT_MET)
    assert found.gate == dict.fromkeys(("weave", "weave-through"), Reason.BOUND_NOT_MET)


def test_another_preamble_is_held_to_half_the_bound(identity: ModelIdentity) -> None:
    calibrate(identity, *CELLS)
    found = AutoReuse(identity).judge(WISH, (99, *IDS[1:]))
    assert found.gate == {"weave": 0.5, "weave-through": Reason.HALF_BOUND_NOT_MET}


def test_what_lies_between_chunks_counts_as_a_history(identity: ModelIdentity) -> None:
    gapped = replace(WISH, chunks=((8, 60), (68, 128)))
    assert shape_of(WISH, 138) == PromptShape(138, 2)
    assert shape_of(gapped, 138) == PromptShape(138, 2, True, 8)
    calibrate(identity, *CELLS)
    auto = AutoReuse(identity)
    assert auto.judge(gapped, IDS).gate["weave-through"] == Reason.HALF_BOUND_NOT_MET


def test_longer_prompts_than_were_measured_do_not_pass(identity: ModelIdentity) -> None:
    calibrate(identity, *CELLS, most_prompt_tokens=5000)
    long = tuple(i % 250 for i in range(6000))
    found = AutoReuse(identity).judge(replace(WISH, chunks=((8, 3000), (3000, 5900))), long)
    assert (found.permitted, found.why) == ((), Reason.BEYOND_MEASURED)


@pytest.mark.parametrize("changes", [{"revision": "other"}, {"context": "filler:4:aa"}])
def test_tables_of_another_decoder_or_encoding_say_nothing(
    identity: ModelIdentity, changes: dict[str, object]
) -> None:
    calibrate(identity, *CELLS, **changes)
    found = AutoReuse(identity).judge(WISH, IDS)
    assert (found.permitted, found.why, found.gate) == ((), Reason.NO_PROFILE, {})


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16}, {"quantization": "fp8"}])
def test_weights_in_another_precision_are_not_what_was_measured(
    served: ServedModel, identity: ModelIdentity, change: dict[str, object]
) -> None:
    calibrate(identity, *CELLS)
    other = identify(served._replace(**change), Preparation.parse("isolated"), "raw")  # type: ignore[arg-type]
    assert AutoReuse(other).doubt == Reason.NO_PROFILE


def test_a_model_without_tables_says_so_once_in_the_log(
    identity: ModelIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    auto = AutoReuse(identity)
    with caplog.at_level(logging.INFO, "vllm.kvweave"):
        for _ in range(3):
            assert auto.judge(WISH, IDS).why == Reason.NO_PROFILE
    (line,) = caplog.messages
    assert "kvweave calibrate" in line
    assert "float32" in line


def test_a_damaged_profile_shuts_the_gate_and_the_log_names_it(
    identity: ModelIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    path = user_path(identity.weights)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert AutoReuse(identity).judge(WISH, IDS).why == Reason.BAD_PROFILE, "no path leaves the host"
    assert str(path) in caplog.text
