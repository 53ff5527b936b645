"""How many requests until the audit corrects a table that was made wrong on purpose?

A small knowledge base of SQuAD paragraphs, questions of SQuAD that are asked once each, reuse
"auto" at the default bound and audit share. Two tables: the model's own with plain `reuse` said to
cost nothing (`wrong`), and its own as it is (`own`). After each answer the client waits until what
is to be audited is: the idle time that a server has between requests. A table is corrected when
`auto` no longer takes what the lie allows. What is realised afterwards is audited too: the mean KL
of the strategies that are taken then, beside the bound. No time is measured.

    python bench/audit.py --data ../shared/data --out bench/results/audit-cpu.json
"""

import argparse
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import BOUND, Sampling, Weave
from kvweave.calibrate.profiles import Profile
from kvweave.config import ModelChoice, QualitySettings, WeaveConfig

LIE = "reuse"  # said to cost nothing at ratio 0
WAIT_S = 600.0


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    paragraphs, questions = read_squad(args.data, args.paragraphs, args.requests)
    config = WeaveConfig(ModelChoice(args.model, args.device))
    found: dict[str, dict[str, Any]] = {}
    with Weave.from_config(config) as base, tempfile.TemporaryDirectory() as folder:
        own = base.profile
        if own is None:
            raise SystemExit(f"{args.model} was never calibrated: there is no table to falsify")
        base.measure()
        for name, profile in (("wrong", falsified(own)), ("own", own)):
            quality = QualitySettings(audit_share=args.share, audit_per_minute=args.per_minute)
            settings = AnswerSettings(profile=profile, usual=QuestionDefaults(quality))
            with base.over(Path(folder) / name, KVOptions(), settings) as weave:
                weave.ingest(*paragraphs, chunk_kv=True)
                found[name] = run(weave, questions, args)
    show(found)
    settings = {k: v for k, v in vars(args).items() if k != "out"} | {"data": "squad_v1.1_dev"}
    header = result_header("audit", args.device)
    corrected = found["wrong"]["corrected_after"]
    finish(
        __doc__,
        {**header, "config": settings, "requests_until_corrected": corrected, "tables": found},
        args.out,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with squad_v1.1_dev/")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--paragraphs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--share", type=float, default=QualitySettings().audit_share)
    parser.add_argument("--per-minute", type=int, default=QualitySettings().audit_per_minute)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def read_squad(
    data: Path, num_paragraphs: int, most: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """The first paragraphs as (title, text), and questions about them."""
    folder = data / "squad_v1.1_dev"
    texts = {
        record["pid"]: (record["title"], record["text"])
        for record in islice(read_jsonl(folder / "paragraphs.jsonl.gz"), num_paragraphs)
    }
    about = (r for r in read_jsonl(folder / "questions.jsonl.gz") if r["pid"] in texts)
    # titles are of articles: a document each wants its own
    named = [(f"{title} {i}", text) for i, (title, text) in enumerate(texts.values())]
    return named, [record["question"] for record in islice(about, most)]


def falsified(profile: Profile) -> Profile:
    """The same, with plain reuse said to cost nothing."""
    tables = [
        replace(
            table,
            cells=tuple(
                replace(cell, kl=0.0, kl_low=0.0, kl_high=0.0, flips=0.0)
                if cell.strategy == LIE
                else cell
                for cell in table.cells
            ),
        )
        for table in profile.calibration
    ]
    return replace(profile, calibration=tuple(tables))


def run(weave: Weave, questions: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Ask all; what was taken, and when the lie was no longer."""
    taken: list[str] = []
    lied = 0  # the last request that was answered by the lie
    sampling = Sampling(max_tokens=args.tokens)
    for number, question in enumerate(questions, start=1):
        answer = weave.ask(question, reuse="auto", sampling=sampling)
        weave.auditor.wait(WAIT_S)
        record = answer.explain
        name = "full" if record is None else f"{record.strategy}:{record.ratio:g}"
        lied = number if name == f"{LIE}:0" else lied
        taken.append(name)
    log = weave.auditor.log
    cells = {}
    for name in sorted(set(taken)):
        strategy, _, ratio = name.partition(":")
        figures = log.figures(strategy, float(ratio or 0))
        if figures.answers:
            cells[name] = figures.document()
    is_over = log.is_over(LIE, 0.0, BOUND)
    return {
        "requests": len(questions),
        "taken": {name: taken.count(name) for name in sorted(set(taken))},
        "last_taken": taken[-1],
        "corrected_after": lied if is_over else None,
        "gate_moves": int(log.metrics.value("audit_gate_moves_total")),
        "audited": cells,
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"audits at bound {BOUND:g}, nats per token")
    for column in ("table", "taken", "answers", "audited", "KL", "95 %", "flips"):
        table.add_column(column, justify="left" if column in ("table", "taken") else "right")
    for name, told in found.items():
        for taken, count in told["taken"].items():
            cell = told["audited"].get(taken)
            figures = ["–"] * 4
            if cell is not None:
                interval = f"{cell['kl_low']} … {cell['kl_high']}"
                figures = [str(cell["answers"]), str(cell["kl"]), interval, str(cell["flips"])]
            table.add_row(name, taken, str(count), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
