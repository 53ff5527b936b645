"""How much chunk KV need not be computed when chunks may be put in a common order?

Real streams (MMLU and NQ-open over a Wikipedia knowledge base, MTRAG conversations) through the
exact knowledge tree. The figure is the share of retrieved chunk tokens that were found behind
their path, or that the conversation already held, so that they were not computed. Orderings:

    given         the order of retrieval
    frequency     CRAFT: by access count, ties by id; a chunk enters the tree once seen twice
    planner       ours: the better of tree walk and frequency, never worse than given
    … promoted    the same, and a chunk enters the tree once seen twice
    … tail        the same, and what is not matched stands in frequency order
    contextpilot  the peer's `reorder`, one request at a time as they arrive, same tree behind it

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
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.admission import num_worth_keeping
from common.counting_owner import CountingOwner
from common.overlap import overlap
from common.results import commit, cpu_device, finish, versions
from common.streams import Ask, conversation_stream, question_stream
from hitrate import GIB, PREAMBLE, TOKEN_BYTES
from kvweave.kv.tree import ChunkRef, Extended, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.ordering import (
    AccessTable,
    OrderPermission,
    OrderRules,
    OrderWorth,
    choose_order,
    frequency_order,
)
from kvweave.types import ChunkId

Chunks = tuple[ChunkRef, ...]


class Ordering:
    """One ordering in front of one tree."""

    def __init__(self, host_gib: float, promote: bool) -> None:
        config = TreeConfig(int(0.25 * GIB), int(host_gib * GIB))
        pages = Pages(PREAMBLE.num_tokens * TOKEN_BYTES, None)
        self.tree = KnowledgeTree(
            config, CountingOwner(), lambda x, y: 0.02 + y / 450, PREAMBLE, pages
        )
        self.table = AccessTable()
        self._promote = promote

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
            self.table.push([chunk.id for chunk in chunks])
            end = num_worth_keeping(order, found, self.table) if self._promote else len(order)
            for chunk in order[found:end]:
                pages = Pages(chunk.num_tokens * TOKEN_BYTES, None)
                if self.tree.extend(lease, chunk, pages) is not Extended.ADOPTED:
                    break
        return tokens


class Frequency(Ordering):
    def order(self, chunks: Chunks) -> Chunks:
        return frequency_order(chunks, self.table)


class Planned(Ordering):
    common_tail = False

    def order(self, chunks: Chunks) -> Chunks:
        rules = OrderRules(OrderPermission.FREE, common_tail=self.common_tail)
        worth = OrderWorth(self._matched)
        return choose_order(self.tree.root, chunks, self.table, rules, worth).chunks

    def _matched(self, order: Sequence[ChunkRef]) -> int:
        return self.tree.match([chunk.id for chunk in order]).num_tokens


class Tailed(Planned):
    common_tail = True


class Pilot(Ordering):
    """The peer's online mode: one context per call, its own index of what it has seen."""

    def __init__(self, host_gib: float, promote: bool) -> None:
        super().__init__(host_gib, promote)
        from contextpilot import ContextPilot

        with contextlib.redirect_stdout(io.StringIO()):
            self._pilot = ContextPilot(use_gpu=False)

    def order(self, chunks: Chunks) -> Chunks:
        by_id = {str(chunk.id): chunk for chunk in chunks}
        with contextlib.redirect_stdout(io.StringIO()):  # it reports every step
            reordered, _ = self._pilot.reorder(list(by_id))
        return tuple(by_id[name] for name in reordered[0])


def orderings(with_peer: bool) -> dict[str, Callable[[float], Ordering]]:
    found: dict[str, Callable[[float], Ordering]] = {
        "given": lambda gib: Ordering(gib, promote=False),
        "frequency": lambda gib: Frequency(gib, promote=True),
        "planner": lambda gib: Planned(gib, promote=False),
        "planner promoted": lambda gib: Planned(gib, promote=True),
        "planner promoted tail": lambda gib: Tailed(gib, promote=True),
    }
    if with_peer:
        found["contextpilot"] = lambda gib: Pilot(gib, promote=False)
    return found


def avoided(asks: Sequence[Ask], ordering: Ordering, dedup: bool) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000, help="the first so many of a stream")
    parser.add_argument("--peer-requests", type=int, default=900, help="as many with the peer")
    parser.add_argument("--host-gib", type=float, nargs="+", default=[4, 1024])
    args = parser.parse_args()
    peer = versions("contextpilot").get("contextpilot")
    if peer is None:
        print("contextpilot is not installed: pip install --no-deps contextpilot")
    streams = {
        name: [
            Ask(ask.chunks[: args.top_k], ask.question_tokens)
            for ask in question_stream(args.data, name)[: args.requests]
        ]
        for name in ("mmlu", "nq_open")
    }
    streams["mtrag"] = conversation_stream(args.data, args.top_k)
    shared = {n: overlap([[c.id for c in a.chunks] for a in s]) for n, s in streams.items()}
    rows = []
    for name, stream in streams.items():
        lengths = {min(args.peer_requests, len(stream)), len(stream)}
        for length in sorted(lengths):
            asks, with_peer = stream[:length], peer is not None and length <= args.peer_requests
            for gib in args.host_gib:
                for dedup in (False, True) if name == "mtrag" else (False,):
                    row: dict[str, object] = {"set": name, "requests": length}
                    row |= {"host_gib": gib, "dedup": dedup}
                    for ordering, make in orderings(with_peer).items():
                        row[ordering] = round(avoided(asks, make(gib), dedup), 4)
                    rows.append(row)
    table = Table(title=f"chunk KV computation avoided, top-{args.top_k}")
    for column in ("set", "requests", "host GiB", "dedup", *orderings(peer is not None)):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            f"{row[ordering]:.1%}" if ordering in row else "–"
            for ordering in orderings(peer is not None)
        ]
        table.add_row(
            str(row["set"]), str(row["requests"]), f"{row['host_gib']:g}", str(row["dedup"]), *cells
        )
    Console(width=150).print(table)
    for name, o in shared.items():
        print(
            f"{name}: prefix {o.prefix:.1%}, one earlier request {o.total:.1%}, all {o.union:.1%}"
        )
    finish(
        __doc__,
        {
            "bench": "ordering",
            "commit": commit(),
            "device": cpu_device(),
            "config": {
                "top_k": args.top_k,
                "requests": {name: len(asks) for name, asks in streams.items()},
                "host_gib": args.host_gib,
                "contextpilot": peer,
            },
            "overlap": {
                n: {k: round(v, 4) for k, v in o._asdict().items()} for n, o in shared.items()
            },
            "published": {"avoided": "0.19-0.38", "prefix": 0.11, "total": 0.43, "repeats": 0.21},
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
