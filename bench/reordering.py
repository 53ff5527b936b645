"""How much sooner are first tokens when requests that queue are taken in the order the cache likes?

Open-loop Poisson arrivals of skewed questions over MTRAG's passages, exact prefixes alone, a tree
that holds a part of what is asked for. Every rate is offered twice in turns: first come first
served, and as the engine does it, where the request that finds most of its prompt in the tree goes
first and none is overtaken more than 32 times. Both have the same questions at the same moments,
and overlap what is on their way. First come first served also puts off nobody for long because
another computes the same tokens now. Rates are multiples of what is answered one at a time.

    python bench/reordering.py --data ../shared/data --out bench/results/reordering-cpu.json
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from common.results import finish, result_header
from kvweave.engine.waiting_queue import WINDOW
from throughput.open_loop import Probe, alone, probe
from throughput.weave_world import WeaveWorld

ORDERS = {"first come": 1, "reordered": WINDOW}  # by how many may overtake one
NO_BOUND_S = 1e9
MOST = 4096
CONFIG = ("model", "topics", "k", "answer", "pool_tokens", "tree_share", "window", "warm")


class Bench:
    """One knowledge base, a fresh server for every probe."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._world = WeaveWorld(args)
        self._serve = partial(self._world.serve, "prefix")

    def rate_alone(self) -> float:
        """Requests per second, one after the other, the tree warm."""
        with self._world.serving():
            self._warm()
            served = alone(self._serve, self._world.stream(MOST, 2)[: self._args.alone])
        return 1 / statistics.fmean(one.token_s[-1] for one in served)

    def offer(self, rate: float, window: int, seed: int) -> Probe:
        world = self._world
        with world.serving():
            world.engine._scheduler.waiting._window = window  # no user has a reason to set it
            self._warm()
            numbers = world.stream(MOST, 10 + seed)
            return probe(self._serve, rate, self._args.window, NO_BOUND_S, numbers, seed)

    def _warm(self) -> None:
        alone(self._serve, self._world.stream(MOST, 1)[: self._args.warm])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(args)
    base = bench.rate_alone()
    cells: list[dict[str, Any]] = []
    print(f"one at a time {base:.2f} a second")
    for times in args.rates:
        for seed in range(args.draws):
            for name, window in ORDERS.items():
                seen = bench.offer(times * base, window, seed)
                assert all(one.done for one in seen.served), "a request was not answered"
                longest_s = max(one.token_s[0] for one in seen.served)
                cell = {"times": times, "draw": seed, "order": name, **seen.numbers()}
                cells.append({**cell, "longest_ms": round(1e3 * longest_s, 1)})
                ttft = cells[-1]["ttft_ms"]
                print(f"{times}x draw {seed} {name}: {ttft}, longest {longest_s:.1f} s", flush=True)
    return {"one_at_a_time_per_s": round(base, 3), "over": summary(cells), "cells": cells}


def summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per rate: first come first served over reordered, mean of the draws and each of them."""
    rows = []
    for times in dict.fromkeys(cell["times"] for cell in cells):
        row: dict[str, Any] = {"times": times}
        for field in ("mean", "p50", "p95"):
            ratios = [
                first["ttft_ms"][field] / second["ttft_ms"][field]
                for first, second in zip(cells[::2], cells[1::2], strict=True)
                if first["times"] == times
            ]
            row[field] = round(statistics.fmean(ratios), 3)
            row[f"{field}_of_each"] = [round(ratio, 3) for ratio in ratios]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with mtrag/")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--topics", type=int, default=6, help="of MTRAG's conversations")
    parser.add_argument("--k", type=int, default=2, help="chunks in every prompt")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer at most")
    parser.add_argument("--pool-tokens", type=int, help="KV of all requests and of the tree")
    parser.add_argument("--tree-share", type=float, default=0.25, help="of the pool, at most")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 1.2, 1.6])
    parser.add_argument("--draws", type=int, default=3, help="of arrivals and questions per rate")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of arrivals")
    parser.add_argument("--warm", type=int, default=24, help="requests before anything counts")
    parser.add_argument("--alone", type=int, default=24, help="requests one after the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.profile = args.allow = None  # nothing is fused
    args.bound = 0.0
    header = {**result_header("reordering", "cpu"), "config": {n: getattr(args, n) for n in CONFIG}}
    finish(__doc__, {**header, **measure(args)}, args.out)


if __name__ == "__main__":
    main()
