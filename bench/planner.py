"""How long does one decision take, with a full tree and many chunks?

A knowledge tree of 10,000 nodes, 20 chunks per request, free order, six strategies, chunk KV spread
over three tiers. Every plan is timed alone, on the wall and on the thread's own clock (what other
work on the machine takes is not in it); the tree holds real path shapes (Zipf, shared
prefixes), so that the walk for a better order has something to find. Nothing here needs torch.

    python bench/planner.py --out bench/results/planner-cpu.json
"""

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from common.counting_owner import CountingOwner
from common.results import commit, cpu_device, finish
from kvweave.kv.tree import ChunkRef, Extended, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.plan import PlanRequest, PromptShape, Stored, Verdict
from kvweave.plan.planner import Planner
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.types import ChunkId

TOKEN_BYTES = 46_080
STRATEGIES = (
    StrategyInfo("full-reuse"),
    StrategyInfo("epic"),
    StrategyInfo("cacheblend", selection_bytes_per_token=768.0, full_width_layers=1.3),
    StrategyInfo("fusionrag", selection_bytes_per_token=768.0, score_s_per_token=1e-7),
    StrategyInfo("qcfuse", selection_bytes_per_token=5000.0, probe_layers=18),
    StrategyInfo("prophet", probe_layers=30, waits_for_all=True),
)


class OpenGate:
    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(0.15)


class Store:
    """Chunk KV of every second chunk, spread over host, disk and a slow remote."""

    def __init__(self, sizes: dict[ChunkId, int]) -> None:
        tiers = ("host", "disk", "redis")
        self._stored = {
            chunk: (Stored("isolated", tiers[i % 3], size * TOKEN_BYTES, True),)
            for i, (chunk, size) in enumerate(sizes.items())
            if i % 2
        }

    def __call__(self, chunk_ids: Sequence[ChunkId]) -> Mapping[ChunkId, Sequence[Stored]]:
        return {c: self._stored[c] for c in chunk_ids if c in self._stored}


def make_profile() -> MachineProfile:
    xs, ys = (0, 256, 512, 1024, 2048, 4096), (32, 128, 512, 1024, 4096)
    grid = Grid(xs, ys, [[0.02 + y / 450 + 1e-7 * x * y for y in ys] for x in xs])
    rows = Grid(ys, ys, [[0.02 + y / 430 + 1e-7 * x * y for y in ys] for x in ys])
    links = {"host": TierLink(8e9), "disk": TierLink(1e9, 1e-4), "redis": TierLink(2e7, 1e-3)}
    return MachineProfile("bench", "made up", 30, grid, rows, links)


def grow(tree: KnowledgeTree, draw: "Draw", num_nodes: int) -> int:
    """Requests until the tree has so many nodes; returns how many that took."""
    asked = 0
    while len(tree) < num_nodes:
        asked += 1
        with tree.acquire(chunks := draw.request(), 20) as lease:
            tree.load(lease)
            for chunk in chunks[len(lease.nodes) - 1 :]:
                pages = Pages(chunk.num_tokens * TOKEN_BYTES, None)
                if tree.extend(lease, chunk, pages) is not Extended.ADOPTED:
                    break
    return asked


class Draw:
    """Requests by Zipf's law over a pool of chunks."""

    def __init__(self, num_chunks: int, top_k: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        sizes = self._rng.integers(60, 257, num_chunks)
        self._chunks = [ChunkRef(ChunkId(f"{i:016x}"), int(n)) for i, n in enumerate(sizes)]
        weights = np.arange(1, num_chunks + 1, dtype=np.float64) ** -1.0
        self._weights = weights / weights.sum()
        self._top_k = top_k

    def sizes(self) -> dict[ChunkId, int]:
        return {chunk.id: chunk.num_tokens for chunk in self._chunks}

    def request(self) -> tuple[ChunkRef, ...]:
        places = self._rng.choice(len(self._chunks), self._top_k, replace=False, p=self._weights)
        return tuple(self._chunks[place] for place in places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=2_000)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw = Draw(args.chunks, args.top_k, seed=0)
    preamble = ChunkRef(ChunkId("preamble"), 32)
    config, pages = TreeConfig(1 << 50, 0), Pages(32 * TOKEN_BYTES, None)
    tree = KnowledgeTree(config, CountingOwner(), lambda x, y: 0.02 + y / 450, preamble, pages)
    grow(tree, draw, args.nodes)
    planner = Planner(tree, CostModel(make_profile()), Store(draw.sizes()), OpenGate())
    requests = [
        PlanRequest(draw.request(), 20, OrderPermission.FREE, strategies=STRATEGIES)
        for _ in range(args.requests)
    ]
    for request in requests[:200]:  # warm up, and fill the access table
        planner.record_answer(request, planner.plan(request))
    gc.collect()
    gc.freeze()  # as a server does once it is up: the tree is not garbage
    times_ms, cpu_ms, by, chosen = [], [], {}, {}
    for request in requests:
        start, cpu_start = time.perf_counter_ns(), time.thread_time_ns()
        plan = planner.plan(request)
        cpu_ms.append((time.thread_time_ns() - cpu_start) / 1e6)
        times_ms.append((time.perf_counter_ns() - start) / 1e6)
        planner.record_answer(request, plan)
        by[plan.ordered_by] = by.get(plan.ordered_by, 0) + 1
        chosen[plan.chosen.name] = chosen.get(plan.chosen.name, 0) + 1
    p50, p90, p99, worst = np.percentile(times_ms, [50, 90, 99, 100]).round(4).tolist()
    cpu = np.percentile(cpu_ms, [50, 90, 99, 100]).round(4).tolist()
    table = Table(title=f"one plan: {len(tree):,} nodes, top-{args.top_k}, free order")
    for column in ("", "p50 ms", "p90 ms", "p99 ms", "max ms"):
        table.add_column(column, justify="right")
    table.add_row("wall", *(f"{t:.3f}" for t in (p50, p90, p99, worst)))
    table.add_row("thread", *(f"{t:.3f}" for t in cpu))
    Console().print(table)
    print("ordered by", by, "· chosen", chosen)
    finish(
        __doc__,
        {
            "bench": "planner",
            "commit": commit(),
            "device": cpu_device(),
            "config": {
                "nodes": len(tree),
                "top_k": args.top_k,
                "chunks": args.chunks,
                "requests": args.requests,
                "strategies": len(STRATEGIES),
                "order": "free",
            },
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "max_ms": worst,
            "thread_p50_ms": cpu[0],
            "thread_p99_ms": cpu[2],
            "ordered_by": by,
            "chosen": chosen,
            "torch_imported": "torch" in sys.modules,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
