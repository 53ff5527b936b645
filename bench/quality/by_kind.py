"""What do shortcuts cost on each kind of question, and what does the gate make of it?

Every set of quality/kinds.py through `kvweave.calibrate.measure`, the code that `kvweave calibrate`
runs, in as many processes as asked for. Every question's outcomes go into `--values`, a set to a
line, as they come: packaged tables (quality/package.py) and bench/gate.py are made from that file.

    python bench/quality/by_kind.py --data DATA --cases carry/cases.pickle          # here: prompts
    python bench/quality/by_kind.py --cases carry/cases.pickle --device cuda --workers 12 \\
        --values values.jsonl.gz

Prompts are token ids, so a GPU box needs neither the data nor a minute to tokenise them.
"""

import argparse
import gzip
import json
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, Protocol

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
import torch.multiprocessing as mp

from common.results import finish, result_header
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes, FixedContext
from kvweave.calibrate.measure import ORDER, CaseOutcomes, Outcome, Setting, measure
from kvweave.calibrate.questions import make_case, repeat_ids
from kvweave.calibrate.trials import TrialScore
from kvweave.fuse.encode.contexts import context_filler, parse_variant
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from quality.kinds import SETS, read_set

RATIOS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
STRATEGIES = ("weave", "weave-deep")
MAX_TOKENS = 20_000  # of a prompt
# What many users write: longer than ours, and about something else.
OTHER_SYSTEM = (
    "You are Ada, the friendly assistant of a software company. You help customers with questions "
    "about products, invoices and their accounts. Always answer in complete sentences, never "
    "invent facts, and if the documents do not contain the answer, say so and offer to hand over "
    "to a colleague."
)
SYSTEMS = {"own": SYSTEM, "other": OTHER_SYSTEM}


class Task(NamedTuple):
    """One question of a set."""

    set_name: str
    number: int
    case: Case


def main() -> None:
    args = parse_args()
    started_s = time.perf_counter()
    tasks = read_cases(args)
    if args.device == "none":
        return
    done = {(line["set"], line["number"]) for line in read_values(args.values)}
    todo = [task for task in tasks if (task.set_name, task.number) not in done]
    count = 0
    with gzip.open(args.values, "at", encoding="utf-8") as kept:
        for line in run_all(Bench, args, todo):
            kept.write(json.dumps(line) + "\n")
            count += 1
            if count % 100 == 0:
                kept.flush()
                print(f"{count}/{len(todo)}, {time.perf_counter() - started_s:.0f} s", flush=True)
    result = {
        **result_header("quality_by_kind", args.device),
        "model": args.model,
        "dtype": args.dtype,
        "tf32": args.tf32,
        "system": args.system,
        "questions": count,
        "of": len(todo),
        "seconds": round(time.perf_counter() - started_s),
    }
    finish(__doc__, result)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cases", type=Path, required=True, help="prompts; made if not there")
    parser.add_argument("--values", type=Path, default=Path("values.jsonl.gz"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", help="'none' makes --cases and stops")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--limit", type=int, default=10**6, help="questions of each set")
    parser.add_argument("--system", choices=sorted(SYSTEMS), default="own")
    parser.add_argument("--encodings", default="filler:4")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument(
        "--order", action=argparse.BooleanOptionalAction, default=True, help="what moving costs"
    )
    parser.add_argument(
        "--tf32", action="store_true", help="products in TF32; `noise` says how far"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop asking after this long")
    return parser.parse_args()


def read_cases(args: argparse.Namespace) -> list[Task]:
    """Prompts of all sets, one of each set after another: a run that is cut short has some of all.
    Those that do not fit into the model's context are left out."""
    if not args.cases.is_file():
        tokenizer = Tokenizer(locate(args.model))
        made: dict[str, list[Case]] = {}
        for name in SETS:
            records = read_set(args.data, tokenizer, name)
            cases = [make_case(tokenizer, record) for record in records]
            made[name] = [case for case in cases if case.num_tokens < MAX_TOKENS]
            tokens = sum(case.num_tokens for case in made[name]) / len(made[name])
            chunks = sum(len(case.chunks) for case in made[name]) / len(made[name])
            print(f"{name}: {len(made[name])} questions, {tokens:.0f} tokens, {chunks:.1f} chunks")
        args.cases.write_bytes(pickle.dumps(made))
    kept: dict[str, list[Case]] = pickle.loads(args.cases.read_bytes())
    preamble, _ = split_template(Tokenizer(locate(args.model)), SYSTEMS[args.system])
    named = [
        [
            Task(name, i, replace(case, preamble=tuple(preamble)))
            for i, case in enumerate(kept[name][: args.limit])
        ]
        for name in args.sets.split(",")
    ]
    longest = max(map(len, named))
    return [tasks[i] for i in range(longest) for tasks in named if i < len(tasks)]


class Bench:
    """A loaded model and what is tried with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        folder = locate(args.model)
        self.tokenizer = Tokenizer(folder)
        self.decoder = load_decoder(folder, device=args.device, dtype=args.dtype)
        facts = ModelFacts(self.decoder.spec.num_layers)
        self.settings = [Setting(open_strategy("reuse", facts), 0.0)]
        if args.order:
            self.settings.insert(0, ORDER)
        for name in args.strategies.split(","):
            strategy = open_strategy(name, facts)
            self.settings += [Setting(strategy, float(r)) for r in args.ratios.split(",")]
        repeat, prefixes = repeat_ids(self.tokenizer), ContextPrefixes(self.decoder)
        self.encodings = [
            FixedContext(
                self.decoder, prefixes, name, context_filler(self.tokenizer, variant), repeat
            )
            for name in args.encodings.split(",")
            for variant in [parse_variant(name)]
        ]

    def ask(self, task: Task) -> dict[str, Any]:
        (found,) = measure(
            self.decoder, self.tokenizer, [task.case], self.encodings, self.settings, bound=1.0
        )
        return {
            "set": task.set_name,
            "number": task.number,
            "tokens": found.num_tokens,
            "chunks": found.num_chunks,
            "said": len(task.case.history),
            "noise": found.noise,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "settings": [[each.strategy.name, each.ratio] for each in self.settings],
            "outcomes": {
                name: [[*o.judged, o.nll_gap, o.work] for o in outcomes]
                for name, outcomes in found.outcomes.items()
            },
        }


def read_values(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def outcomes_of(line: dict[str, Any]) -> CaseOutcomes:
    """A line of values as `measure` gave it."""
    found = {
        name: [Outcome(TrialScore(*row[:-2]), row[-2], row[-1], None) for row in rows]
        for name, rows in line["outcomes"].items()
    }
    return CaseOutcomes(line["tokens"], line["chunks"], None, found, line["noise"])


class Asks(Protocol):
    """A loaded model that questions are put to. Made in each process, of the arguments."""

    def __init__(self, args: argparse.Namespace) -> None: ...

    def ask(self, task: Any) -> dict[str, Any]: ...


def run_all(
    make: type[Asks], args: argparse.Namespace, tasks: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """What came of every question, from as many processes as asked for."""
    if args.workers == 1:
        bench, stop_s = make(args), time.perf_counter() + args.limit_s
        for task in tasks:
            if time.perf_counter() > stop_s:
                break
            yield bench.ask(task)
        return
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(make, args, tasks[i :: args.workers], queue))
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    done = 0
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
            print(got, flush=True)
        else:
            yield got
    for worker in workers:
        worker.join()


def work(make: type[Asks], args: argparse.Namespace, tasks: Sequence[Any], queue: Any) -> None:
    try:
        stop_s = time.perf_counter() + args.limit_s
        torch.set_num_threads(1)
        bench = make(args)
        for task in tasks:
            if time.perf_counter() > stop_s:
                break
            try:
                queue.put(bench.ask(task))
            except torch.OutOfMemoryError as error:  # a run over the rest picks it up
                torch.cuda.empty_cache()
                queue.put(f"{task.set_name}/{task.number}: {error}")
    except Exception as error:  # the parent must hear of it
        queue.put(f"a worker failed: {error!r}")
        raise
    finally:
        queue.put(None)


if __name__ == "__main__":
    main()
