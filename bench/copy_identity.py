"""Are answers that copy the same as plain ones, token for token, over thousands of them?

Greedy answers of a real model, several at a time, by two engines over the same weights: one copies,
the other does not. Records of all sets give up to two short passages each, and four answers: to
their question, the sentences that answer it, a summary, and the passages again. Records without
passages give one.

    python bench/copy_identity.py --data DATA --model smollm2 --weights float32 --weights int8
    python bench/copy_identity.py --data DATA --cases carry/copy_cases.json --weights none
    python bench/copy_identity.py --cases carry/copy_cases.json --device cuda --weights float32

The second line writes the questions and stops: the third then needs no data. Where an answer
differs for the first time, the plain answer is computed again up to there, by both engines; for the
one that copies it is its own draft. `lead` is how far the plain engine's token was ahead of the
other one there, and `moved` the most by which the two engines disagree on how far the best token is
ahead of the second, at any place up to there; both in nats. A lead of no more than the largest
`moved` is explained by rounding; `beyond_rounding` counts the others. With `--control` the plain
engine is asked again in the opposite order: `otherwise_grouped` answers differ by that alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from copy_decode import QUOTE, SUMMARY, Case, make_request
from kvweave.app.weave import Weave
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.model.decoder import Decoder

SETS = {
    "hotpot": "hotpotqa/hotpotqa_distractor",
    "2wiki": "2wikimultihopqa/2wiki",
    "musique": "musique/musique_ans",
    "nq": "nq_oracle/nq_open_oracle",
    "clapnq": "clapnq_dev/clapnq_dev",
    "squad": "squad_v1.1_dev/squad_bm25_10passages",
    "mtrag": "mtrag/mtrag_qa_elser_top5",
    "musique-s": "cacheblend_musique_s/musique_s",
    "nq-open": "nq_open/nq_open_questions",
}
PASSAGES, WORDS = 2, 32  # of a record, and of each of them
REPEAT = "Repeat the passages, word for word."
AT_ONCE = 64  # questions that are handed in together, so that one that ends is followed by another
WEIGHTS = {
    "float32": {"dtype": "float32", "quant": "none"},
    "int8": {"dtype": "float32", "quant": "int8"},
    "bfloat16": {"dtype": "bfloat16", "quant": "none"},
}
Answer = Sequence[int]


class SetCase(NamedTuple):
    """A question, and the set it is from."""

    set_name: str
    question: str
    passages: Sequence[str]
    history: Sequence[Sequence[str]]


def main() -> None:
    args = parse_args()
    cases = read_cases(args)
    if args.weights == ["none"]:
        return
    found: dict[str, Any] = {"answers": 0, "different_answers": 0, "parts": {}}
    for weights in args.weights or ["float32"]:
        opened = Weave.open(model=args.model, device=args.device, **WEIGHTS[weights])
        with opened as weave:
            device = weave.runtime.decoder.device.type
            part = ask_model(weave, cases, args)
        found["parts"][weights] = part
        for name in ("answers", "different_answers"):
            found[name] += part[name]
    show(found["parts"])
    config = {"model": args.model, "together": args.together, "max_tokens": args.max_tokens}
    config |= {"copy_tokens": args.copy_tokens, "passages": PASSAGES, "words": WORDS}
    result = {**result_header("copy_identity", device), "config": config, **found}
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, help="folder of the data sets, if --cases is not there"
    )
    parser.add_argument("--cases", type=Path, help="questions as JSON; made if not there")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--weights", action="append", choices=[*WEIGHTS, "none"], help="repeatable; none: --cases"
    )
    parser.add_argument("--answers", type=int, default=2000, help="of each kind of weights")
    parser.add_argument("--skip", type=int, default=0, help="that many questions first")
    parser.add_argument("--seconds", type=float, default=1e9, help="then no more are asked")
    parser.add_argument("--together", type=int, default=8, help="answers that decode at a time")
    parser.add_argument("--copy-tokens", type=int, default=7, help="at a time")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--control", action="store_true", help="plain in the opposite order, too")
    parser.add_argument("--told", type=int, default=40, help="differences that are looked into")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def read_cases(args: argparse.Namespace) -> list[SetCase]:
    """Questions of all sets, one of each after another."""
    if args.cases is not None and args.cases.is_file():
        made = [SetCase(*each) for each in json.loads(args.cases.read_text())]
    else:
        by_set = [ask_records(args.data, name) for name in SETS]
        each_once = (
            case for row in zip_longest(*by_set) for cases in row if cases for case in cases
        )
        made = list(islice(each_once, args.skip + args.answers))
        if args.cases is not None:
            args.cases.parent.mkdir(parents=True, exist_ok=True)
            args.cases.write_text(json.dumps(made))
    return made[args.skip : args.skip + args.answers]


def ask_records(data: Path, name: str) -> Iterator[list[SetCase]]:
    """What is asked over each record of a set."""
    for record in read_jsonl(data / f"{SETS[name]}.jsonl.gz"):
        passages = [shorten(each) for each in record.get("passages", ())[:PASSAGES]]
        history = record.get("history", ())[-1:]
        question = record["question"]
        asked = [question, QUOTE.format(question), SUMMARY, REPEAT] if passages else [question]
        yield [SetCase(name, each, passages, history) for each in asked]


def shorten(passage: dict[str, Any]) -> str:
    words = passage["text"].split()[:WORDS]
    return "\n".join(filter(None, (passage.get("title"), " ".join(words))))


def ask_model(weave: Weave, cases: Sequence[SetCase], args: argparse.Namespace) -> dict[str, Any]:
    """What one model answers, with and without copying."""
    asked = [
        (case.set_name, make_request(weave, Case(*case[1:]), case.set_name, args.max_tokens))
        for case in cases
    ]
    cfg = EngineConfig(copy_tokens=0, max_running=args.together, tree_share=0.9)
    decoder = weave.runtime.decoder
    twin = Decoder(decoder.spec, decoder.weights)  # an engine is alone with its decoder
    with (
        Engine(decoder, cfg) as plain,
        Engine(twin, replace(cfg, copy_tokens=args.copy_tokens)) as copying,
    ):
        return compare(plain, copying, asked, args)


def compare(
    plain: Engine,
    copying: Engine,
    asked: Sequence[tuple[str, EngineRequest]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Answer by both engines what there is time for; look into what differs."""
    differences: list[dict[str, Any]] = []
    sets: dict[str, list[int]] = {}
    seconds, tokens, copied, regrouped, done = [0.0, 0.0], 0, 0, 0, 0
    stop_s = time.perf_counter() + args.seconds
    while done < len(asked) and time.perf_counter() < stop_s:
        names, requests = zip(*asked[done : done + AT_ONCE], strict=True)
        answers = []
        for i, engine in enumerate((plain, copying)):
            started_s, before = time.perf_counter(), engine.stats()["tokens_copied"]
            answers.append(answer_all(engine, requests))
            seconds[i] += time.perf_counter() - started_s
            copied += int(engine.stats()["tokens_copied"] - before)
        if args.control:
            again = answer_all(plain, requests[::-1])[::-1]
            regrouped += sum(one != other for one, other in zip(answers[0], again, strict=True))
        for name, request, one, other in zip(names, requests, *answers, strict=True):
            tokens += len(one)
            count = sets.setdefault(name, [0, 0])
            count[0] += 1
            if one != other:
                count[1] += 1
                at = first_other(one, other)
                differences.append({"set": name, "at": at})
                if len(differences) <= args.told:
                    looked = look_into(plain, copying, request, one[: at + 1], other[at])
                    differences[-1] |= looked
        done += len(requests)
        print(f"{done}/{len(asked)}, {len(differences)} differ, {seconds}", flush=True)
    leads = [each["lead"] for each in differences[: args.told]] or [0.0]
    moved = max((each["moved"] for each in differences[: args.told]), default=0.0)
    return {
        "answers": done,
        "different_answers": len(differences),
        **({"otherwise_grouped": regrouped} if args.control else {}),
        "beyond_rounding": sum(lead > moved for lead in leads),
        "largest_lead": max(leads),
        "median_lead": statistics.median(leads),
        "rounding_moved": moved,
        "tokens": tokens,
        "copied": copied,
        "seconds": [round(each, 1) for each in seconds],
        "answers_and_different_by_set": sets,
        "differences": differences[: args.told],
    }


def answer_all(engine: Engine, requests: Sequence[EngineRequest]) -> list[Answer]:
    tickets = [engine.submit(each) for each in requests]
    return [[choice.token_id for choice in ticket] for ticket in tickets]


def first_other(one: Answer, other: Answer) -> int:
    """Where two answers part."""
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def look_into(
    plain: Engine, copying: Engine, request: EngineRequest, shared: Answer, instead: int
) -> dict[str, float]:
    """The plain engine's lead at the last token of `shared`, over `instead`, and how far the two
    engines disagree on leads up to there."""
    request = replace(request, forced=tuple(shared), watched=len(shared))
    tickets = [engine.submit(request) for engine in (plain, copying)]
    for ticket in tickets:
        list(ticket)
    thoughts = [torch.stack(ticket.distributions) for ticket in tickets]  # [tokens, V] each
    best = thoughts[0].topk(2).indices  # [tokens, 2]
    leads = [thought.gather(1, best).diff().squeeze(1) for thought in thoughts]  # [tokens] each
    lead = thoughts[0][-1, shared[-1]] - thoughts[0][-1, instead]
    moved = (leads[0] - leads[1]).abs().max()
    return {"lead": round(abs(float(lead)), 6), "moved": round(float(moved), 6)}


def show(parts: dict[str, Any]) -> None:
    table = Table(title="answers that copy beside plain ones")
    names = (
        "answers",
        "different_answers",
        "otherwise_grouped",
        "largest_lead",
        "copied",
        "tokens",
    )
    for column in ("weights", *names, "seconds"):
        table.add_column(column.replace("_", " "))
    for weights, part in parts.items():
        seconds = " / ".join(map(str, part["seconds"]))
        table.add_row(weights, *(str(part.get(name, "–")) for name in names), seconds)
    Console().print(table)


if __name__ == "__main__":
    main()
