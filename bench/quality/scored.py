"""How much worse are answers with reuse, by the known answers: exact match, F1, ROUGE-L?

Greedy answers to questions with gold answers (asked.py; needles.py for RULER-like tasks), once by
full prefill and once by each way of reuse, over chunk KV that was made on the spot. `auto` is what
the packaged tables permit for a prompt of its shape: the cheapest strategy that passes the gate, a
close call computed exactly, all that the gate refuses exact. Behind a system prompt of the user's
own the gate holds tables to half the bound: `auto-half` is what is served behind the prompts used
here, `auto` what is served behind the default one, which is more reuse. In three steps:

    python bench/quality/scored.py --data DATA --cases CASES              # prompts; no GPU
    python bench/quality/scored.py --cases CASES --device cuda --workers 8 --values VALUES
    python bench/quality/scored_table.py VALUES --out RESULT

A way is [ENCODING/]STRATEGY[:RATIO]; the encoding is filler:4 where none is given. A run that is
cut short has all ways of every question it asked, and as many questions of each set.
"""

import argparse
import json
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch

from common.results import finish, result_header
from kvweave.app.auto.facts import CalibratedGate
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes, FixedContext
from kvweave.calibrate.gate import BOUND
from kvweave.calibrate.measure import Setting, extras_needed
from kvweave.calibrate.profiles import Profile, packaged_profile
from kvweave.calibrate.questions import repeat_ids
from kvweave.calibrate.trials import Trials, judge
from kvweave.fuse.encode.chunk_pass import encode_prefix
from kvweave.fuse.encode.contexts import context_filler, digest_ids, parse_variant, variant_name
from kvweave.fuse.fuse import Fused, fuse
from kvweave.fuse.selectors.strategies import default_ratio, open_strategy, split_ratio
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import stitch
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.decoder import revision_of
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.plan.plan import PromptShape
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from quality import asked, needles
from quality.asked import Asked, Style
from quality.by_kind import run_all

ENCODING = "filler:4"
WAYS = (
    "full", "auto", "auto-half", "reuse", "weave-through:0.15", "weave-through:0.3",
    "weave-through:0.5", "weave:0.15", "cacheblend:0.15", "epic:0.15", "fusionrag:0.15",
    "isolated/reuse", "isolated/cacheblend:0.15",
)  # fmt: skip
LINE_ENDS = ("\n", "\n\n", ".\n", ".\n\n", " \n", " \n\n")


class Way(NamedTuple):
    """How the KV of a prompt is made."""

    encoding: str
    strategy: str
    ratio: float

    def __str__(self) -> str:
        if self.strategy == "full":
            return "full"
        front = "" if self.encoding == ENCODING else f"{self.encoding}/"
        return f"{front}{self.strategy}" + (f":{self.ratio:g}" if self.ratio else "")


FULL = Way(ENCODING, "full", 0.0)
AUTO = ("auto", "auto-half")


class Task(NamedTuple):
    """One question of a set."""

    set_name: str
    number: int
    style: Style
    case: Case


class Choice(NamedTuple):
    """What `auto` does with a prompt."""

    way: str
    close_call: float  # nats; a first token that leads by less is computed exactly


def main() -> None:
    args = parse_args()
    started_s = time.perf_counter()
    if not args.cases.is_file():
        make_cases(args)
    tasks = read_tasks(args)
    if args.device == "none":
        return
    count = 0
    with args.values.open("w") as kept:
        head = {
            **result_header("quality_models", args.device),
            "model": args.model,
            "dtype": args.dtype,
            "ways": args.ways.split(","),
            "asked": len(tasks),
        }
        kept.write(json.dumps(head) + "\n")
        kept.flush()
        for line in run_all(Answers, args, tasks):
            kept.write(json.dumps(line) + "\n")
            kept.flush()
            count += 1
            if count % 50 == 0:
                print(f"{count}/{len(tasks)}, {time.perf_counter() - started_s:.0f} s", flush=True)
    seconds = round(time.perf_counter() - started_s)
    finish(__doc__, {**head, "questions": count, "seconds": seconds})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cases", type=Path, required=True, help="prompts; made if not there")
    parser.add_argument("--tuning", action="store_true", help="make prompts that are not scored")
    parser.add_argument("--values", type=Path, default=Path("scored.jsonl"))
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--device", default="none", help="'none' makes --cases and stops")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sets", default=",".join((*asked.SETS, *needles.TASKS)))
    parser.add_argument("--limit", type=int, default=100, help="questions of each set")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop asking after this long")
    return parser.parse_args()


def make_cases(args: argparse.Namespace) -> None:
    """Write the prompts of all sets."""
    if args.data is None:
        raise SystemExit(f"{args.cases} is not there; give --data to make it")
    tokenizer = Tokenizer(locate(args.model))
    sets: dict[str, Asked] = {}
    for name in args.sets.split(","):
        if name in needles.TASKS:
            sets[name] = needles.make_asked(args.data, tokenizer, name, args.limit)
        elif not args.tuning or asked.SETS[name].tuning:
            sets[name] = asked.make_asked(
                args.data, tokenizer, name, args.limit, tuning=args.tuning
            )
    for name, found in sets.items():
        tokens = sum(case.num_tokens for case in found.cases) / max(1, len(found.cases))
        chunks = sum(len(case.chunks) for case in found.cases) / max(1, len(found.cases))
        print(f"{name}: {len(found.cases)} questions, {tokens:.0f} tokens, {chunks:.1f} chunks")
    args.cases.parent.mkdir(parents=True, exist_ok=True)
    args.cases.write_bytes(pickle.dumps({"tokenizer": tokenizer.fingerprint, "sets": sets}))


def read_tasks(args: argparse.Namespace) -> list[Task]:
    """Questions, one of each set after another: a run that is cut short has some of all."""
    kept = pickle.loads(args.cases.read_bytes())
    if kept["tokenizer"] != Tokenizer(locate(args.model)).fingerprint:
        raise SystemExit(f"{args.cases} was made for another model; remove it and make it again")
    named = [
        [
            Task(name, i, kept["sets"][name].style, case)
            for i, case in enumerate(kept["sets"][name].cases[: args.limit])
        ]
        for name in args.sets.split(",")
        if name in kept["sets"]
    ]
    longest = max(map(len, named))
    return [tasks[i] for i in range(longest) for tasks in named if i < len(tasks)]


def parse_way(text: str) -> Way:
    """Read [ENCODING/]STRATEGY[:RATIO]."""
    encoding, slash, rest = text.rpartition("/")
    strategy, ratio = split_ratio(rest)
    parse_variant(encoding or ENCODING)
    own = default_ratio(strategy) if ratio is None else float(ratio)
    return Way(encoding if slash else ENCODING, strategy, own)


class Answers:
    """A loaded model, and the ways to answer with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = locate(args.model)
        self.tokenizer = tokenizer = Tokenizer(folder)
        self.decoder = decoder = load_decoder(folder, device=args.device, dtype=args.dtype)
        self.facts = ModelFacts(decoder.spec.num_layers)
        names = args.ways.split(",")
        self.autos = [name for name in names if name in AUTO]
        self.ways = [parse_way(name) for name in names if name not in (*AUTO, "full")]
        self.prefixes, repeat = ContextPrefixes(decoder), repeat_ids(tokenizer)
        self.encodings = {
            name: FixedContext(
                decoder,
                self.prefixes,
                name,
                context_filler(tokenizer, parse_variant(name)),
                repeat,
            )
            for name in dict.fromkeys([ENCODING, *(way.encoding for way in self.ways)])
        }
        self.gates = Gates(self)
        every = [tokenizer.encode_text(end) for end in LINE_ENDS]
        self.line_ends = {ids[0] for ids in every if len(ids) == 1}

    def ask(self, task: Task) -> dict[str, Any]:
        """What each way answers."""
        case, style = task.case, task.style
        choices = {name: self.gates.choose(name, case) for name in self.autos}
        chosen = [parse_way(each.way) for each in choices.values() if each.way != "full"]
        ways = [FULL, *dict.fromkeys([*self.ways, *chosen])]
        trials = Trials(self.decoder, len(ways), case.num_tokens, style.max_tokens)
        fused = self.fuse_all(case, ways, trials)
        first = torch.stack([each.logits for each in fused])
        best = first.float().topk(2).values
        leads = (best[:, 0] - best[:, 1]).tolist()
        ends = {*self.tokenizer.eos_ids, *(self.line_ends if style.is_line else ())}
        drawn = trials.greedy(first, ends, style.max_tokens)
        own = self.judge_all(trials, first, drawn[0])
        gold = self.tokenizer.encode_text(case.answers[0])[: style.max_tokens]
        known = self.judge_all(trials, first, gold)
        return {
            "set": task.set_name,
            "number": task.number,
            "tokens": case.num_tokens,
            "chunks": len(case.chunks),
            "golds": case.answers,
            "needs_all": style.needs_all,
            "is_line": style.is_line,
            "auto": {name: tuple(choice) for name, choice in choices.items()},
            "ways": {
                str(way): {
                    "text": self.tokenizer.decode(drawn[i], skip_special=True),
                    "lead": round(leads[i], 4),
                    "work": round(fused[i].work, 4),
                    "kl": round(own[i].kl_mean, 6),
                    "flips": own[i].first_flips,
                    "nll": round(known[i].nll, 5),
                }
                for i, way in enumerate(ways)
            },
        }

    def judge_all(self, trials: Trials, first: torch.Tensor, answer: Sequence[int]) -> list[Any]:
        """Each way against full prefill, on one answer."""
        followed = trials.follow(first, answer)
        return [judge(followed[0], each, answer) for each in followed]

    def fuse_all(self, case: Case, ways: Sequence[Way], trials: Trials) -> list[Fused]:
        """Prefill a trial by each way."""
        front = (
            encode_prefix(self.decoder, case.front)
            if case.history
            else self.prefixes.prefix_for(case.preamble)
        )
        sources: dict[str, ComputedChunks] = {}
        exact = case.request((), first_is_exact=False)
        stored = case.request(case.keys, first_is_exact=True)
        made = []
        for i, way in enumerate(ways):
            strategy = open_strategy(way.strategy, self.facts)
            source = ComputedChunks([])
            if way != FULL:
                if way.encoding not in sources:
                    same = [w for w in ways if w != FULL and w.encoding == way.encoding]
                    sources[way.encoding] = self.prepare(case, same)
                source = sources[way.encoding]
            request = exact if way == FULL else stored
            stitched = stitch(self.decoder, request, front, source, trials.kv(i))
            made.append(fuse(stitched, strategy, way.ratio))
        return made

    def prepare(self, case: Case, ways: Sequence[Way]) -> ComputedChunks:
        """Chunk KV of a case behind one encoding, with all that some ways need beside it."""
        settings = [Setting(open_strategy(way.strategy, self.facts), way.ratio) for way in ways]
        extras = extras_needed(settings, self.decoder.spec.num_layers)
        return self.encodings[ways[0].encoding].prepare(case, extras)


class Gates:
    """What the packaged tables permit. They were measured in float32 and are asked as if this
    model ran so: in another precision a user has no tables, and `auto` is exact."""

    def __init__(self, answers: Answers) -> None:
        decoder, tokenizer = answers.decoder, answers.tokenizer
        self._default = digest_ids(split_template(tokenizer, SYSTEM)[0])
        fingerprint = decoder.weights.fingerprint
        self._revision = revision_of(fingerprint, decoder.spec, torch.float32)
        self._profile: Profile | None = packaged_profile(fingerprint, tokenizer.fingerprint)
        variant = parse_variant(ENCODING)
        self._context = variant_name(variant, context_filler(tokenizer, variant))
        self._opened: dict[str, tuple[CalibratedGate, set[str]]] = {}

    def choose(self, name: str, case: Case) -> Choice:
        """What `auto` does with a prompt; `name` says behind which system prompt."""
        preamble = self._default if name == "auto" else digest_ids(case.preamble)
        gate, strategies = self._open(preamble)
        shape = PromptShape(
            case.num_tokens, len(case.chunks), bool(case.history), len(case.history)
        )
        passing = []
        for strategy in strategies:
            verdict = gate.min_ratio(strategy, BOUND, shape)
            if verdict.ratio is not None:
                way = Way(ENCODING, strategy, verdict.ratio)
                passing.append((verdict.ratio, str(way), verdict.close_call))
        if not passing:
            return Choice("full", 0.0)
        _, way_name, close_call = min(passing)
        return Choice(way_name, close_call)

    def _open(self, preamble: str) -> tuple[CalibratedGate, set[str]]:
        if preamble not in self._opened:
            tables = () if self._profile is None else self._tables(self._profile, preamble)
            names = {cell.strategy for table in tables for cell in table.cells} - {"order"}
            self._opened[preamble] = CalibratedGate(tables, preamble), names
        return self._opened[preamble]

    def _tables(self, profile: Profile, preamble: str) -> Any:
        return profile.tables(self._revision, self._context, preamble)


if __name__ == "__main__":
    main()
