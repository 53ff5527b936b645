"""What does finding a chunk in any context save over a prefix-chained cache?

The simulation FusionRAG describes: 1,000 queries whose chunks are 60 % from the knowledge base
(precomputed), 30 % newly uploaded but shared between users, 10 % seen once. Its text leaves chunks
per query, pool sizes and skew open; ours are printed. Three caches see the same queries, unbounded:

    prefix chain   a chunk is found behind its whole path only; every new path is stored
    listing        FusionRAG's lookup by shorter paths; a new chunk is stored under its full path
    content        ours: the exact tree is asked first, one copy per unique chunk by content
    content at 2   the same, kept when it was asked for twice, so that what is seen once takes no
                   room; documents that come with requests are kept so, those of a knowledge base
                   at first sight

All three start warm: the knowledge base's chunks are precomputed, right behind the preamble, and
`--warm` queries of the same kind went before the counted ones. Ours keeps a real knowledge tree of
`--tree-nodes` chunks besides, fed by the promotion rule (a chunk enters when it was asked for
twice), and its nodes count as storage.

    python bench/altpath.py --out bench/results/altpath-cpu.json
"""

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from common.admission import num_worth_keeping
from common.counting_owner import CountingOwner
from common.results import commit, cpu_device, finish
from kvweave.kv.tree import ChunkRef, Extended, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.ordering import PROMOTION, AccessTable
from kvweave.plan.other_paths import AlternativePaths
from kvweave.types import ChunkId

KNOWN, SHARED = 0.6, 0.3  # the rest is unique
CHUNK_TOKENS = 256
PUBLISHED = {"storage_saved": 0.71, "recomputations_avoided": 0.823, "hit_rate": 0.779}


class Outcome(NamedTuple):
    copies: int  # chunk KVs stored in the end, the precomputed ones included
    repeats: int  # computations of a chunk that had been computed before
    hits: int
    exact_hits: int = 0  # of these, behind their whole path


def make_queries(args: argparse.Namespace) -> list[list[ChunkId]]:
    """Distinct chunks per query; within each pool by Zipf's law."""
    rng = np.random.default_rng(args.seed)
    pools = {"known": args.known, "shared": args.shared}
    weights = {}
    for name, size in pools.items():
        by_rank = np.arange(1, size + 1, dtype=np.float64) ** -args.zipf
        weights[name] = by_rank / by_rank.sum()
    queries, unique = [], 0
    for _ in range(args.warm + args.queries):
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


def by_path(
    queries: list[list[ChunkId]], known: list[ChunkId], args: argparse.Namespace, *, shorter: bool
) -> Outcome:
    """What is computed is stored under its full path; precomputed chunks stand right behind the
    preamble. A plain prefix cache finds a chunk behind its whole path alone; the published lookup,
    taken literally, under `shorter` ones too."""
    stored = {(chunk,) for chunk in known}
    computed = set(known)
    repeats = hits = 0
    for number, query in enumerate(queries):
        counts = number >= args.warm
        for place, chunk in enumerate(query):
            starts = range(place + 1 if shorter else 1)
            if any(tuple(query[start : place + 1]) in stored for start in starts):
                hits += counts
                continue
            repeats += counts and chunk in computed
            computed.add(chunk)
            stored.add(tuple(query[: place + 1]))
    return Outcome(len(stored), repeats, hits, 0 if shorter else hits)


def content(
    queries: list[list[ChunkId]],
    known: list[ChunkId],
    args: argparse.Namespace,
    threshold: int = 1,
) -> Outcome:
    """Ours, through the real classes: tree, promotion, lookup. A copy is kept when a chunk was
    computed for the `threshold`th time."""
    preamble = ChunkRef(ChunkId("preamble"), CHUNK_TOKENS)
    config = TreeConfig(1 + args.tree_nodes, 0)  # a byte per chunk, and one for the preamble
    pages = Pages(1, None)
    tree = KnowledgeTree(config, CountingOwner(), lambda x, y: float(y), preamble, pages)
    copies, computed, table = set(known), Counter(known), AccessTable()
    paths = AlternativePaths(tree, copies.__contains__)
    repeats = hits = exact_hits = 0
    for number, query in enumerate(queries):
        counts = number >= args.warm
        for place, found in enumerate(paths.find(query)):
            chunk = query[place]
            if found is None or (not found.exact and chunk not in copies):
                repeats += counts and chunk in computed
                computed[chunk] += 1
                if found is not None or computed[chunk] >= threshold:
                    copies.add(chunk)  # the tree has it elsewhere: it is known to come back
                continue
            hits += counts
            exact_hits += counts and found.exact
        grow(tree, [ChunkRef(chunk, CHUNK_TOKENS) for chunk in query], table)
    return Outcome(len(copies) + len(tree), repeats, hits, exact_hits)


def grow(tree: KnowledgeTree, order: list[ChunkRef], table: AccessTable) -> None:
    """A query was answered exactly: its path enters the tree as far as promotion goes."""
    table.push([chunk.id for chunk in order])
    with tree.acquire(order, 20) as lease:
        matched = len(lease.nodes) - 1
        for chunk in order[matched : num_worth_keeping(order, matched, table)]:
            if tree.extend(lease, chunk, Pages(1, None)) is not Extended.ADOPTED:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--known", type=int, default=1000)
    parser.add_argument("--shared", type=int, default=300)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--warm", type=int, default=200, help="queries before the counted ones")
    parser.add_argument("--tree-nodes", type=int, default=200, help="room of our exact tree")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    queries, known = make_queries(args), known_chunks(args)
    caches = {
        "prefix chain": partial(by_path, shorter=False),
        "listing": partial(by_path, shorter=True),
        "content": content,
        "content at 2": partial(content, threshold=PROMOTION),
    }
    outcomes = {name: cache(queries, known, args) for name, cache in caches.items()}
    base = outcomes["prefix chain"]
    total = sum(map(len, queries[args.warm :]))
    rows = {
        name: {
            "copies": o.copies,
            "repeated_computations": o.repeats,
            "storage_saved": round(1 - o.copies / base.copies, 4),
            "recomputations_avoided": round(1 - o.repeats / base.repeats, 4),
            "hit_rate": round(o.hits / total, 4),
            "exact_hit_rate": round(o.exact_hits / total, 4),
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
    config |= {"shares": {"known": KNOWN, "shared": SHARED, "unique": round(1 - KNOWN - SHARED, 2)}}
    print("parameters:", ", ".join(f"{name} {value}" for name, value in config.items()))
    finish(
        __doc__,
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
