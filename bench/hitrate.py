"""Which eviction policy keeps the right documents in the knowledge tree?

Replays real question streams (MMLU, NQ-open over a Wikipedia knowledge base, real embedder) through
the tree at several host budgets and top-k, once per policy. Hit rate is RAGCache's: documents found
behind their path ÷ documents retrieved, so of [D1, D3] a stored [D1, D2] gives one half. TTFT is
estimated from the machine's measured profile: prefill of what is missing plus the copy from host,
no queueing. The 32 settings are shuffled streams, which do not drift; MMLU subject after subject,
which does, stands beside them and counts for itself.

    python bench/hitrate.py --data ../shared/data --out bench/results/hitrate-cpu.json
"""

import argparse
import multiprocessing
import random
import statistics
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from common.counting_owner import CountingOwner
from common.results import commit, cpu_device, finish
from common.streams import Ask, question_stream, subject_stream
from kvweave.kv.tree import ChunkRef, Extended, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.profile import MachineProfile
from kvweave.types import ChunkId
from machine_profile import saved_profile

POLICIES = ("auto", "pgdsf", "gdsf", "lru", "lfu")
PLAIN = POLICIES[1:]
SETS = ("mmlu", "nq_open")
DRIFTING = "mmlu by subject"
PREAMBLE = ChunkRef(ChunkId("preamble"), 32)
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # SmolLM2-135M in float32
GIB = 1 << 30


class Replay(NamedTuple):
    hit_rate: float  # documents found ÷ documents retrieved
    token_hit_rate: float
    ttft_s: float  # mean, estimated


class Setting(NamedTuple):
    name: str  # of the stream
    top_k: int
    host_gib: float
    policy: str


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replay(
    asks: list[Ask], top_k: int, config: TreeConfig, profile: MachineProfile, rate: float
) -> Replay:
    """One stream with Poisson arrivals through one tree."""
    clock = Clock()
    arrivals = random.Random(0)
    pages = Pages(PREAMBLE.num_tokens * TOKEN_BYTES, None)
    tree = KnowledgeTree(config, CountingOwner(), profile.prefill.at, PREAMBLE, pages, clock)
    host = profile.link("host")
    assert host is not None
    hits = tokens_hit = documents = tokens = 0
    ttfts: list[float] = []
    for ask in asks:
        clock.now_s += arrivals.expovariate(rate)
        chunks = ask.chunks[:top_k]
        with tree.acquire(chunks, ask.question_tokens) as lease:
            found = len(lease.nodes) - 1
            hits += found
            documents += len(chunks)
            tokens_hit += lease.num_tokens - PREAMBLE.num_tokens
            tokens += sum(chunk.num_tokens for chunk in chunks)
            brought = tree.load(lease)
            assert len(lease.nodes) - 1 == found, "the device holds one request"
            new = sum(chunk.num_tokens for chunk in chunks[found:]) + ask.question_tokens
            ttfts.append(profile.prefill.at(lease.num_tokens, new) + host.seconds(brought))
            for chunk in chunks[found:]:
                pages = Pages(chunk.num_tokens * TOKEN_BYTES, None)
                if tree.extend(lease, chunk, pages) is not Extended.ADOPTED:
                    break
    tree.check_integrity()
    return Replay(hits / documents, tokens_hit / tokens, statistics.fmean(ttfts))


class Bench:
    """All settings, a few at once. What a worker process needs is there before it is forked."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._profile = saved_profile()
        by_words = args.by_words
        self.streams = {name: question_stream(args.data, name, by_words=by_words) for name in SETS}
        self.streams[DRIFTING] = subject_stream(args.data, by_words=by_words)

    def run(self, setting: Setting) -> Replay:
        config = TreeConfig(
            int(self._args.device_gib * GIB),
            int(setting.host_gib * GIB),
            setting.policy,
            remembered_paths=self._args.remembered_paths,
        )
        asks = self.streams[setting.name]
        return replay(asks, setting.top_k, config, self._profile, self._args.rate)

    def rows(self) -> list[dict[str, object]]:
        args = self._args
        settings = [
            Setting(name, top_k, host_gib, policy)
            for name in self.streams
            for top_k in args.top_k
            for host_gib in args.host_gib
            for policy in POLICIES
        ]
        with multiprocessing.get_context("fork").Pool(args.jobs) as workers:
            outs = workers.map(self.run, settings, chunksize=1)
        rows: dict[tuple[str, int, float], dict[str, object]] = {}
        for (name, top_k, host_gib, policy), out in zip(settings, outs, strict=True):
            start = {"set": name, "top_k": top_k, "host_gib": host_gib}
            rows.setdefault((name, top_k, host_gib), start)[policy] = {
                "hit_rate": round(out.hit_rate, 4),
                "token_hit_rate": round(out.token_hit_rate, 4),
                "ttft_s": round(out.ttft_s, 4),
            }
        return list(rows.values())


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    """Of some settings: mean hit rates, and PGDSF and the default beside the others."""
    means = {p: statistics.fmean(row[p]["hit_rate"] for row in rows) for p in POLICIES}
    auto = [row["auto"]["hit_rate"] / max(row[p]["hit_rate"] for p in PLAIN) for row in rows]
    others = PLAIN[1:]
    over = {p: [r["pgdsf"]["hit_rate"] / r[p]["hit_rate"] for r in rows] for p in others}
    faster = {p: [r[p]["ttft_s"] / r["pgdsf"]["ttft_s"] for r in rows] for p in others}
    return {
        "settings": len(rows),
        "mean_hit_rate": {p: round(mean, 4) for p, mean in means.items()},
        "auto_over_best": round(means["auto"] / max(means[p] for p in PLAIN), 4),
        "auto_over_best_of_each": spread(auto),
        "pgdsf_over_best": round(means["pgdsf"] / max(means[p] for p in others), 4),
        "pgdsf_over": {p: spread(values) for p, values in over.items()},
        "ttft_over_pgdsf": {p: spread(values) for p, values in faster.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--host-gib", type=float, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--device-gib", type=float, default=0.25)
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--rate", type=float, default=0.8, help="requests per second")
    parser.add_argument("--by-words", action="store_true", help="retrieve by BM25")
    parser.add_argument("--jobs", type=int, default=2, help="replays at once")
    parser.add_argument(
        "--remembered-paths",
        type=int,
        default=1 << 16,
        help="paths whose counts outlive eviction; a few dozen: counts die with their node",
    )
    args = parser.parse_args()
    bench = Bench(args)
    rows = bench.rows()
    shuffled = [row for row in rows if row["set"] in SETS]
    show(rows)
    finish(
        __doc__,
        {
            "bench": "hitrate",
            "commit": commit(),
            "device": cpu_device(),
            "config": {
                "host_gib": args.host_gib,
                "device_gib": args.device_gib,
                "top_k": args.top_k,
                "rate": args.rate,
                "token_bytes": TOKEN_BYTES,
                "remembered_paths": args.remembered_paths,
                "retrieved_by": "BM25" if args.by_words else "minilm",
                "requests": {name: len(asks) for name, asks in bench.streams.items()},
            },
            **summary(shuffled),
            "all_settings": summary(rows),
            "by_set": {
                name: summary([row for row in rows if row["set"] == name]) for name in bench.streams
            },
            "published_pgdsf_over": {"gdsf": "1.02-1.32", "lru": "1.06-1.62", "lfu": "1.06-1.75"},
            "rows": rows,
        },
        args.out,
    )


def spread(values: list[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="document hit rate, and estimated TTFT in seconds")
    for column in ("set", "top-k", "host GiB", *POLICIES, "auto ÷ best"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[p]['hit_rate']:.3f} {row[p]['ttft_s']:.2f}s" for p in POLICIES]
        ratio = row["auto"]["hit_rate"] / max(row[p]["hit_rate"] for p in PLAIN)
        table.add_row(
            str(row["set"]),
            str(row["top_k"]),
            f"{row['host_gib']:g}",
            *cells,
            f"{ratio:.3f}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
