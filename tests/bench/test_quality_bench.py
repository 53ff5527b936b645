"""The quality bench's bookkeeping: what is left out is said, and nothing is mixed or made up."""

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave.calibrate.trials import Trials
from kvweave.fuse.encode.chunk_pass import encode_chunks
from kvweave.fuse.encode.contexts import Variant
from kvweave.fuse.selector import Scene
from kvweave.kernels.rope import rotate
from kvweave.model.rows import Rows
from kvweave.text.prompt import Document, build_prompt
from quality import run, stats
from quality.ahead import compare
from quality.data import Question
from quality.from_full import Oracle
from quality.join import join
from quality.lab import Lab

CONFIG = {"model": "tiny", "encodings": "isolated", "ratios": "0.15"}


def value(number: int, full_nll: float, reuse_nll: float) -> dict[Any, Any]:
    def figures(nll: float, kl: float) -> dict[str, float]:
        return {
            "kl": kl, "flips": 0.0, "top1": 1.0, "nll": nll, "f1": 0.0, "em": 0.0, "work": 0.5
        }  # fmt: skip

    cells = {
        ("-", "full", 0.0): figures(full_nll, 0.0),
        ("isolated", "reuse", 0.0): figures(reuse_nll, 0.2),
    }
    return {**cells, "set": "2wiki", "number": number}


def test_a_run_goes_on_only_with_figures_of_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "values.jsonl"
    assert stats.open_values(path, CONFIG) == []
    stats.append_values(path, value(3, 1.0, 2.0))
    assert stats.open_values(path, CONFIG) == [value(3, 1.0, 2.0)]
    with pytest.raises(SystemExit, match=r"made with ratios '0.15', this run has '0.3'"):
        stats.open_values(path, {**CONFIG, "ratios": "0.3"})
    path.write_text(json.dumps({"set": "2wiki", "number": 3, "cells": []}) + "\n")
    with pytest.raises(SystemExit, match="made with model None"):
        stats.open_values(path, CONFIG)


def test_no_share_is_given_of_a_gap_that_is_noise() -> None:
    noise = [value(i, 1.0, 1.0 + (-1) ** i * 0.5) for i in range(9)]
    real = [value(i, 1.0, 2.0 + (-1) ** i * 0.5) for i in range(9)]
    assert {row["nll_recovered"] for row in stats.summarise(noise)} == {None}
    assert {row["nll_recovered_ci"] for row in stats.summarise(noise)} == {None}
    assert [row["nll_recovered"] for row in stats.summarise(real)] == [100.0, 0.0]
    assert [row["work"] for row in stats.summarise(real)] == [0.5, 0.5]


def test_what_cannot_run_is_named_and_a_run_without_its_zero_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = Namespace(
        encodings="isolated,filler:4", strategies="epic,qcfuse,weave", layers="", neighbours=None
    )
    assert run.leave_out(args) == ["qcfuse"]
    assert args.strategies == "epic,weave"
    assert "qcfuse is left out" in capsys.readouterr().out
    assert run.leave_out(Namespace(**{**vars(args), "layers": "1"})) == []
    with pytest.raises(SystemExit, match="give --neighbours"):
        run.leave_out(Namespace(**{**vars(args), "encodings": "neighbours:3"}))


def lab_and_question(folder: Path, **settings: str) -> tuple[Any, Any]:
    """The bench's laboratory for a tiny model, and one question over two passages."""
    usual = {"layers": "", "ratios": "0.15", "encodings": "isolated"}
    wanted = {**usual, **settings}
    lab = Lab(Namespace(model=str(folder), device="cpu", neighbours=None, **wanted))
    passages = (("Anna", "Anna lives in a red house."), ("Ben", "Ben sails to the sea each day."))
    prompt = build_prompt(lab.tokenizer, "Where?", [Document(text, t) for t, text in passages])
    return lab, Question("2wiki", 3, prompt, ("the sea",), passages)


def test_one_question_gives_every_cell_its_figures_and_full_recomputation_closes_the_gap(
    chat_model_folder: Path,
) -> None:
    lab, question = lab_and_question(
        chat_model_folder, layers="0,1", strategies=",".join(run.STRATEGIES),
        encodings="isolated,filler:1",
    )  # fmt: skip
    found = lab.ask(question, check=True)
    cells = {key: value for key, value in found.items() if isinstance(key, tuple)}
    assert len(cells) == 1 + (1 + len(run.STRATEGIES)) * 2 + 1  # full, two encodings, all rows
    assert (found["set"], found["number"]) == ("2wiki", 3)
    assert cells["isolated", "reuse", 0.0]["kl"] > 10 * abs(cells["isolated", "any", 1.0]["kl"])
    assert {"kl", "flips", "top1", "nll", "f1", "em", "work"} <= cells["-", "full", 0.0].keys()


def test_what_recovery_counts_from_is_measured_whatever_is_asked_for(
    chat_model_folder: Path,
) -> None:
    lab, question = lab_and_question(chat_model_folder, strategies="weave", encodings="filler:1")
    found = lab.ask(question, check=True)
    assert {key for key in found if isinstance(key, tuple)} == {
        ("-", "full", 0.0), ("isolated", "reuse", 0.0), ("isolated", "any", 1.0),
        ("filler:1", "reuse", 0.0), ("filler:1", "weave", 0.15),
    }  # fmt: skip


def test_ratios_of_nothing_and_everything_can_be_asked_for(chat_model_folder: Path) -> None:
    """No strategy probes there, and the check against `fuse` knows."""
    lab, question = lab_and_question(chat_model_folder, strategies="weave,oracle", ratios="0,1")
    found = lab.ask(question, check=True)
    # The same rows may be added in another order. A KL is a mean of differences of logarithms, each
    # rounded by eps times its size, which is about ln V: so much of a KL of nothing is rounding.
    rounding = 2 * torch.finfo(torch.float32).eps * math.log(lab.decoder.spec.vocab_size)
    nothing, everything = found["isolated", "reuse", 0.0], found["isolated", "any", 1.0]
    assert nothing["kl"] > 100 * rounding, "or the next lines could not tell the two apart"
    for name in ("weave", "oracle"):
        assert found["isolated", name, 0.0] == pytest.approx(nothing, rel=1e-5, abs=rounding)
        assert found["isolated", name, 1.0] == pytest.approx(everything, rel=1e-5, abs=rounding)


def test_the_oracle_scores_rows_by_what_full_prefill_looks_at_and_finds_changed(
    chat_model_folder: Path,
) -> None:
    lab, question = lab_and_question(chat_model_folder, strategies="oracle", ratios="0.5")
    decoder, prompt = lab.decoder, question.prompt
    ids, start = prompt.token_ids, len(prompt.token_ids) - len(prompt.question)
    trials = Trials(decoder, 2, len(ids), 1)
    decoder.forward([Rows(ids, range(len(ids)), trials.kv(0), [len(ids) - 1])])
    alone = encode_chunks(decoder, lab.encoder.prefix(prompt.preamble), prompt.chunks)
    request, stitched, chosen = lab.prepare(question, Variant("isolated"), alone, trials)
    scene = Scene(stitched, torch.tensor(request.hits))

    want = torch.zeros(len(ids))  # every row of every layer, the plain way
    at = torch.arange(len(ids))
    with torch.inference_mode():
        h, angles = decoder.embed(torch.tensor(ids)), decoder.angles(at)
        for layer in range(decoder.spec.num_layers):
            q, k, v = (x.clone() for x in decoder.qkv(layer, h))
            group = q.shape[1] // k.shape[1]
            keys = rotate(k, angles).repeat_interleave(group, 1)
            logits = torch.einsum("qhd,khd->hqk", rotate(q, angles), keys) * q.shape[-1] ** -0.5
            attention = logits.masked_fill(at > at[:, None], -torch.inf).softmax(-1)
            off = (v - stitched.values(layer)).flatten(1).norm(dim=1)
            want += attention[:, start:].sum((0, 1)) * off
            out = torch.einsum("hqk,khd->qhd", attention, v.repeat_interleave(group, 1))
            h = decoder.finish(layer, h, out)
    scores = Oracle(trials).scores(scene)
    torch.testing.assert_close(scores, want[request.hits], rtol=1e-4, atol=1e-6)
    assert (scores > 0).all()
    best = want[request.hits].topk(len(request.hits) // 2).indices
    picked = chosen(lab.strategies[0], 0.5).chosen
    assert {*picked} >= {*scene.hits[best].tolist()}
    found = lab.ask(question, check=True)
    assert found["isolated", "oracle", 0.5]["kl"] < found["isolated", "reuse", 0.0]["kl"]


def test_figures_say_in_which_precision_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question is checked against `fuse`, in full precision."""
    used: list[bool] = []

    class Asking:
        def __init__(self, args: Namespace) -> None:
            pass

        def ask(self, question: int, *, check: bool) -> dict[Any, Any]:
            used.append(torch.backends.cuda.matmul.allow_tf32)
            assert check == (question == 0)
            return {"number": question}

    monkeypatch.setattr(run, "Lab", Asking)
    args = Namespace(workers=1, tf32=True)
    try:
        told = [value["tf32"] for value in run.run_all(args, [0, 1, 2])]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert told == used == [False, True, True]


def test_a_strategy_asked_again_takes_the_place_of_what_it_was() -> None:
    weave = ("isolated", "weave", 0.15)
    old = [{**value(i, 1.0, 2.0), weave: {"kl": 0.5}, "tf32": False} for i in range(3)]
    new = [{**value(i, 1.0, 2.0), weave: {"kl": 0.1}} for i in (1, 2, 7)]
    joined, left_out = join([old, new])
    assert [(v["number"], v[weave]["kl"]) for v in joined] == [(1, 0.1), (2, 0.1)]
    assert left_out == 2
    assert not any(v["other_answer"] for v in joined)


def test_runs_over_other_prompts_are_not_joined() -> None:
    with pytest.raises(SystemExit, match=r"2wiki 3: nll of full is 1\.00000 in one run and 1\.1"):
        join([[value(3, 1.0, 2.0)], [value(3, 1.1, 2.0)]])
    one, other = value(3, 1.0, 2.0), value(3, 1.0, 2.0)
    other["isolated", "reuse", 0.0]["kl"] = 0.21
    with pytest.raises(SystemExit, match=r"kl of reuse is 0\.20000 in one run and 0\.21"):
        join([[one], [other]])
    joined, _ = join([[{**one, "tf32": True}], [other]])
    assert [v["other_answer"] for v in joined] == [True]


def test_a_strategy_is_held_against_the_best_at_its_ratio_and_at_its_work() -> None:
    def cell(strategy: str, ratio: float, work: float, recovered: float) -> dict[str, Any]:
        return {
            "set": "s",
            "encoding": "e",
            "strategy": strategy,
            "ratio": ratio,
            "work": work,
            "recovered": recovered,
        }

    cells = [
        cell("reuse", 0.0, 0.0, 10.0),
        cell("weave", 0.1, 0.1, 50.0),
        cell("weave", 0.5, 0.5, 90.0),
        cell("near", 0.1, 0.2, 52.0),  # more than weave, for twice the work
        cell("far", 0.1, 0.1, 49.0),
        cell("near", 0.5, 0.4, 81.0),  # less than weave, but more than weave has by then
        cell("weave-deep", 0.5, 0.1, 99.0),  # ours as well
    ]
    first, second = compare(cells, "weave")
    assert (first["best"], first["ahead_by_ratio"]) == ("near", -2.0)
    assert (first["best_for_its_work"], first["ahead_by_work"]) == ("far", 1.0)
    assert (second["ahead_by_ratio"], second["ahead_by_work"]) == (9.0, -1.0)
