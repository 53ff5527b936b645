"""How long does a GPU stand still while prompts over shared chunks wait for it?

Random weights of a real shape; more prompts of 8K tokens than the engine computes at once, 15 % of
their rows recomputed, 16 tokens of answer. In the middle of it the device is watched: the share of
the time in which no kernel runs, and prompts begun per second. Every step waited for before the
next is prepared; overlapped (`engine/overlap.py`), with a common step behind each prompt or behind
two.

    python bench/gpu/idle.py --out bench/results/gpu_idle-h200.json
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from torch.profiler import ProfilerActivity, profile

from common.gpu_world import STACK
from common.results import finish, result_header, versions
from gpu.shared_world import CHUNK_TOKENS, SharedWorld
from kvweave.engine.engine import Engine
from kvweave.engine.request import Ticket
from kvweave.model.shapes import SHAPES

RATIO, ANSWER = 0.15, 16
MODES: dict[str, dict[str, Any]] = {
    "waited for": {"overlap_steps": False},
    "overlapped, 1 prompt per step": {"overlap_steps": True, "prompts_per_step": 1},
    "overlapped, 2 prompts per step": {"overlap_steps": True, "prompts_per_step": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--k", type=int, default=32, help="chunks in every prompt")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--codec", default="int8", help="of chunk KV in host memory")
    parser.add_argument("--pages", choices=("raw", "int8"), default="raw", help="of shared chunks")
    parser.add_argument("--pool-gib", type=float, default=60.0)
    parser.add_argument("--prompts", type=int, default=60, help="the middle third is watched")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    world = SharedWorld(args)
    modes = [{"mode": name, **watch(world, setting)} for name, setting in MODES.items()]
    result = {
        **result_header("gpu_idle", args.device), "versions": versions(*STACK),
        "config": {**world.config(), "ratio": RATIO, "answer": ANSWER}, "modes": modes,
    }  # fmt: skip
    world.store.close()
    finish(__doc__, result, args.out)


def watch(world: SharedWorld, setting: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    if world.decoder.device.type == "cuda":
        torch.cuda.empty_cache()
    cfg = replace(world.engine_config(shares=True), **setting)
    with Engine(world.decoder, cfg) as engine:
        engine.run_alone(partial(engine.pin_preamble, world.preamble))
        for seed in (1, 2):  # brings chunks, compiles, records
            for ticket in crowd(world, engine, seed):
                ticket.wait()
        tickets = crowd(world, engine, 3)
        third = len(tickets) // 3
        wait_for(tickets, third)
        idle = None
        if world.decoder.device.type == "cuda":
            watched(engine, partial(wait_for, tickets, third + 2))  # it begins with a stall
            idle = idle_share(watched(engine, partial(wait_for, tickets, 2 * third)))
        for ticket in tickets:
            ticket.wait()
        firsts = sorted(t.timeline.first_token_s or 0.0 for t in crowd_of(world, engine, 4))
    middle = firsts[third : 2 * third]
    gaps = [b - a for a, b in pairwise(middle)]
    found = {
        "idle": idle,
        "prompts_per_s": round(len(gaps) / (middle[-1] - middle[0]), 2),
        "between_prompts_ms": round(1e3 * statistics.median(gaps), 2),
    }
    print(setting, found, flush=True)
    return found


def crowd(world: SharedWorld, engine: Engine, seed: int) -> list[Ticket]:
    requests = [
        world.request(places, RATIO, answer=ANSWER)
        for places in world.stream(world.args.prompts, seed=seed)
    ]
    return [engine.submit(request) for request in requests]


def crowd_of(world: SharedWorld, engine: Engine, seed: int) -> list[Ticket]:
    """A crowd that was answered."""
    tickets = crowd(world, engine, seed)
    for ticket in tickets:
        ticket.wait()
    return tickets


def wait_for(tickets: Sequence[Ticket], count: int) -> None:
    """Until so many of them have begun to answer."""
    while sum(ticket.timeline.first_token_s is not None for ticket in tickets) < count:
        time.sleep(0.002)


def watched(engine: Engine, meanwhile: Callable[[], None]) -> profile:
    """What the device does meanwhile. Begins and ends between two steps: a profiler that ends while
    another thread gives orders may end the process."""
    seen = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    engine.run_alone(seen.start)
    meanwhile()
    engine.run_alone(seen.stop)
    return seen


def idle_share(seen: profile) -> float:
    """Of the time between the first kernel that was seen and the last."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    busy, end = 0.0, spans[0][0]
    for began, ended in spans:
        busy += max(0.0, ended - max(end, began))
        end = max(end, ended)
    return round(float(1 - busy / (end - spans[0][0])), 3)


if __name__ == "__main__":
    main()
