"""Is a close call worth more rows, or is it computed exactly at once?

A fused prompt whose first token leads by less than 0.2 nats is thrown away and computed exactly
(docs/fusion.md). A ladder would recompute more of its rows first and look again. Every question is
computed at the gate's ratio; a close call also in full, at each higher ratio anew (`anew`), and at
each on top of the rows that are fresh already (`on top`), which costs the added rows and the
question's:

    python bench/quality/ladder.py --data ../shared/data --count 30
    python bench/quality/ladder.py --data ../shared/data --model smollm2 --strategy weave \\
        --ratio 0.25

Rows are counted; no time is taken. Of every rung and every lead that would end the climb there:
`settled`, the share of the close calls it ends; `wrong`, how many of those have another first token
than full prefill; `flips`, these over all questions, which the ladder adds to those of the rule in
use; `rows`, what a close call then costs behind its first pass on average, in full
prefills, where exact at once is 1. A rung pays where `rows` is below 1.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from torch import Tensor

from common.results import finish, result_header
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes, FixedContext
from kvweave.calibrate.gate import CLOSE_CALLS
from kvweave.calibrate.questions import make_case, repeat_ids
from kvweave.calibrate.trials import Trials
from kvweave.fuse.encode.chunk_pass import encode_prefix
from kvweave.fuse.encode.contexts import context_filler, parse_variant
from kvweave.fuse.fuse import fuse
from kvweave.fuse.fused_pass import fused_pass
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import Stitched, stitch
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from quality.kinds import SETS, read_set

ENCODING = "filler:4"
LEADS = (0.025, 0.05, 0.1, 0.15, 0.2)  # nats at a higher rung
LONGEST = 4000  # tokens of a prompt


class First(NamedTuple):
    """The first token of one way to compute a prompt."""

    token: int
    lead: float  # nats
    rows: float  # computed for it, in full prefills


Line = dict[str, Any]  # of one question: its set, and a First by way


def main() -> None:
    args = parse_args()
    rungs = [float(each) for each in args.rungs.split(",")]
    lines = list(measured(args, rungs))
    found = figures(lines, rungs)
    show(found)
    config = {"model": args.model, "strategy": args.strategy, "ratio": args.ratio}
    config |= {"sets": args.sets, "count": args.count, "encoding": ENCODING, "quant": args.quant}
    finish(__doc__, {**result_header("ladder", "cpu"), "config": config, **found}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--quant", default="auto", help="of the weights, as a server has them")
    parser.add_argument("--strategy", default="weave-through")
    parser.add_argument("--ratio", type=float, default=0.35, help="that the gate lets through")
    parser.add_argument("--rungs", default="0.6,0.8", help="higher ratios, rising")
    parser.add_argument("--sets", default="clapnq,hotpot-5,2wiki-5,musique-5,mtrag")
    parser.add_argument("--count", type=int, default=30, help="questions of each set")
    parser.add_argument("--values", type=Path, help="keep each question's tokens here")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    if unknown := set(args.sets.split(",")) - SETS.keys():
        parser.error(f"unknown sets: {', '.join(sorted(unknown))}")
    return args


def measured(args: argparse.Namespace, rungs: Sequence[float]) -> Iterator[Line]:
    """A line of each question: those that --values has, then the others."""
    done: dict[tuple[str, int], Line] = {}
    if args.values is not None and args.values.is_file():
        with gzip.open(args.values, "rt") as kept:
            done = {(line["set"], line["number"]): line for line in map(json.loads, kept)}
    lab = Lab(args)
    names = args.sets.split(",")
    records = {name: list(read_set(args.data, lab.tokenizer, name)) for name in names}
    for number in range(args.count):
        for name in names:
            if number >= len(records[name]):
                continue
            line = done.get((name, number))
            if line is None:
                case = make_case(lab.tokenizer, records[name][number])
                if case.num_tokens > LONGEST:
                    continue
                line = {"set": name, "number": number, "tokens": case.num_tokens}
                line |= lab.ask(case, rungs)
                if args.values is not None:
                    with gzip.open(args.values, "at") as kept:
                        kept.write(json.dumps(line) + "\n")
            yield line


class Lab:
    """A loaded model and the strategy that is tried with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = locate(args.model)
        self.tokenizer = Tokenizer(folder)
        self._decoder = load_decoder(folder, device="cpu", dtype="float32", quant=args.quant)
        self._strategy = open_strategy(args.strategy, ModelFacts(self._decoder.spec.num_layers))
        self._ratio = args.ratio
        self._prefixes = ContextPrefixes(self._decoder)
        filler = context_filler(self.tokenizer, parse_variant(ENCODING))
        self._encoding = FixedContext(
            self._decoder, self._prefixes, ENCODING, filler, repeat_ids(self.tokenizer)
        )

    @torch.inference_mode()
    def ask(self, case: Case, rungs: Sequence[float]) -> Line:
        """First tokens of one prompt, by way."""
        source = self._encoding.prepare(case, ())
        first = self._stitch(case, source)
        request = first.request
        asked = {pos for run in request.to_compute for pos in run}
        made = fuse(first, self._strategy, self._ratio)
        found: Line = {"base": _first(made.logits, made.work)}
        fresh = set(made.recomputed)
        if found["base"].lead >= CLOSE_CALLS[-1]:
            return found  # it is handed out
        found["full"] = _first(fuse(self._stitch(case, None)).logits, 1.0)
        for rung in rungs:
            again = fuse(self._stitch(case, source), self._strategy, rung)
            found[f"anew {rung:g}"] = _first(again.logits, again.work)
            added = sorted(set(again.recomputed) - fresh | asked)
            on_top = fused_pass(first, added)
            rows = sum(on_top.rows_per_layer) / (self._decoder.spec.num_layers * case.num_tokens)
            found[f"on top {rung:g}"] = _first(on_top.logits, rows)
            fresh |= set(again.recomputed)
        return found

    def _stitch(self, case: Case, source: ComputedChunks | None) -> Stitched:
        """A new buffer for a prompt, with its chunks as `source` has them; None: with none."""
        prefix = (
            encode_prefix(self._decoder, case.front)
            if case.history
            else self._prefixes.prefix_for(case.preamble)
        )
        keys = () if source is None else case.keys
        request = case.request(keys, first_is_exact=source is not None)
        kv = Trials(self._decoder, 1, case.num_tokens, 0).kv(0)
        return stitch(self._decoder, request, prefix, source or ComputedChunks([]), kv)


def _first(logits: Tensor, rows: float) -> First:
    best = logits.float().log_softmax(-1).topk(2)
    high, second = best.values.tolist()
    return First(int(best.indices[0]), round(high - second, 5), round(rows, 4))


def figures(lines: Sequence[Line], rungs: Sequence[float]) -> dict[str, Any]:
    """What the rule in use gives, and every rung and lead."""
    told = [
        {name: First(*each) for name, each in line.items() if isinstance(each, (list, tuple))}
        for line in lines
    ]
    found: dict[str, Any] = {"questions": len(told), "by_lead": {}}
    for least in CLOSE_CALLS:
        close = [each for each in told if each["base"].lead < least]
        rows: list[dict[str, Any]] = []
        for way in ("anew", "on top"):
            for rung in rungs:
                for lead in LEADS:
                    name = f"{way} {rung:g}"
                    settled = [each for each in close if each[name].lead >= lead]
                    wrong = sum(_is_wrong(each, name) for each in settled)
                    paid = _mean([each[name].rows for each in close])
                    rows.append(
                        {
                            "way": name,
                            "lead": lead,
                            "settled": round(len(settled) / max(1, len(close)), 3),
                            "wrong": wrong,
                            "flips": round(wrong / len(told), 4),
                            "rows": round(paid + 1 - len(settled) / max(1, len(close)), 3),
                        }
                    )
        found["by_lead"][f"{least:g}"] = {
            "close": len(close),
            "really_close": sum(each["full"].lead < least for each in close),
            "rungs": rows,
        }
    found["base_rows"] = _mean([each["base"].rows for each in told])
    return found


def _is_wrong(line: dict[str, First], way: str) -> bool:
    return line[way].token != line["full"].token


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def show(found: dict[str, Any]) -> None:
    print(f"{found['questions']} questions, base rows {found['base_rows']:.2f}")
    for least, each in found["by_lead"].items():
        print(
            f"lead {least}: {each['close']} close calls ({each['really_close']} of them in full "
            "prefill too)"
        )
        for row in each["rungs"]:
            print(
                f"  {row['way']:11} lead {row['lead']:<5} settled {row['settled']:4.0%}  wrong "
                f"{row['wrong']}  flips {row['flips']:.1%}  rows {row['rows']:.2f}"
            )


if __name__ == "__main__":
    main()
