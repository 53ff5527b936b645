"""How much sooner would first tokens come than without a cache, by how many passages are retrieved?

Real questions (MMLU, NQ-open) through the knowledge tree with 1, 3 and 5 passages each (RAGCache's
figure 18). Hit rate is of documents found behind their path; the first token is priced by the
machine's measured profile, the copy from host memory included: nothing is computed and no request
waits. Without a cache the same prompts are priced from their first token on. At a rate of arrivals
the gain would be larger, because queues grow with the work; that is not simulated.

    python bench/top_k.py --data ../shared/data --out bench/results/top_k-cpu.json
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.results import commit, cpu_device, finish
from common.streams import Ask, question_stream
from hitrate import GIB, PREAMBLE, TOKEN_BYTES, replay
from kvweave.kv.tree import TreeConfig
from kvweave.plan.profile import MachineProfile
from machine_profile import saved_profile

SETS = ("mmlu", "nq_open")


def uncached_s(asks: Sequence[Ask], top_k: int, profile: MachineProfile) -> float:
    """Mean price of prefilling whole prompts."""
    tokens = [
        PREAMBLE.num_tokens + sum(c.num_tokens for c in ask.chunks[:top_k]) + ask.question_tokens
        for ask in asks
    ]
    return statistics.fmean(profile.prefill.at(0, num) for num in tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--by-words", action="store_true", help="retrieve by BM25")
    parser.add_argument("--requests", type=int, default=5000, help="the first of each stream")
    parser.add_argument("--host-gib", type=float, nargs="+", default=[4, 16])
    parser.add_argument("--device-gib", type=float, default=0.25)
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--rate", type=float, default=0.8, help="requests per second")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    profile = saved_profile()
    rows = []
    for name in SETS:
        asks = question_stream(args.data, name, by_words=args.by_words)[: args.requests]
        for top_k in args.top_k:
            full_s = uncached_s(asks, top_k, profile)
            for gib in args.host_gib:
                config = TreeConfig(int(args.device_gib * GIB), int(gib * GIB))
                seen = replay(asks, top_k, config, profile, args.rate)
                rows.append(
                    {
                        "set": name,
                        "top_k": top_k,
                        "host_gib": gib,
                        "requests": len(asks),
                        "hit_rate": round(seen.hit_rate, 4),
                        "ttft_s": round(seen.ttft_s, 4),
                        "uncached_s": round(full_s, 4),
                        "over_no_cache": round(full_s / seen.ttft_s, 4),
                    }
                )
                print(rows[-1], flush=True)
    table = Table(title="priced first token without a cache over with one")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=120).print(table)
    finish(
        __doc__,
        {
            "bench": "top_k",
            "commit": commit(),
            "device": cpu_device(),
            "config": {
                "device_gib": args.device_gib,
                "token_bytes": TOKEN_BYTES,
                "rate": args.rate,
                "retrieved_by": "BM25" if args.by_words else "minilm",
            },
            "published": {"over_vllm": "1.7-3.1"},
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
