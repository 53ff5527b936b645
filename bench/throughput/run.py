"""How many requests per second can be served, and how fast, under load?

Open-loop Poisson arrivals over a skewed stream of questions; full prefill, exact prefixes and auto
in turn, each on a server that has just been started and warmed with other draws of the same stream.
The number that counts is the highest arrival rate at which the 95th percentile of the time to the
first token stays within 5 times full prefill's unloaded one. That bound is in seconds and the same
for all modes. Each rate is tried for a while with questions of its own draw, the same for all.

    python bench/throughput/run.py --data ../shared/data --out bench/results/throughput-cpu.json
    python bench/throughput/run.py --device cuda --shape llama-3.1-8b

Exact modes must give the answers of the plain loop that serves one request alone; everything must
be answered; at the end no page, lease or request may be held.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import finish, result_header
from kvweave.kv.tree.node import DEVICE
from throughput.open_loop import Probe, Served, alone, highest_rate, probe

MODES = ("full", "prefix", "auto")
BOUND = 5.0  # times full prefill's unloaded TTFT
LONGER = 3.0  # arrivals last at least so many times the bound
WARM_SEED, ALONE_SEED = 1, 2
MOST = 4096  # requests of one draw


class World(Protocol):
    """What is served. `serving` starts a server; all else needs one."""

    @property
    def engine(self) -> Any: ...
    @property
    def store(self) -> Any: ...
    def config(self) -> dict[str, Any]: ...
    def serving(self) -> AbstractContextManager[None]: ...
    def stream(self, count: int, seed: int) -> list[int]: ...
    def serve(self, mode: str, number: int) -> Iterable[Any]: ...
    def reference(self, number: int) -> Any: ...
    def answer(self, tokens: Sequence[Any]) -> Any: ...
    def prompt_tokens(self, number: int) -> int: ...


def main() -> None:
    args = parse_args()
    world = open_world(args)
    bench = Bench(world, args)
    for mode in MODES:
        bench.measure(mode)
    drift = bench.drift()
    cells, rates = bench.cells, bench.rates
    show(cells)
    config = {
        **world.config(), "answer_tokens": args.answer, "window_s": args.window,
        "probes": args.probes, "prompt_tokens": bench.prompt_tokens,
        "ttft_bound_ms": round(bench.bound_s * 1e3), "bound": "p95 <= 5 x full, unloaded",
    }  # fmt: skip
    results = {
        "auto_over_full": over(rates, "auto"),
        "prefix_over_full": over(rates, "prefix"),
        "completed_over_full": over(most_completed(cells), "auto"),
        "cpu_s_per_request": {mode: cpu_s(cells, mode) for mode in MODES},
        "requests_per_s": {mode: round(rate, 3) for mode, rate in rates.items()},
        "answers_checked": bench.checked,
        "answers_equal": bench.equal,
        "leaks": bench.leaks,
        "full_again_over_first": drift,  # far from 1: something else ran, and ratios mean little
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "took_s": round(time.perf_counter() - bench.began_s),
        "cells": cells,
    }
    header = result_header("throughput", args.device)
    finish(__doc__, {**header, "config": config, **results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with mtrag/ (not with --shape)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="random weights of this shape instead of a model")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--topics", type=int, default=6, help="of MTRAG's conversations")
    parser.add_argument("--k", type=int, default=5, help="chunks in every prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer at most")
    parser.add_argument("--pool-tokens", type=int, help="KV of all requests and of the tree")
    parser.add_argument("--tree-share", type=float, default=0.25, help="of the pool, at most")
    parser.add_argument("--profile", type=Path, help="with the calibration that auto goes by")
    parser.add_argument("--allow", help="STRATEGY:RATIO that auto may take, calibrated or not")
    parser.add_argument("--bound", type=float, default=0.02, help="of auto, in nats per token")
    parser.add_argument("--ratio", type=float, default=0.15, help="of auto, with --shape")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of arrivals per rate")
    parser.add_argument("--probes", type=int, default=4, help="rates tried per mode")
    parser.add_argument("--warm", type=int, default=24, help="requests before anything counts")
    parser.add_argument("--sample", type=int, default=5, help="answers compared per exact mode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2 minutes, and rough")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.window, args.probes, args.warm, args.sample = 12.0, 3, 8, 3
    if args.shape is None and args.data is None:
        parser.error("--data says where the questions are; or take --shape for random weights")
    return args


def open_world(args: argparse.Namespace) -> World:
    if args.shape is not None:
        from throughput.shape_world import ShapeWorld

        return ShapeWorld(args)
    from throughput.weave_world import WeaveWorld

    return WeaveWorld(args)


def warm_requests(mode: str, args: argparse.Namespace) -> int:
    """Full prefill has no caches to fill; but a GPU records decode steps of every size, each mode
    on an engine of its own, and a mode that does that while it is measured looks slower."""
    return 2 if mode == "full" and args.device == "cpu" else args.warm


class Bench:
    """Measures one mode after another; full prefill first, because it sets the bound."""

    def __init__(self, world: World, args: argparse.Namespace) -> None:
        self._world, self._args = world, args
        self.began_s = time.perf_counter()
        self.bound_s = 0.0
        self.rates: dict[str, float] = {}
        self.cells: list[dict[str, Any]] = []
        self.checked = self.equal = 0
        self.leaks: dict[str, dict[str, int]] = {}
        self.prompt_tokens = 0

    def measure(self, mode: str) -> None:
        world, args = self._world, self._args
        with world.serving():
            serve = partial(world.serve, mode)
            count = warm_requests(mode, args)
            warm = probe(serve, count, 1.0, 1e9, world.stream(MOST, WARM_SEED), 0)
            unloaded = self._unloaded(mode)
            if mode == "full":
                self.bound_s = BOUND * unloaded["ttft_ms"] / 1e3
            found: list[Probe] = []

            def probe_at(rate: float) -> bool:
                before = world.engine.stats()
                seed = 10 + len(found)  # questions of their own, the same for all modes
                numbers = world.stream(MOST, seed)
                # a queue that grows must have the time to reach the bound
                window_s = max(args.window, LONGER * self.bound_s)
                found.append(probe(serve, rate, window_s, self.bound_s, numbers, seed))
                self._note(mode, found[-1], unloaded, before)
                return found[-1].within

            if mode == "full":
                seconds = (unloaded["ttft_ms"] + unloaded["decode_ms"]) / 1e3
                self.rates[mode] = highest_rate(probe_at, 0.9 / seconds, args.probes)
            else:
                full = self.rates["full"] or min(cell["rate"] for cell in self.cells)
                same = full if probe_at(full) else 0.0
                start = full * self._guess(unloaded)
                self.rates[mode] = highest_rate(probe_at, start, args.probes - 1, same)
            self._check(mode, [warm, *found])
            self.leaks[mode] = held(world)
            assert not any(self.leaks[mode].values()), f"{mode} still holds {self.leaks[mode]}"

    def drift(self) -> float:
        """Full prefill's unloaded TTFT once more, over what it was at the beginning."""
        with self._world.serving():
            again = self._unloaded("full")["ttft_ms"] / 1e3
        drift = again / (self.bound_s / BOUND)
        if not 0.8 < drift < 1.25:
            print(f"the machine changed meanwhile: full prefill takes {drift:.2f} times as long")
        return round(drift, 2)

    def _unloaded(self, mode: str) -> dict[str, float]:
        world, args = self._world, self._args
        numbers = world.stream(MOST, ALONE_SEED)[: max(3, args.sample)]
        serve = partial(world.serve, mode)
        served = alone(serve, numbers)
        if mode == "full":  # sets the bound: what else the machine does must not widen it
            pairs = zip(served, alone(serve, numbers), strict=True)
            served = [min(pair, key=lambda one: one.token_s[0]) for pair in pairs]
        self.prompt_tokens = round(statistics.fmean(map(world.prompt_tokens, set(numbers))))
        errors = [one.error for one in served if one.error]
        assert not errors, f"{mode} fails when nothing else runs: {errors[0]}"
        first = statistics.median(one.token_s[0] for one in served)
        rest = statistics.median(one.token_s[-1] - one.token_s[0] for one in served)
        print(f"{mode}: unloaded TTFT {first * 1e3:.0f} ms, the other tokens {rest * 1e3:.0f} ms")
        return {"ttft_ms": round(first * 1e3, 1), "decode_ms": round(rest * 1e3, 1)}

    def _guess(self, unloaded: dict[str, float]) -> float:
        """How many times full prefill's rate is worth a try."""
        return max(1.2, min(4.0, 0.75 * self.bound_s * 1e3 / BOUND / unloaded["ttft_ms"]))

    def _note(
        self, mode: str, seen: Probe, unloaded: dict[str, float], before: dict[str, float]
    ) -> None:
        after = self._world.engine.stats()
        tokens = {
            name.removeprefix("tokens_"): int(after[name] - before.get(name, 0))
            for name in sorted(after)
            if name.startswith("tokens_")
        }
        cell = {"way": mode, **seen.numbers(), "unloaded": unloaded, "tokens": tokens}
        cell["preemptions"] = int(after["preemptions"] - before["preemptions"])
        self.cells.append(cell)
        print(line(cell), flush=True)

    def _check(self, mode: str, probes: Sequence[Probe]) -> None:
        """Everything was answered; exact modes as the plain loop does it, alone."""
        served = [one for each in probes for one in each.served]
        lost = [one for one in served if one.error is not None or not one.done]
        assert not lost, f"{len(lost)} requests of {mode} were not answered: {lost[0].error}"
        if mode == "auto":
            return
        sample: dict[int, Served] = {}
        for one in reversed(served):
            if len(sample) < self._args.sample:
                sample.setdefault(one.number, one)
        for number, one in sample.items():
            self.checked += 1
            wanted, got = self._world.reference(number), self._world.answer(one.tokens)
            self.equal += wanted == got
            if wanted != got:
                print(f"{mode}, question {number}: {got!r} under load, {wanted!r} alone")


def held(world: World) -> dict[str, int]:
    """What is held although no request is left. Raises if the engine's books do not balance."""
    engine = world.engine
    engine.run_alone(engine.check_integrity)
    stats = engine.stats()
    tree = engine.run_alone(
        lambda: {page for node in engine.tree.holders() for page in node.pages[DEVICE].handle}
    )
    return {
        "requests": int(stats["waiting"] + stats["running"] + stats["parked"]),
        "pages": int(stats["pages_used"]) - len(tree),
        "leases": world.store.num_pinned(),
    }


def over(rates: dict[str, float], mode: str) -> float | None:
    return round(rates[mode] / rates["full"], 2) if rates["full"] else None


def most_completed(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Requests per second that were finished at the best of all rates, bound or no bound."""
    return {
        mode: max(cell["completed_per_s"] for cell in cells if cell["way"] == mode)
        for mode in MODES
    }


def cpu_s(cells: Sequence[dict[str, Any]], mode: str) -> float:
    """What a request costs at the highest load: where others use the machine, clocks say little."""
    busiest = max((cell for cell in cells if cell["way"] == mode), key=lambda cell: cell["rate"])
    return float(busiest["cpu_s_per_request"])


def line(cell: dict[str, Any]) -> str:
    ttft, tbt = cell["ttft_ms"], cell["tbt_ms"]
    kept = "kept" if cell["within"] else "cut short" if cell["cut_short"] else "lost"
    numbers = [ttft["p50"], ttft["p95"], tbt["p50"], tbt["p95"]]
    shown = "".join(f"{'-' if n is None else format(n, '.0f'):>9}" for n in numbers)
    done = f"{cell['requests']:>9}{cell['completed_per_s']:>9.2f}"
    return f"{cell['way']:<8}{cell['rate']:>7.2f}{done}{shown}   {kept}"


def show(cells: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'way':<8}{'rate/s':>7}{'requests':>9}{'done/s':>9}", end="")
    print("".join(f"{name:>9}" for name in ("TTFT p50", "p95", "TBT p50", "p95")), "  bound")
    for cell in sorted(cells, key=lambda cell: (MODES.index(cell["way"]), cell["rate"])):
        print(line(cell))


if __name__ == "__main__":
    main()
