"""Does a base that bears less recompute less by itself, with real questions within the bound?

Two knowledge bases, of passages of NQ (`easy`) and of HotpotQA (`hard`), each with defaults: real
questions first, at the ratio that the packaged tables let through (`before`, the baseline). Then
the documents are asked about themselves, as a server does in idle time, until that is over; then
the same real questions again (`after`). Every answer is compared with full prefill's over its
first tokens. No table of these questions was made here, and none of them is ever asked by the
server itself. No time is measured.

    python bench/own_evidence.py --data ../shared/data --out bench/results/own_evidence-cpu.json
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files import read_jsonl
from common.results import finish, result_header
from kvweave.app.answer.answer_stream import WatchedTokens
from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.libraries.quality_view import measure_quality
from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.app.weave import BOUND, Sampling, Weave
from kvweave.calibrate.bootstrap import Bootstrap
from kvweave.calibrate.gate import MAX_FLIPS
from kvweave.calibrate.own_evidence import EvidenceState
from kvweave.config import ModelChoice, QualitySettings, WeaveConfig

# base → file, and records that its passages come from
BASES = {
    "easy": ("nq_oracle/nq_open_oracle.jsonl.gz", 120),
    "hard": ("hotpotqa/hotpotqa_distractor.jsonl.gz", 60),
}
TOKENS = 16  # of an answer that are compared
LOOK_S = 0.2


class Served(NamedTuple):
    """How one real question was answered."""

    cell: str  # strategy and ratio, or "exact"
    kl: float
    flips: bool
    work: float


def main() -> None:
    args = parse_args()
    config = WeaveConfig(ModelChoice(args.model, "cpu", dtype=args.dtype))
    found: dict[str, Any] = {}
    with Weave.from_config(config) as base, tempfile.TemporaryDirectory() as folder:
        base.measure()
        for name in args.bases.split(","):
            found[name] = run(base, Path(folder) / name, *read_base(args, name))
            show(name, found[name])
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "data")}
    header = result_header("own_evidence", "cpu")
    within = all(each["after"]["within"] for each in found.values())
    result = {**header, "config": settings, "bound": BOUND, "within": within, "bases": found}
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--bases", default=",".join(BASES))
    # packaged tables were made of the records before
    parser.add_argument("--first", type=int, default=600, help="record that a base begins with")
    parser.add_argument("--questions", type=int, default=60, help="real ones")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def read_base(args: argparse.Namespace, name: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Passages by text, each once, and real questions about some of them."""
    file, count = BASES[name]
    every = read_jsonl(args.data / file)
    records = list(islice(every, args.first, args.first + count))
    passages = {p["text"]: (p["title"], p["text"]) for r in records for p in r["passages"]}
    return passages, [record["question"] for record in records[: args.questions]]


def run(
    base: Weave, folder: Path, passages: dict[str, tuple[str, str]], questions: Sequence[str]
) -> dict[str, Any]:
    """Ask the real questions before and after the base has asked itself."""
    # nothing else moves the gate
    settings = AnswerSettings(usual=QuestionDefaults(QualitySettings(audit_share=0.0)))
    # titles are of articles: a document each wants its own
    named = [(f"{title} {i}", text) for i, (title, text) in enumerate(passages.values())]
    with base.over(folder, KVOptions(), settings) as weave:
        weave.ingest(*named, chunk_kv=True)
        full = [ask(weave, question, reuse="full", alone=True) for question in questions]
        before = [serve(weave, *each) for each in zip(questions, full, strict=True)]
    asks = KVOptions(background=BackgroundKV(bound=BOUND, calibrates=True))
    with base.over(folder, asks, settings) as weave:
        started, looks = weave.library.kv.worth.evidence.allowed, watch(weave)
        after = [serve(weave, *each) for each in zip(questions, full, strict=True)]
    fell = next((look.asked for look in looks if look.ratio != looks[0].ratio), None)
    return {
        "passages": len(passages),
        "ratio_before": None if started is None else started.ratio,
        "ratio_after": looks[-1].ratio,
        "strategy": looks[-1].strategy,
        "own_questions_until_it_fell": fell,
        "own_questions": looks[-1].asked,
        "why_no_less": looks[-1].why,
        "before": summarise(before),
        "after": summarise(after),
    }


def watch(weave: Weave) -> list[EvidenceState]:
    """Let the documents be asked until that is over; what was known after every question."""
    evidence, calibration = weave.library.kv.worth.evidence, weave._target.calibration
    looks = [evidence.state()]
    while calibration is not None and not calibration.wait(LOOK_S):
        state = evidence.state()
        if state.asked != looks[-1].asked:
            looks.append(state)
            if state.asked % 10 == 0:
                print(f"{time.strftime('%H:%M:%S')} {state}", flush=True)
    return [*looks, evidence.state()]


def ask(weave: Weave, question: str, **how: Any) -> WatchedTokens:
    answer = weave.ask(question, sampling=Sampling(max_tokens=TOKENS), watched=TOKENS, **how)
    assert answer.watched is not None, "it was asked for"
    return answer.watched


def serve(weave: Weave, question: str, full: WatchedTokens) -> Served:
    """What `auto` does with a question, against full prefill's answer."""
    answer = weave.ask(
        question,
        reuse="auto",
        sampling=Sampling(max_tokens=TOKENS),
        watched=TOKENS,
        forced=full.token_ids,
    )
    record, plan = answer.explain, answer.decision.plan if answer.decision else None
    assert answer.watched is not None, "it was asked for"
    found = measure_quality(full, answer.watched)
    is_fused = plan is not None and plan.strategy is not None
    cell = f"{plan.strategy} {plan.chosen.ratio:g}" if plan and is_fused else "exact"
    return Served(cell, found.kl, not found.same_first, 1.0 if record is None else record.work)


def summarise(served: Sequence[Served]) -> dict[str, Any]:
    kl = Bootstrap(len(served)).mean(np.array([each.kl for each in served]))
    flips = float(np.mean([each.flips for each in served]))
    cells = [each.cell for each in served]
    return {
        "questions": len(served),
        "taken": {cell: cells.count(cell) for cell in sorted(set(cells))},
        "kl": round(kl.mean, 6),
        "kl_high": round(kl.high, 6),
        "flips": round(flips, 4),
        "work": round(float(np.mean([each.work for each in served])), 4),
        "within": kl.mean <= BOUND and flips <= MAX_FLIPS,
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name}: {found['strategy']} {found['ratio_before']} -> {found['ratio_after']}, "
        f"{found['own_questions_until_it_fell']} of {found['own_questions']} own questions"
    )
    for when in ("before", "after"):
        each = found[when]
        print(
            f"  {when:6} KL {each['kl']:.4f} (<= {each['kl_high']:.4f})  flips {each['flips']:.1%}"
            f"  work {each['work']:.0%}  {'within' if each['within'] else 'NOT WITHIN'}"
            f"  {each['taken']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
