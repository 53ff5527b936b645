"""What does finding a chunk in any context save over a prefix-chained cache?

The simulation FusionRAG describes: queries whose chunks are 60 % from the knowledge base
(precomputed), 30 % newly uploaded but shared between users, 10 % seen once. Its text leaves chunks
per query, pool sizes and skew open; ours are printed. Three caches see the same queries, unbounded:

    prefix chain   a chunk is found behind its whole path only; every new path is stored
    listing        FusionRAG's lookup by shorter paths; a new chunk is stored under its full path
    content        ours: the exact tree is asked first, one copy per unique chunk by content

    python bench/altpath.py --out bench/results/altpath-cpu.json
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from common import commit, cpu_device, finish
from kvweave.kv.tree import ChunkRef, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.altpath import AlternativePaths
from kvweave.types import ChunkId

KNOWN, SHARED = 0.6, 0.3  # the rest is unique
CHUNK_TOKENS = 256
PUBLISHED = {"storage_saved": 0.71, "recomputations_avoided": 0.823, "hit_rate": 0.779}


class Outcome(NamedTuple):
    copies: int  # chunk KVs stored in the end, the precomputed ones included
    repeats: int  # computations of a chunk that had been computed before
    hits: int


def make_queries(args: argparse.Namespace) -> list[list[ChunkId]]:
    """Distinct chunks per query; within each pool by Zipf's law."""
    rng = np.random.default_rng(args.seed)
    pools = {"known": args.known, "shared": args.shared}
    weights = {}
    for name, size in pools.items():
        by_rank = np.arange(1, size + 1, dtype=np.float64) ** -args.zipf
        weights[name] = by_rank / by_rank.sum()
    queries, unique = [], 0
    for _ in range(args.queries):
        chunks: list[ChunkId] = []
        while len(chunks) < args.k:
            draw = rng.random()
            if draw >= KNOWN + SHARED:
                chunk = ChunkId(f"unique-{unique}")
                unique += 1
            else:
                pool = "known" if draw < KNOWN else "shared"
                chunk = ChunkId(f"{pool}-{rng.choice(pools[pool], p=weights[pool])}")
            if chunk not in chunks:
                chunks.append(chunk)
        queries.append(chunks)
    return queries


def known_chunks(args: argparse.Namespace) -> list[ChunkId]:
    return [ChunkId(f"known-{i}") for i in range(args.known)]


def prefix_chain(queries: list[list[ChunkId]], known: list[ChunkId]) -> Outcome:
    """A plain prefix cache. Precomputed chunks stand right behind the preamble."""
    stored = {(chunk,) for chunk in known}
    computed = set(known)
    repeats = hits = 0
    for query in queries:
        for place, chunk in enumerate(query):
            path = tuple(query[: place + 1])
            if path in stored:
                hits += 1
                continue
            repeats += chunk in computed
            computed.add(chunk)
            stored.add(path)
    return Outcome(len(stored), repeats, hits)


def listing(queries: list[list[ChunkId]], known: list[ChunkId]) -> Outcome:
    """The published lookup taken literally: what is computed is stored under its full path."""
    stored = {(chunk,) for chunk in known}
    computed = set(known)
    repeats = hits = 0
    for query in queries:
        for place, chunk in enumerate(query):
            if any(tuple(query[start : place + 1]) in stored for start in range(place + 1)):
                hits += 1
                continue
            repeats += chunk in computed
            computed.add(chunk)
            stored.add(tuple(query[: place + 1]))
    return Outcome(len(stored), repeats, hits)


class NoBytes:
    """An empty exact tree asks for no pages: every hit here is by content."""

    def copy_out(self, pages: Pages) -> Pages | None:
        return pages

    copy_in = copy_out

    def free(self, tier: object, pages: Pages) -> None:
        pass


def content(queries: list[list[ChunkId]], known: list[ChunkId]) -> Outcome:
    """Ours, through the real class."""
    preamble = ChunkRef(ChunkId("preamble"), CHUNK_TOKENS)
    tree = KnowledgeTree(TreeConfig(1 << 20, 0), NoBytes(), lambda x, y: float(y), preamble)
    tree.install_preamble(Pages(1, None))
    paths = AlternativePaths(tree)
    computed = set(known)
    for chunk in known:
        paths.stored(chunk)
    repeats = hits = 0
    for query in queries:
        for place, found in enumerate(paths.find(query)):
            if found is not None:
                hits += 1
                continue
            repeats += query[place] in computed
            computed.add(query[place])
            paths.stored(query[place], query[:place])
    return Outcome(len(paths), repeats, hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--known", type=int, default=1000)
    parser.add_argument("--shared", type=int, default=300)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    queries, known = make_queries(args), known_chunks(args)
    caches = {"prefix chain": prefix_chain, "listing": listing, "content": content}
    outcomes = {name: cache(queries, known) for name, cache in caches.items()}
    base = outcomes["prefix chain"]
    total = sum(map(len, queries))
    rows = {
        name: {
            "copies": o.copies,
            "repeated_computations": o.repeats,
            "storage_saved": round(1 - o.copies / base.copies, 4),
            "recomputations_avoided": round(1 - o.repeats / base.repeats, 4),
            "hit_rate": round(o.hits / total, 4),
        }
        for name, o in outcomes.items()
    }
    table = Table(title=f"{args.queries} queries of {args.k} chunks")
    for column in ("", "copies", "repeats", "storage saved", "recomputations avoided", "hit rate"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in [*rows.items(), ("published", PUBLISHED)]:
        table.add_row(
            name,
            str(row.get("copies", "–")),
            str(row.get("repeated_computations", "–")),
            *(f"{row[key]:.1%}" for key in PUBLISHED),
        )
    Console().print(table)
    config = {k: v for k, v in vars(args).items() if k != "out"}
    finish(
        {
            "bench": "altpath",
            "commit": commit(),
            "device": cpu_device(),
            "config": config,
            **{key: rows["content"][key] for key in PUBLISHED},
            "published": PUBLISHED,
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
