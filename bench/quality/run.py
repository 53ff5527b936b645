"""What does each strategy of reuse cost in answer quality?

For every question: full prefill gives the greedy answer; every encoding x strategy x ratio is then
judged on that answer (KL of the distributions, full ‖ method) and on the gold answer (NLL), and
writes its own answer (F1, EM). `recovered` is the share of the gap between plain reuse of isolated
chunk KV and full prefill that is closed: 0 is reuse, 100 is full prefill.

    python bench/quality/run.py --data DATA --questions 200 --device cuda --workers 8 \\
        --out bench/results/quality-h200.json

`--strategies oracle` chooses rows by full prefill itself: what a better choice could still bring.

Chunk KV is exact to the dtype here (no codec): bench/codec_kl.py has the codecs.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from common.results import finish, result_header
from kvweave.fuse.selectors.strategies import takes_layers
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from quality.data import Question, read_questions
from quality.lab import Lab
from quality.stats import Key, append_values, open_values, summarise

SETS = ("2wiki", "hotpot", "musique")
RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
STRATEGIES = (
    "random", "stride", "epic", "cacheblend", "cacheblend-k", "kvshare-like", "cachecraft-like",
    "fusionrag", "fusionrag-code", "prophetkv", "qcfuse", "weave", "weave-deep",
)  # fmt: skip


def main() -> None:
    args = parse_args()
    skipped = leave_out(args)
    started_s = time.perf_counter()
    tokenizer = Tokenizer(locate(args.model))
    per_set = [read_questions(args.data, tokenizer, s, args.questions, args.first) for s in SETS]
    questions = [q for same in zip(*per_set, strict=False) for q in same]
    same = ("model", "encodings", "strategies", "ratios", "layers")
    values = open_values(args.values, {name: getattr(args, name) for name in same})
    done = {(v["set"], v["number"]) for v in values}
    questions = [q for q in questions if (q.set_name, q.number) not in done]
    for value in run_all(args, questions):
        append_values(args.values, value)
        values.append(value)
    results = summarise(values)
    show(results, args)
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    config["data"] = "2wikimultihopqa, hotpotqa, musique + cacheblend_musique_s"
    for name in ("out", "values", "neighbours", "limit_s", "tf32"):
        config.pop(name)
    config["questions_in_tf32"] = sum(bool(v.get("tf32")) for v in values)
    config["seconds"] = round(time.perf_counter() - started_s)
    header = result_header("quality", args.device)
    finish(__doc__, {**header, "config": config, "skipped": skipped, "cells": results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--questions", type=int, default=200, help="per set")
    parser.add_argument("--first", type=int, default=80, help="0-79 were used to tune `weave`")
    parser.add_argument("--encodings", default="isolated,filler:4")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--layers", default="", help="critical layers for qcfuse, best first")
    parser.add_argument("--neighbours", type=Path, help="from bench/quality/neighbours.py")
    parser.add_argument("--values", type=Path, help="keep every question's figures here; go on")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tf32", action="store_true", help="faster products on a GPU, 10 bits")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop asking after this long")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def leave_out(args: argparse.Namespace) -> list[str]:
    """Take out of `args.strategies` what cannot run, and say so. Ends a run that cannot work."""
    if args.neighbours is None and "neighbours" in args.encodings:
        raise SystemExit("who the neighbours are: give --neighbours, from neighbours.py")
    names = args.strategies.split(",")
    skipped = [name for name in names if takes_layers(name) and not args.layers]
    for name in skipped:
        print(f"{name} is left out: it needs the critical layers; give --layers", flush=True)
    args.strategies = ",".join(name for name in names if name not in skipped)
    return skipped


def run_all(args: argparse.Namespace, questions: list[Question]) -> Iterator[dict[Key, Any]]:
    """Values of every question, from as many processes as asked for."""
    if args.workers == 1:
        lab = Lab(args)
        torch.backends.cuda.matmul.allow_tf32 = False
        for i, question in enumerate(questions):
            yield asked(lab, question, args, check=i == 0)
        return
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(i, args, questions, queue)) for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    done, count = 0, 0
    while done < len(workers):
        try:
            got = queue.get(timeout=10)
        except Empty:
            if any(worker.exitcode for worker in workers):
                raise SystemExit("a worker died") from None
            continue
        if got is None:
            done += 1
        elif isinstance(got, str):
            print(f"a question failed: {got}", flush=True)
        else:
            count += 1
            if count % 50 == 0:
                print(f"{count}/{len(questions)} questions", flush=True)
            yield got
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker died (see above); --values has what was asked until then")


def asked(lab: Lab, question: Question, args: argparse.Namespace, *, check: bool) -> dict[Key, Any]:
    """One question's figures, and whether tf32 was on. It is from the second one on, if asked for:
    the first is checked against `fuse`, to more digits."""
    figures = lab.ask(question, check=check)
    figures |= {"tf32": torch.backends.cuda.matmul.allow_tf32}  # type: ignore[dict-item]
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    return figures


def work(number: int, args: argparse.Namespace, questions: list[Question], queue: Any) -> None:
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_num_threads(1 if args.workers > 1 else 2)
        lab = Lab(args)
        stop_s = time.perf_counter() + args.limit_s
        for i in range(number, len(questions), args.workers):
            if time.perf_counter() > stop_s:
                break
            try:
                queue.put(asked(lab, questions[i], args, check=i == number))
            except torch.OutOfMemoryError as error:  # a run over the rest picks it up
                torch.cuda.empty_cache()
                queue.put(f"question {i}: {error}")
    finally:
        queue.put(None)


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """KL gap recovered, one table per set."""
    for name in SETS:
        rows = [r for r in results if r["set"] == name]
        if not rows:
            continue
        table = Table(title=f"{name}: KL gap recovered, % (95 % interval), n = {rows[0]['n']}")
        for column in (
            "encoding", "strategy", "ratio", "work", "recovered", "KL", "NLL gap %", "F1", "EM"
        ):  # fmt: skip
            table.add_column(
                column, justify="right" if column not in ("encoding", "strategy") else "left"
            )
        for row in rows:
            if row["ratio"] not in (0.0, 0.15, 1.0):
                continue
            low, high = row["recovered_ci"]
            nll = row["nll_recovered"]
            table.add_row(
                row["encoding"], row["strategy"], f"{row['ratio']:g}", f"{row['work']:.0%}",
                f"{row['recovered']:.1f} ({low:.0f} to {high:.0f})", f"{row['kl']:.4f}",
                "–" if nll is None else f"{nll:.0f}", f"{row['f1']:.3f}", f"{row['em']:.3f}",
            )  # fmt: skip
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
