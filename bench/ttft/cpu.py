"""How long until the first token on a CPU, and where does the time go?

A knowledge base of chunks of about 300 tokens, ten of them in every prompt; questions asked through
`Weave` as a user would, one after another, every mode in turn. Each mode is measured with its chunk
KV in host memory, on disk with a warm page cache, and on disk with the cache dropped.

    python bench/ttft/run.py --data ../shared/data --out bench/results/ttft-cpu.json

Full prefill is asked again in every turn, first. `speedup` is its time over that of a mode in the
same turn, median of the turns: a virtual machine is faster in one minute than in the next, and so
both are measured within half a minute. `speedup_15` and `speedup_0` are those of `weave` at 15 %
and of `reuse`, host tier.

`auto` is the planner's choice among the modes that the model's calibration allows within --bound;
`auto_over_best` is its time over that of the best of them, full and prefix included, and
`auto_over_full` over full prefill's, medians, by tier.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from common.results import finish, result_header
from kvweave.app.weave import AUTO
from kvweave.calibrate.gate import BOUND
from ttft.cpu_world import STAGES, TIERS, Mode, World

MODES = (
    Mode("full", None),
    Mode("prefix", None),
    Mode("reuse", None),
    Mode("epic", 0.15),
    Mode("cacheblend", 0.15),
    Mode("fusionrag", 0.15),
    Mode("qcfuse", 0.15),
    Mode("prophetkv", 0.15),
    Mode("weave", 0.05),
    Mode("weave", 0.15),
    Mode("weave", 0.3),
    Mode("weave-deep", 0.15),
    Mode(AUTO, None),
)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    took: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    prompt_tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        world = World(args, Path(folder))
        modes, skipped = world.possible(
            [w for w in MODES if not args.only or w.strategy in ("full", *args.only)]
        )
        world.warm()
        task = progress.add_task("asking", total=(args.rounds + 1) * len(TIERS) * len(modes))
        for turn in range(-1, args.rounds):  # the first round warms up
            for tier in TIERS:
                for mode in modes:
                    measured, tokens = world.ask(tier, mode, turn)
                    progress.advance(task)
                    if turn >= 0:
                        took[tier, str(mode)].append(measured)
                        prompt_tokens.append(tokens)
        world.close()
    cells = summarise(took)
    show(cells)
    by = {(c["tier"], c["way"]): c["ttft_ms"] for c in cells}
    speedup = {(c["tier"], c["way"]): c["speedup"] for c in cells}
    config = {
        "model": args.model, "chunks": args.chunks, "rounds": args.rounds, "threads": args.threads,
        "encoding": args.encoding, "prompt_tokens": round(statistics.fmean(prompt_tokens)),
        "bound": args.bound, "profile": "packaged" if args.profile is None else args.profile.name,
        "codec": "int8", "cold": "page cache of the chunk KV files dropped before each question",
    }  # fmt: skip
    results = {
        "speedup_15": speedup.get(("host", "weave 0.15")),
        "speedup_0": speedup.get(("host", "reuse")),
        **judge_auto(by, world.allowed),
        "auto_took": {f"{tier}: {took}": count for (tier, took), count in world.took.items()},
        "skipped": skipped,
        "cells": cells,
    }
    finish(__doc__, {**result_header("ttft", "cpu"), "config": config, **results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with kb_python_peps/")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--encoding", default="filler")
    parser.add_argument("--chunks", type=int, default=10, help="in every prompt")
    parser.add_argument("--documents", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bound", type=float, default=BOUND, help="of auto, in nats per token")
    parser.add_argument("--profile", type=Path, help="of the model, in place of the packaged one")
    parser.add_argument("--only", nargs="*", help="strategies beside full; all by default")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def judge_auto(
    by: dict[tuple[str, str], float], allowed: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Auto beside the best mode it was allowed, and beside full prefill, by tier."""
    names = {f"{name} {ratio:g}" if ratio else name for name, ratio in allowed.items()}
    over_best, over_full = {}, {}
    for tier in TIERS:
        auto, full = by.get((tier, AUTO)), by[tier, "full"]
        if auto is None:
            continue
        singles = [ms for (t, mode), ms in by.items() if t == tier and mode in {*names, "prefix"}]
        over_best[tier] = round(auto / min([full, *singles]), 3)
        over_full[tier] = round(auto / full, 3)
    return {"auto_over_best": over_best, "auto_over_full": over_full}


def summarise(
    took: dict[tuple[str, str], list[dict[str, float]]],
) -> list[dict[str, Any]]:
    cells = []
    for (tier, mode), measured in took.items():
        ttft = statistics.median(m["ttft"] for m in measured)
        beside = zip(took[tier, "full"], measured, strict=True)
        speedups = [full["ttft"] / m["ttft"] for full, m in beside]
        stages = {
            stage: round(statistics.median(m[stage] for m in measured), 1)
            for stage in STAGES
            if all(stage in m for m in measured)
        }
        cells.append(
            {
                "tier": tier,
                "way": mode,
                "ttft_ms": round(ttft, 1),
                "best_ms": round(min(m["ttft"] for m in measured), 1),
                "speedup": round(statistics.median(speedups), 2),
                "speedups": [round(min(speedups), 2), round(max(speedups), 2)],
                "stages_ms": stages,
            }
        )
    return cells


def show(cells: Sequence[dict[str, Any]]) -> None:
    table = Table(title="time to the first token, medians, ms")
    for column in ("chunk KV", "way", "TTFT", "x full", *STAGES):
        table.add_column(column, justify="left" if column in ("chunk KV", "way") else "right")
    for cell in cells:
        stages = [f"{cell['stages_ms'][s]:.0f}" if s in cell["stages_ms"] else "" for s in STAGES]
        table.add_row(
            cell["tier"], cell["way"], f"{cell['ttft_ms']:.0f}", f"{cell['speedup']:.2f}", *stages
        )
    Console(width=110).print(table)
