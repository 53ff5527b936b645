"""How much sooner are first tokens in a free order, alone and with fused chunks on top of it?

Questions of MMLU over the Wikipedia passages that a search by words finds, on the product's engine
with real weights. CRAFT's figures 11, 13 and 16: by strategy, by number of passages, by answers at
once. Ways, each in a process state of its own:

    full                nothing is reused
    prefix              what the knowledge tree has, passages as found
    prefix, free        … in a free order
    cacheblend          stored chunk KV, 15 % recomputed, behind what the tree has, as found
    cacheblend, free    … in a free order
    weave-through …     the same two with our selector

Before anything counts, `--warm` other requests of the stream go through by exact prefixes in the
way's order: they fill the tree and the access table, and their chunk KV is stored. The requests
that count are asked once, so the tree grows as it would. Every way has the same requests.

    python bench/order_ttft.py --data ../shared/data --time --out bench/results/order_ttft-cpu.json

Without `--time` it counts tokens and stores no seconds: that can be done on a busy machine too.
"""

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from common.word_lists import CORPUS, QUESTIONS, word_lists
from kvweave.app.weave import Answer, Weave
from kvweave.config import LibrarySettings, ModelChoice, WeaveConfig
from kvweave.engine.sampling import Sampling

SET = "mmlu"
WAIT_S = 1800.0  # for chunk KV to be made
REMEMBERED = 8 << 30  # bytes of chunk KV in host memory


class Way(NamedTuple):
    """How requests are answered."""

    reuse: str
    ratio: float | None
    order: str

    def __str__(self) -> str:
        return f"{self.reuse}, free" if self.order == "free" else self.reuse


WAYS = (
    Way("full", None, "as_found"),
    *(
        Way(reuse, ratio, order)
        for reuse, ratio in (("prefix", None), ("cacheblend", 0.15), ("weave-through", 0.15))
        for order in ("as_found", "free")
    ),
)


class Request(NamedTuple):
    question: str
    documents: tuple[str, ...]


def read_requests(data: Path, count: int, k: int) -> list[Request]:
    texts = [f"{p['title']}\n{p['text']}" for p in read_jsonl(data / CORPUS)]
    asked = [record["question"] for record in read_jsonl(data / QUESTIONS[SET])]
    places, _ = word_lists(data, SET, 20)
    return [
        Request(question, tuple(texts[place] for place in row[:k]))
        for question, row in zip(asked[:count], places, strict=False)
    ]


def ask(weave: Weave, way: Way, request: Request) -> Answer:
    return weave.ask(
        request.question,
        documents=request.documents,
        reuse=way.reuse,
        ratio=way.ratio,
        order=way.order,
        sampling=Sampling(max_tokens=1, temperature=0.0),
    )


def answer_all(weave: Weave, way: Way, requests: Sequence[Request], at_once: int) -> list[Answer]:
    if at_once == 1:
        return [ask(weave, way, request) for request in requests]
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(partial(ask, weave, way), requests))


def measure(way: Way, k: int, at_once: int, args: argparse.Namespace) -> dict[str, Any]:
    """One way in a Weave of its own."""
    requests = read_requests(args.data, args.warm + args.requests, k)
    warm, counted = requests[: args.warm], requests[args.warm :]
    reads_chunks = way.reuse not in ("full", "prefix")
    library = LibrarySettings(promotion=int(reads_chunks), remembered_bytes=REMEMBERED)
    config = WeaveConfig(ModelChoice(args.model, args.device), library)
    with Weave.from_config(config) as weave:
        if reads_chunks:  # chunk KV of all that will be asked about
            for request in counted:
                ask(weave, Way("prefix", None, "as_found"), request)
            documents = weave._target.documents
            assert documents is not None, "documents are remembered"
            assert documents.promotion.wait(WAIT_S), "chunk KV was made"
            weave.engine.forget(None, [""])
        if way.reuse != "full":
            answer_all(weave, Way("prefix", None, way.order), warm, 1)
        answers = answer_all(weave, way, counted, at_once)
    counts = [answer.explain.counts for answer in answers if answer.explain is not None]
    total = sum(answer.prompt_tokens for answer in answers)
    cell: dict[str, Any] = {"way": str(way), "k": k, "at_once": at_once, "requests": len(answers)}
    for kind in ("exact", "reused", "recomputed", "computed"):
        cell[kind] = round(sum(count.get(kind, 0) for count in counts) / total, 4)
    if args.time:
        times = sorted(answer.ttft_ms for answer in answers)
        cell["mean_ms"] = round(statistics.fmean(times), 2)
        cell["p50_ms"] = round(statistics.median(times), 2)
        cell["p95_ms"] = round(times[min(len(times) - 1, int(0.95 * len(times)))], 2)
    return cell


def over_given(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean first token of each way over that in a free order."""
    rows = []
    for cell in cells:
        same = [c for c in cells if (c["k"], c["at_once"]) == (cell["k"], cell["at_once"])]
        free = next((c for c in same if c["way"] == f"{cell['way']}, free"), None)
        if free is not None and "mean_ms" in cell:
            full = next((c["mean_ms"] for c in same if c["way"] == "full"), None)
            rows.append(
                {
                    "way": cell["way"],
                    "k": cell["k"],
                    "at_once": cell["at_once"],
                    "free_over_given": round(cell["mean_ms"] / free["mean_ms"], 4),
                    "free_over_full": full and round(full / free["mean_ms"], 4),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with mmlu/ and wiki_kb/")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=200, help="that count")
    parser.add_argument("--warm", type=int, default=400, help="before them")
    parser.add_argument("--k", type=int, nargs="+", default=[5], help="passages in a prompt")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1], help="answers at once")
    parser.add_argument("--ways", nargs="+", default=[str(way) for way in WAYS])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time", action="store_true", help="on a quiet machine alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cells = []
    for k in args.k:
        for at_once in args.at_once:
            for way in [way for way in WAYS if str(way) in args.ways]:
                cells.append(measure(way, k, at_once, args))
                print(cells[-1], flush=True)
    table = Table(title="first token by way and order")
    for column in cells[0]:
        table.add_column(column, justify="right")
    for cell in cells:
        table.add_row(*map(str, cell.values()))
    Console(width=150).print(table)
    names = ("model", "requests", "warm", "threads", "time")
    header = result_header("order_ttft", args.device)
    config = {name: getattr(args, name) for name in names}
    finish(
        __doc__, {**header, "config": config, "over": over_given(cells), "cells": cells}, args.out
    )


if __name__ == "__main__":
    main()
