"""Do figures of FusionRAG and QCFuse hold on small models, on a CPU?

Each part answers one figure or two; `--part` names some. Parts that ask the same questions share
what is computed of them:

    matched      QCFuse 10, 11   at which ratio and work QCFuse and ProphetKV reach each other's KL
    stored       QCFuse 10, 11   QCFuse and others so, by 600 questions of quality-h200 (no model)
    anchors      QCFuse 15       QCFuse's quality by rule and share of its anchors
    layers       QCFuse 16       QCFuse scored at the first, middle, last, all and profiled layers
    attention    QCFuse 5        attention mass on few tokens; layers that agree with all
    recall       QCFuse 6        tokens of the answer that a question finds over anchors
    needles      QCFuse 12       RULER-like tasks of 2,000 tokens, in full and with reuse
    deviation    FusionRAG 3     what an oracle's 15 % of the rows leave of it, and where it lies
    places       FusionRAG 8     where the rows lie that selectors choose
    neighbours   FusionRAG 7b, 16, 17   chunk KV behind 2 to 15 similar chunks
    together     FusionRAG 7a    what is retrieved together (no model)
    time         QCFuse 10, 11   seconds to the first token at matched quality; a quiet machine

    python bench/figures/run.py --data DATA --part matched,anchors,layers --questions 40 \\
        --out bench/results/figures-cpu.json

Questions are held-out ones of 2Wiki, HotpotQA, MuSiQue and NQ with five chunks each. KL is that of
full prefill's own answer, nats per token. Only `time` takes times.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import numpy as np
import torch

from common.results import finish, read_results, result_header, save_run
from figures.attention import measure_attention, sum_up_attention
from figures.cases import Posed, read_marked, read_needles, read_qa
from figures.deviation import measure_deviation, sum_up_deviation
from figures.knowledge import QUESTIONS, Knowledge, measure_together
from figures.lab import Lab, Question
from figures.matching import match_quality
from figures.neighbours import measure_neighbours, neighbour_ways, sum_up_neighbours
from figures.places import count_places, sum_up_places
from figures.recall import measure_recall, sum_up_recall
from figures.stored import match_stored
from figures.timing import sum_up_times, time_ways
from figures.ways import (
    RATIOS,
    anchor_ways,
    layer_ways,
    matched_ways,
    needle_ways,
    sum_up_matched,
    sum_up_tasks,
    sum_up_ways,
    try_ways,
)

SETS = "2wiki,hotpot,musique,nq"
WITHOUT_MODEL = ("stored", "together")
SAVE_EVERY = 4  # questions

Line = dict[str, Any]
Measure = Callable[[Question], Line]


class Part(NamedTuple):
    """What answers a figure."""

    read: Callable[[Path, Any, Sequence[str], int], list[Posed]]
    begin: Callable[[Lab, argparse.Namespace, Sequence[Posed]], Measure]
    sum_up: Callable[[Sequence[Mapping[str, Any]]], Line]


def _by_ways(ways_of: Callable[[Lab], Any]) -> Callable[..., Measure]:
    """A part that tries some ways on every question."""
    return lambda lab, args, posed: partial(try_ways, ways=ways_of(lab))


def _by_lab(measure: Callable[[Lab, Question], Line]) -> Callable[..., Measure]:
    """A part that measures every question by itself."""
    return lambda lab, args, posed: partial(measure, lab)


def _begin_neighbours(lab: Lab, args: argparse.Namespace, posed: Sequence[Posed]) -> Measure:
    passages = list(dict.fromkeys(p for each in posed for p in each.passages))
    nearest = Knowledge(args.data, args.passages).nearest_of(passages)
    ways = neighbour_ways(lab)
    return lambda question: measure_neighbours(lab, question, ways, nearest)


def _begin_time(lab: Lab, args: argparse.Namespace, posed: Sequence[Posed]) -> Measure:
    return partial(time_ways, ways=matched_ways(lab))  # type: ignore[return-value]


PARTS = {
    "matched": Part(read_qa, _by_ways(matched_ways), sum_up_matched),
    "anchors": Part(read_qa, _by_ways(anchor_ways), sum_up_ways),
    "layers": Part(read_qa, _by_ways(layer_ways), sum_up_ways),
    "attention": Part(read_qa, _by_lab(measure_attention), sum_up_attention),
    "deviation": Part(read_qa, _by_lab(measure_deviation), sum_up_deviation),
    "places": Part(read_qa, _by_lab(count_places), sum_up_places),
    "neighbours": Part(read_qa, _begin_neighbours, sum_up_neighbours),
    "recall": Part(read_marked, _by_lab(measure_recall), sum_up_recall),
    "needles": Part(read_needles, _by_ways(needle_ways), sum_up_tasks),
    "time": Part(read_qa, _begin_time, sum_up_times),
}


def main() -> None:
    args = parse_args()
    started_s = time.perf_counter()
    result: Line = {**result_header("figures", "cpu"), "config": {}, "parts": {}}
    names = args.part.split(",")

    def save(parts: Mapping[str, Line]) -> None:
        result["parts"] |= parts
        result["config"] = {
            "model": args.model,
            "quant": args.quant,
            "parts": names,
            "sets": args.sets,
            "questions": args.questions,
            "ratios": args.ratios,
            "passages": args.passages,
            "seconds": round(time.perf_counter() - started_s),
        }
        if args.out is not None:
            save_run(__doc__, result, args.out)

    if "stored" in names:
        save({"stored": match_stored()})
    if "together" in names:
        save({"together": measure_together(args.data, args.passages, QUESTIONS)})
    asking = [name for name in names if name in PARTS]
    if asking:
        lab = Lab(args)
        for read in dict.fromkeys(PARTS[name].read for name in asking):
            ask_all(lab, args, read, [n for n in asking if PARTS[n].read is read], save)
    if "time" in names and args.out is not None:
        save({"time": {**result["parts"]["time"], "matched": join_quality(result, args)}})
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part", required=True, help=f"of {', '.join((*PARTS, *WITHOUT_MODEL))}")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quant", default="auto", help="of the weights, as a server has them")
    parser.add_argument("--sets", default=SETS)
    parser.add_argument("--questions", type=int, default=40, help="of all sets together")
    parser.add_argument("--ratios", default="0.1,0.3,0.5", help="of the parts anchors and layers")
    parser.add_argument("--passages", type=int, default=35745, help="of the knowledge base")
    parser.add_argument("--out", type=Path, help="also write the JSON here, as it goes")
    args = parser.parse_args()
    if unknown := set(args.part.split(",")) - {*PARTS, *WITHOUT_MODEL}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return args


@torch.inference_mode()
def ask_all(
    lab: Lab,
    args: argparse.Namespace,
    read: Callable[..., list[Posed]],
    names: Sequence[str],
    save: Callable[[Mapping[str, Line]], None],
) -> None:
    """Ask every question for all parts that read the same ones, and save as it goes."""
    posed = read(args.data, lab.tokenizer, args.sets.split(","), args.questions)
    measures = {name: PARTS[name].begin(lab, args, posed) for name in names}
    values: dict[str, list[Line]] = {name: [] for name in names}
    for number, each in enumerate(posed, start=1):
        begun_s = time.perf_counter()
        question = Question(lab, each)
        for name, measure in measures.items():
            if line := measure(question):
                values[name].append({"set": each.set_name, "number": each.number, **line})
        took_s = time.perf_counter() - begun_s
        print(f"{number}/{len(posed)} {each.set_name} {each.number}: {took_s:.0f} s", flush=True)
        if number % SAVE_EVERY == 0 or number == len(posed):
            save({name: PARTS[name].sum_up(values[name]) for name in names if values[name]})


def join_quality(result: Line, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The times of this run at equal KL, by the newest run of `matched` with this model."""
    for run in reversed(read_results(args.out)["runs"]):
        if "matched" in run["parts"] and run["config"]["model"] == args.model:
            break
    else:
        return []
    kls = {(r["way"], r["ratio"]): r["kl"] for r in run["parts"]["matched"]["rows"] if "ratio" in r}
    ms = {row["way"]: row["ms"] for row in result["parts"]["time"]["rows"]}
    names = ("qcfuse", "prophetkv")
    curves = {n: np.array([[kls[f"isolated/{n}", ratio] for ratio in RATIOS]]) for n in names}
    costs = {n: [ms[f"isolated/{n}@{ratio:g}"] for ratio in RATIOS] for n in names}
    return match_quality(RATIOS, curves, costs)


if __name__ == "__main__":
    main()
