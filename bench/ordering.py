"""How much chunk KV need not be computed when chunks may be put in a common order?

Real streams (MMLU and NQ-open over a Wikipedia knowledge base, MTRAG conversations) through the
exact knowledge tree. The figure is the share of retrieved chunk tokens that were found behind
their path, or that the conversation already held, so that they were not computed. Orderings:

    given         the order of retrieval
    frequency     CRAFT: by access count, ties by id; a chunk enters the tree once seen twice
    planner       ours, as users get it: the better of tree walk and frequency, never worse than
                  given; once the tree is full, what is not matched stands in frequency order
    foreseen      frequency by the counts of the whole stream, which no server can know
    contextpilot  the peer's `reorder`, one request at a time as they arrive, same tree behind it

No order finds more than the chunks that one earlier request has in common with this one (`most`): a
path of the tree belongs to one request. What is missing to it is told apart: the budget of the tree
evicts, the window forgets. Then CRAFT's two settings one at a time (`planner.window`,
`planner.tree_uses`), and what the access table and the tree's books take in memory.

MTRAG turns put their chunks behind the preamble; with dedup a turn sends only chunks that its
conversation does not hold, behind the history, so that only first turns can share paths.

    python bench/ordering.py --data ../shared/data --out bench/results/ordering-cpu.json

The peer: pip install --no-deps contextpilot (its reorder needs numpy, scipy and tqdm only). Version
0.5.0 fails once a node of its index has 1,000 children (it hands a local function to a process
pool), so it sees the first requests of each stream, beside all the others, and a longer stream goes
on without it.
"""

import argparse
import contextlib
import io
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.counting_owner import CountingOwner
from common.overlap import overlap
from common.results import commit, cpu_device, finish, versions
from common.streams import Ask, conversation_stream, question_stream
from hitrate import GIB, PREAMBLE, TOKEN_BYTES
from kvweave.engine.engine import FULL_SHARE
from kvweave.kv.tree import ChunkRef, Extended, KnowledgeTree, Pages, TreeConfig, TreeTier
from kvweave.plan.ordering import (
    WINDOW,
    AccessTable,
    OrderPermission,
    OrderRules,
    OrderWorth,
    choose_order,
    frequency_order,
    num_worth_keeping,
)
from kvweave.types import ChunkId

UNBOUNDED = 1024  # GiB
CRAFT_USES = 2
Chunks = tuple[ChunkRef, ...]


class Ordering:
    """One ordering in front of one tree."""

    def __init__(self, host_gib: float, *, uses: int = 1, window: int = WINDOW) -> None:
        """`uses`: requests that bring a chunk before it enters the tree; `window`: requests that
        count."""
        config = TreeConfig(int(0.25 * GIB), int(host_gib * GIB))
        pages = Pages(PREAMBLE.num_tokens * TOKEN_BYTES, None)
        self.tree = KnowledgeTree(
            config, CountingOwner(), lambda x, y: 0.02 + y / 450, PREAMBLE, pages
        )
        self.table = AccessTable(window)
        self._uses = uses

    def order(self, chunks: Chunks) -> Chunks:
        return chunks

    def run(self, chunks: Chunks) -> int:
        """One request; returns chunk tokens found."""
        order = self.order(chunks)
        assert sorted(order) == sorted(chunks), "an order is a permutation"
        with self.tree.acquire(order, 20) as lease:
            found = len(lease.nodes) - 1
            tokens = lease.num_tokens - PREAMBLE.num_tokens
            self.tree.load(lease)
            end = num_worth_keeping(order, found, self.table, self.uses())
            self.table.push([chunk.id for chunk in chunks])
            for chunk in order[found:end]:
                pages = Pages(chunk.num_tokens * TOKEN_BYTES, None)
                if self.tree.extend(lease, chunk, pages) is not Extended.ADOPTED:
                    break
        return tokens

    def uses(self) -> int:
        return self._uses

    def is_full(self, tier: TreeTier = TreeTier.DEVICE) -> bool:
        """Whether the tree has next to no room in a tier, as the engine judges it."""
        budgets = {
            TreeTier.DEVICE: self.tree.config.device_bytes,
            TreeTier.HOST: self.tree.config.host_bytes,
        }
        return self.tree.used_bytes(tier) > FULL_SHARE * budgets[tier]


class Frequency(Ordering):
    def order(self, chunks: Chunks) -> Chunks:
        return frequency_order(chunks, self.table)


class Foreseen(Ordering):
    """By how often the whole stream brings each chunk."""

    def __init__(self, host_gib: float, *, asks: Sequence[Ask]) -> None:
        super().__init__(host_gib)
        self._whole = AccessTable(max(1, len(asks)))
        for ask in asks:
            self._whole.push([chunk.id for chunk in ask.chunks])

    def order(self, chunks: Chunks) -> Chunks:
        return tuple(sorted(chunks, key=lambda chunk: (-self._whole.count(chunk.id), chunk)))


class Planned(Ordering):
    """As the planner does it."""

    def wants_tail(self) -> bool:
        """Whether what is not matched stands in frequency order."""
        return self.is_full()

    def order(self, chunks: Chunks) -> Chunks:
        rules = OrderRules(OrderPermission.FREE, common_tail=self.wants_tail())
        worth = OrderWorth(self._matched)
        return choose_order(self.tree.root, chunks, self.table, rules, worth).chunks

    def _matched(self, order: Sequence[ChunkRef]) -> int:
        return self.tree.match([chunk.id for chunk in order]).num_tokens


class Untailed(Planned):
    def wants_tail(self) -> bool:
        return False


class TailedWhenFull(Planned):
    """Tail once host memory has no room either."""

    def wants_tail(self) -> bool:
        return self.is_full() and self.is_full(TreeTier.HOST)


class PromotedWhenFull(TailedWhenFull):
    """CRAFT's threshold once the whole tree is full."""

    def uses(self) -> int:
        return self._uses if self.wants_tail() else 1


class Pilot(Ordering):
    """The peer's online mode: one context per call, its own index of what it has seen."""

    def __init__(self, host_gib: float) -> None:
        super().__init__(host_gib)
        from contextpilot import ContextPilot

        with contextlib.redirect_stdout(io.StringIO()):
            self._pilot = ContextPilot(use_gpu=False)

    def order(self, chunks: Chunks) -> Chunks:
        by_id = {str(chunk.id): chunk for chunk in chunks}
        with contextlib.redirect_stdout(io.StringIO()):  # it reports every step
            reordered, _ = self._pilot.reorder(list(by_id))
        return tuple(by_id[name] for name in reordered[0])


Make = Callable[[float], Ordering]


def orderings(with_peer: bool) -> dict[str, Make]:
    found: dict[str, Make] = {
        "given": Ordering,
        "frequency": partial(Frequency, uses=CRAFT_USES),
        "planner": Planned,
    }
    return {**found, "contextpilot": Pilot} if with_peer else found


def avoided(asks: Sequence[Ask], ordering: Ordering, dedup: bool = False) -> float:
    """Share of retrieved chunk tokens that did not have to be computed."""
    total = saved = 0
    history: dict[str, set[ChunkId]] = {}
    for ask in asks:
        chunks = tuple(dict.fromkeys(ask.chunks))
        total += sum(chunk.num_tokens for chunk in chunks)
        said = history.setdefault(ask.conversation, set()) if ask.conversation else set()
        if not dedup:
            saved += ordering.run(chunks)
            continue
        saved += sum(chunk.num_tokens for chunk in chunks if chunk.id in said)
        if not said:
            saved += ordering.run(chunks)
        said |= {chunk.id for chunk in chunks}
    return saved / total


def most_tokens(asks: Sequence[Ask]) -> float:
    """Share of chunk tokens that the best earlier request has in common with each: no order in
    front of a tree finds more."""
    sizes: dict[ChunkId, int] = {}
    seen_in: dict[ChunkId, list[int]] = {}
    total = common = 0
    for place, ask in enumerate(asks):
        shared: dict[int, int] = {}
        for chunk in dict.fromkeys(ask.chunks):
            sizes[chunk.id] = chunk.num_tokens
            total += chunk.num_tokens
            for earlier in seen_in.setdefault(chunk.id, []):
                shared[earlier] = shared.get(earlier, 0) + chunk.num_tokens
            seen_in[chunk.id].append(place)
        common += max(shared.values(), default=0)
    return common / total


def decompose(asks: Sequence[Ask], gib: float) -> dict[str, float]:
    """What is avoided, and where the rest of what any order could avoid is lost."""
    by = {
        "most": most_tokens(asks),
        "foreseen": avoided(asks, Foreseen(UNBOUNDED, asks=asks)),
        "aligned": avoided(asks, Ordering(UNBOUNDED)),
        "ordered": avoided(asks, Untailed(UNBOUNDED)),
        "remembered": avoided(asks, Untailed(UNBOUNDED, window=len(asks))),
        "bounded": avoided(asks, Planned(gib)),
    }
    lost = {
        "lost_to_order": by["most"] - by["ordered"],
        "lost_to_window": by["remembered"] - by["ordered"],
        "lost_to_budget": by["ordered"] - by["bounded"],
    }
    return {name: round(value, 4) for name, value in (by | lost).items()}


def swept(
    asks: Sequence[Ask], host_gib: Sequence[float], args: argparse.Namespace
) -> dict[str, Any]:
    """Window and threshold, one at a time; and when the tail is put in order."""

    @cache  # the defaults stand in every sweep
    def at(kind: type[Ordering], gib: float, window: int, uses: int) -> float:
        return round(avoided(asks, kind(gib, window=window, uses=uses)), 4)

    kinds = {"planner": Planned, "frequency": Frequency}
    return {
        f"{gib:g}": {
            "window": {
                name: {window: at(kind, gib, window, 1) for window in args.windows}
                for name, kind in kinds.items()
            },
            "uses": {
                name: {uses: at(kind, gib, WINDOW, uses) for uses in args.uses}
                for name, kind in kinds.items()
            },
            "tail": {
                "never": at(Untailed, gib, WINDOW, 1),
                "device full": at(Planned, gib, WINDOW, 1),
                "tree full": at(TailedWhenFull, gib, WINDOW, 1),
                "tree full, then 2 uses": at(PromotedWhenFull, gib, WINDOW, CRAFT_USES),
            },
        }
        for gib in host_gib
    }


def books(asks: Sequence[Ask], gib: float) -> dict[str, float]:
    """Memory of the access table and of the tree's books, in MB, after a stream: what Python took
    for them, counted by tracemalloc. Pages are handles here: no KV is among it."""
    tracemalloc.start()
    try:
        start = tracemalloc.take_snapshot()
        table = AccessTable()
        for ask in asks:
            table.push([chunk.id for chunk in ask.chunks])
        after_table = tracemalloc.take_snapshot()
        ordering = Planned(gib)
        for ask in asks:
            ordering.run(tuple(dict.fromkeys(ask.chunks)))
        after_tree = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    table_mb = _grown_mb(start, after_table)
    tree = ordering.tree
    kv_bytes = sum(tree.used_bytes(tier) for tier in (TreeTier.DEVICE, TreeTier.HOST))
    return {
        "table_names": len(table),
        "table_mb": round(table_mb, 3),
        "tree_nodes": len(tree),
        "tree_mb": round(_grown_mb(after_table, after_tree) - table_mb, 3),  # it has a table too
        "kv_mb": round(kv_bytes / 1e6, 1),
    }


def _grown_mb(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot) -> float:
    return sum(each.size_diff for each in after.compare_to(before, "filename")) / 1e6


def compared(
    streams: dict[str, list[Ask]], args: argparse.Namespace, has_peer: bool
) -> list[dict[str, object]]:
    """Every ordering on every stream and budget."""
    rows = []
    for name, stream in streams.items():
        lengths = {min(length, len(stream)) for length in (args.requests, len(stream))}
        lengths |= {min(args.peer_requests, len(stream))} if has_peer else set()
        for length in sorted(lengths):
            asks, with_peer = stream[:length], has_peer and length <= args.peer_requests
            for gib in args.host_gib:
                for dedup in (False, True) if name == "mtrag" else (False,):
                    row: dict[str, object] = {"set": name, "requests": length}
                    row |= {"host_gib": gib, "dedup": dedup}
                    for ordering, make in orderings(with_peer).items():
                        row[ordering] = round(avoided(asks, make(gib), dedup), 4)
                    print(row, flush=True)
                    rows.append(row)
    return rows


def show(rows: Sequence[dict[str, object]], has_peer: bool, top_k: int) -> None:
    table = Table(title=f"chunk KV computation avoided, top-{top_k}")
    for column in ("set", "requests", "host GiB", "dedup", *orderings(has_peer)):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[o]:.1%}" if o in row else "–" for o in orderings(has_peer)]
        front = (str(row["set"]), str(row["requests"]), f"{row['host_gib']:g}", str(row["dedup"]))
        table.add_row(*front, *cells)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--by-words", action="store_true", help="retrieve by BM25")
    parser.add_argument("--requests", type=int, default=2000, help="the first so many of a stream")
    parser.add_argument("--longest", type=int, default=10_000, help="of a stream, beside them")
    parser.add_argument("--peer-requests", type=int, default=900, help="as many with the peer")
    parser.add_argument("--host-gib", type=float, nargs="+", default=[4, UNBOUNDED])
    parser.add_argument("--windows", type=int, nargs="+", default=[50, 200, 500, 1000, 2000])
    parser.add_argument("--uses", type=int, nargs="+", default=[1, 2, 3, 5])
    args = parser.parse_args()
    peer = versions("contextpilot").get("contextpilot")
    if peer is None:
        print("contextpilot is not installed: pip install --no-deps contextpilot")
    streams = {
        name: [
            Ask(ask.chunks[: args.top_k], ask.question_tokens)
            for ask in question_stream(args.data, name, by_words=args.by_words)[: args.longest]
        ]
        for name in ("mmlu", "nq_open")
    }
    streams["mtrag"] = conversation_stream(args.data, args.top_k)
    shared = {n: overlap([[c.id for c in a.chunks] for a in s]) for n, s in streams.items()}
    first = {name: stream[: args.requests] for name, stream in streams.items()}
    rows = compared(streams, args, peer is not None)
    show(rows, peer is not None, args.top_k)
    sweeps = {name: swept(asks, args.host_gib, args) for name, asks in first.items()}
    apart = {name: decompose(asks, args.host_gib[0]) for name, asks in first.items()}
    memory = {name: books(asks, UNBOUNDED) for name, asks in first.items()}
    for found in (shared, apart, sweeps, memory):
        for name, each in found.items():
            print(name, each)
    finish(
        __doc__,
        {
            "bench": "ordering",
            "commit": commit(),
            "device": cpu_device(),
            "config": {
                "top_k": args.top_k,
                "retrieved_by": "BM25" if args.by_words else "minilm",
                "requests": {name: len(asks) for name, asks in streams.items()},
                "swept_requests": {name: len(asks) for name, asks in first.items()},
                "host_gib": args.host_gib,
                "contextpilot": peer,
            },
            "overlap": {
                n: {k: round(v, 4) for k, v in o._asdict().items()} for n, o in shared.items()
            },
            "published": {"avoided": "0.19-0.38", "prefix": 0.11, "total": 0.43, "repeats": 0.21},
            "rows": rows,
            "decomposition": apart,
            "sweeps": sweeps,
            "books": memory,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
