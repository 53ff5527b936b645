"""What does finding a chunk in any context save over a prefix-chained cache?

The simulation FusionRAG describes: 1,000 queries whose chunks are 60 % from the knowledge base
(precomputed), 30 % newly uploaded but shared between users, 10 % seen once. Its text leaves chunks
per query, pool sizes and skew open; ours are printed. The caches see the same queries, unbounded:

    prefix chain   a chunk is found behind its whole path only; every new path is stored
    listing        FusionRAG's lookup by shorter paths; a new chunk is stored under its full path
    product        what `kvweave serve` stores by default: chunk KV behind a filler, of the
                   knowledge base from the start, of what requests bring from the second on; an
                   isolated second copy of a chunk that stood first, and, in idle time, of chunks
                   that questions found, a bounded share of them
    never idle     the same without the copies of idle time

All start warm: the knowledge base's chunks are precomputed, and `--warm` queries of the same kind
went before the counted ones. The product's rules are its own classes (promotion, front copies, the
lookup by paths, a knowledge tree of `--tree-nodes` chunks, which count as storage); what they would
compute and store is counted here and not computed. A chunk that stands first is found there with
its isolated copy alone, elsewhere with the one behind the filler, as the product takes them. A
repeated computation is one of a chunk that was computed before, be it with a prompt or beside
prompts for a copy: the chunk that comes back is computed once more to be stored.

    python bench/altpath.py --out bench/results/altpath-cpu.json
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from common.counting_owner import CountingOwner
from common.results import commit, cpu_device, finish
from kvweave.app.library.corpus_kv import FRONT_SHARE
from kvweave.app.library.front_kv import FrontKV
from kvweave.app.library.kv_behind import ChunkPromotion
from kvweave.app.library.kv_maker import KVMaker, WantedKV
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.kv.lookup import Peek, Residency
from kvweave.kv.tree import ChunkRef, Extended, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.ordering import PROMOTION, AccessTable, num_worth_keeping
from kvweave.plan.other_paths import AlternativePaths
from kvweave.types import Chunk, ChunkId

KNOWN, SHARED = 0.6, 0.3  # the rest is unique
CHUNK_TOKENS = 256
MIN_USES = 2  # requests that bring a chunk before it enters the tree, as CRAFT has it
PUBLISHED = {"storage_saved": 0.71, "recomputations_avoided": 0.823, "hit_rate": 0.779}


Key = tuple[str, ChunkId]  # behind what, and which chunk


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


class CountingStore:
    """What is stored, by name: as much of a store and its encoder as the product's rules ask."""

    preamble_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.copies: set[Key] = set()
        self.context = SimpleNamespace(context_id=lambda: b"")
        self.preparation = SimpleNamespace(variant=SimpleNamespace(kind="filler"))
        self.texts = SimpleNamespace(filler=())

    @property
    def store(self) -> "CountingStore":
        return self

    def key(self, token_ids: Sequence[int]) -> Key:
        return "filler", make_chunk_id(token_ids)

    def exact_key(self, token_ids: Sequence[int]) -> Key:
        return "isolated", make_chunk_id(token_ids)

    def peek(self, keys: Sequence[Key]) -> list[Peek]:
        return [self._peek(key in self.copies) for key in keys]

    @staticmethod
    def _peek(is_there: bool) -> Peek:
        return Peek(Residency.HERE, "disk", 1) if is_there else Peek(Residency.ABSENT, None, None)

    def plain_bytes(self, num_tokens: int) -> int:
        return 1


class Product:
    """What the product stores by default, through its real rules; they hear of the KV they want
    here and find it stored."""

    def __init__(self, known: Sequence[ChunkId], tree_nodes: int, *, is_idle: bool) -> None:
        self._chunks: dict[ChunkId, Chunk] = {}  # by id
        self._known = {self.chunk(name).id for name in known}
        self._is_idle = is_idle
        self._encoder = CountingStore()
        self._encoder.copies |= {("filler", each) for each in self._known}
        self.computed = set(self._known)
        self.repeats = 0
        encoder = cast(ChunkEncoder, self._encoder)
        maker = cast(KVMaker, SimpleNamespace(want=self._want))
        self._promotion = ChunkPromotion(1 << 20, PROMOTION, maker)
        catalogue = SimpleNamespace(chunks=lambda ids: {each: self._chunks[each] for each in ids})
        kb = cast(KnowledgeBase, SimpleNamespace(catalogue=catalogue))
        self._fronts = FrontKV(kb, encoder, self._front_room)
        self._fronts.add([self._chunks[each] for each in self._known])
        self._found = Counter[ChunkId]()
        preamble = ChunkRef(ChunkId("preamble"), CHUNK_TOKENS)
        config = TreeConfig(1 + tree_nodes, 0)  # a byte per chunk, and one for the preamble
        pages = Pages(1, None)
        self.tree = KnowledgeTree(config, CountingOwner(), lambda x, y: float(y), preamble, pages)
        self._paths = AlternativePaths(self.tree, self._has_copy)
        self._table = AccessTable()

    @property
    def num_stored(self) -> int:
        """Copies by content."""
        return len(self._encoder.copies)

    def chunk(self, name: ChunkId) -> Chunk:
        """The chunk of a name: a token of its own."""
        ids = (*name.encode(),)
        made = Chunk(make_chunk_id(ids), "", "", ids)
        return self._chunks.setdefault(made.id, made)

    def ask(self, names: Sequence[ChunkId]) -> tuple[int, int]:
        """Answer a query: chunks that were found, and those of them that are exact by the tree."""
        chunks = [self.chunk(name) for name in names]
        ids = [chunk.id for chunk in chunks]
        found = self._paths.find(ids)
        exact = [each is not None and each.exact and each.node is not None for each in found]
        stored = [
            self._key(place, each) in self._encoder.copies for place, each in enumerate(chunks)
        ]
        at_once = self._paths.only_elsewhere(ids)
        hits = [is_exact or is_stored for is_exact, is_stored in zip(exact, stored, strict=True)]
        for chunk, is_hit in zip(chunks, hits, strict=True):
            if not is_hit:
                self._compute(chunk.id)
        grow(self.tree, [ChunkRef(each, CHUNK_TOKENS) for each in ids], self._table)
        self._found.update(each for each in ids if each in self._known)
        encoder = cast(ChunkEncoder, self._encoder)
        tokens = [chunk.token_ids for chunk in chunks]
        self._promotion.saw(encoder, tokens, at_once, has_front=True)
        if self._is_idle:
            self._make_ahead()
        return sum(hits), sum(exact)

    def _key(self, place: int, chunk: Chunk) -> Key:
        """As `named_kv` takes it."""
        name = self._encoder.exact_key if place == 0 else self._encoder.key
        return name(chunk.token_ids)

    def _want(self, wanted: WantedKV) -> None:
        """As `KVMaker` makes it: the first chunk of a prompt is taken from there."""
        chunk, is_known = wanted.chunk, wanted.chunk.id in self._known
        name = self._encoder.exact_key if wanted.in_front else self._encoder.key
        if name(chunk.token_ids) in self._encoder.copies or (wanted.is_only_taken and not is_known):
            return
        if not wanted.in_front:
            self._compute(chunk.id)
        self._encoder.copies.add(name(chunk.token_ids))
        if wanted.in_front and is_known:
            self._fronts.add([chunk])

    def _make_ahead(self) -> None:
        rank = [each for each, _ in self._found.most_common()]
        while (chunk := self._fronts.next(rank)) is not None:
            self._compute(chunk.id)
            self._encoder.copies.add(self._encoder.exact_key(chunk.token_ids))
            self._fronts.done(chunk)

    def _compute(self, chunk_id: ChunkId) -> None:
        self.repeats += chunk_id in self.computed
        self.computed.add(chunk_id)

    def _has_copy(self, chunk_id: ChunkId) -> bool:
        return ("filler", chunk_id) in self._encoder.copies

    def _front_room(self) -> int:
        """As `CorpusKV` has it, where the disk is large."""
        return int(FRONT_SHARE * len(self._known)) - self._fronts.num_bytes()


def product(
    queries: list[list[ChunkId]],
    known: list[ChunkId],
    args: argparse.Namespace,
    *,
    is_idle: bool = True,
) -> Outcome:
    """What the product stores and computes again."""
    stored = Product(known, args.tree_nodes, is_idle=is_idle)
    hits = exact_hits = repeats_warm = 0
    for number, query in enumerate(queries):
        if number == args.warm:
            repeats_warm = stored.repeats
        found, exact = stored.ask(query)
        if number >= args.warm:
            hits, exact_hits = hits + found, exact_hits + exact
    return Outcome(
        stored.num_stored + len(stored.tree), stored.repeats - repeats_warm, hits, exact_hits
    )


def grow(tree: KnowledgeTree, order: list[ChunkRef], table: AccessTable) -> None:
    """A query was answered exactly: its path enters the tree as far as promotion goes."""
    with tree.acquire(order, 20) as lease:
        matched = len(lease.nodes) - 1
        for chunk in order[matched : num_worth_keeping(order, matched, table, MIN_USES)]:
            if tree.extend(lease, chunk, Pages(1, None)) is not Extended.ADOPTED:
                break
    table.push([chunk.id for chunk in order])


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
        "product": product,
        "never idle": partial(product, is_idle=False),
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
            **{key: rows["product"][key] for key in PUBLISHED},
            "published": PUBLISHED,
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
