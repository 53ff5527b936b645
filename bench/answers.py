"""How many questions with known answers are answered rightly, in full and with reuse?

The 40 questions of the packaged valley (`kvweave demo`), half of them over two passages, through
the product as it is opened by default: MiniLM finds the 5 nearest chunks, the model answers. An
answer is right if a known one stands in it as words of its own. Drawn greedily, so that a run can
be repeated. `found` is the share of questions whose passages were all among the chunks, by what the
answer itself names as its sources: no way of prefill can answer more of them but by luck. Ways that
leave nothing exact behind are asked first, `auto` last: it would find what the others computed, and
they what it did.

    python bench/answers.py --model qwen2.5-coder-0.5b --model smollm2 \
        --out bench/results/answers-cpu.json
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.results import finish, result_header
from kvweave.app.answer.question import parse_reuse
from kvweave.app.weave import Answer, Sampling, Weave
from kvweave.config import ModelChoice
from kvweave.demo import PASSAGES, DemoQuestion, read_questions, titles_of


class Asked(NamedTuple):
    """One question, asked in one way."""

    question: DemoQuestion
    answer: Answer

    @property
    def is_found(self) -> bool:
        """Whether all passages that it needs are sources of the answer."""
        return titles_of(self.question) <= {source.title for source in self.answer.sources}

    @property
    def is_right(self) -> bool:
        return self.question.is_answered_by(self.answer.text)


def main() -> None:
    args = parse_args()
    questions = read_questions()[: args.limit]
    header = result_header("answers", args.device)
    result = {**header, "config": {"ways": args.way, "questions": len(questions)}, "models": {}}
    for model in args.model or [ModelChoice().model]:
        result["models"][Path(model).name] = ask_all(model, questions, args)
    Console().print(table_of(result["models"]))
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="repeatable; the default model if none")
    parser.add_argument(
        "--way", action="append", help="auto or STRATEGY[:RATIO] besides full; auto if none"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--limit", type=int, default=None, help="only the first questions")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    args.way = sorted(args.way or ["auto"], key="auto".__eq__)
    return args


def ask_all(
    model: str, questions: Sequence[DemoQuestion], args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one model, way by way."""
    sampling = Sampling(max_tokens=args.max_tokens, temperature=0.0)
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Weave.open(folder, model=model, device=args.device, quant=args.quant) as weave,
    ):
        started_s = time.perf_counter()
        weave.ingest(PASSAGES, chunk_kv=True)
        figures["ingest_s"] = round(time.perf_counter() - started_s, 1)
        weave.measure()
        for way in ["full", *args.way]:
            reuse, ratio = parse_reuse(way)
            asked = []
            for question in track(questions, f"{Path(model).name}: {way}", transient=True):
                answer = weave.ask(question.question, reuse=reuse, ratio=ratio, sampling=sampling)
                asked.append(Asked(question, answer))
            figures[way] = figures_of(asked)
    return figures


def figures_of(asked: Sequence[Asked]) -> dict[str, Any]:
    by_hops = {
        name: [each for each in asked if len(each.question.passages) == hops]
        for name, hops in (("one_passage", 1), ("two_passages", 2))
    }
    records = [each.answer.explain for each in asked if each.answer.explain is not None]
    return {
        "right": share([each.is_right for each in asked]),
        **{f"right_{name}": share([e.is_right for e in some]) for name, some in by_hops.items()},
        "found": share([each.is_found for each in asked]),
        "cut": share([each.answer.finish_reason != "stop" for each in asked]),
        "ttft_ms": round(statistics.median(each.answer.ttft_ms for each in asked), 1),
        "strategies": dict(Counter(record.strategy for record in records)),
        "reused": round(
            sum(record.counts["reused"] for record in records)
            / sum(each.answer.prompt_tokens for each in asked),
            4,
        ),
        "answers": [[int(each.is_right), " ".join(each.answer.text.split())] for each in asked],
    }


def share(flags: Sequence[bool]) -> float | None:
    return round(sum(flags) / len(flags), 4) if flags else None


def table_of(models: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="answers that hold the known one")
    for column in ("model", "way"):
        table.add_column(column)
    for column in ("right", "one passage", "two", "found", "cut", "tokens reused", "first token"):
        table.add_column(column, justify="right")
    for model, figures in models.items():
        for way, of in figures.items():
            if isinstance(of, dict):
                shares = ("right", "right_one_passage", "right_two_passages", "found", "cut")
                cells = ["–" if of[s] is None else f"{of[s]:.1%}" for s in (*shares, "reused")]
                table.add_row(model, way, *cells, f"{of['ttft_ms'] / 1e3:.2f} s")
    return table


if __name__ == "__main__":
    main()
