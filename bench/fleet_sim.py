"""How many replicas does a fleet need, what do they find, and what crosses the network?

A simulator: no engine runs. Costs are measured ones, read from bench/results (H200, Llama-3.1-8B):

    full prefill, fused prefill (weave, 15 %)   ttft-h200.json, 8K and 32K tokens
    decode step by batch                        gpu_decode-h200.json
    bytes of chunk KV                           ttft-h200.json, int8
    the link to the shared store                assumed: --link-gbps for each replica

Requests are real questions with the passages that BM25 finds for them (--data; MMLU and NQ-open
over Wikipedia passages), or drawn by Zipf's law without it. A fleet of N chunks holds N / 35,745
knowledge bases with these very lists, whose own popularity is Zipf's (--kb-skew). A passage that
only one question found stands for what nobody asked before: it is another cold passage each time
(after Good and Turing), so that hits come from what is really asked for again.

A replica computes one prompt after the other; decode is charged at its share of a full batch. It
has a host tier (least recently used goes first); all share a store that has the chunk KV of the
knowledge bases asked for most, as many as fit; a request takes the cheaper of loading and
computing, as the planner does. Routing is the gateway's (gateway/fleet.py): least work left, then
most chunks held, among replicas within --load-factor of the mean load, else by the hash of the
first chunk; beside it round robin. Of replicas that hold nothing it looks at the first on a ring
that has room, where the gateway looks at all: waiting times by content are rather too long.

Large fleets are simulated at 1/F of their chunks, host tiers and store alike, with all replicas and
all traffic: `scale` says F. `--check-scale` runs a cell at two scales. Where the simulator can be
checked, it is: `check` compares one replica with what bench/throughput measured on one H200.

    python bench/fleet_sim.py --data ../shared/data --docs docs/fleet.md \\
        --out bench/results/fleet_sim-simulated.json
"""

import argparse
import heapq
import itertools
import json
import math
import random
import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common.files import RESULTS
from common.results import commit, finish, read_results
from common.word_lists import word_lists, zipf_lists

GB = 1e9
PROMPT_TOKENS, K = 8256, 16  # as measured: 16 chunks of 510 tokens, a preamble, a question
SETS = ("mmlu", "nq_open")
MOST_HOLDERS = 8  # of a chunk that routing looks at
LEAST_SHARE = 0.1  # as gateway/fleet.py has it
MOST_ENTRIES = 60_000  # of all host tiers together: beyond that the fleet is scaled down
MOST_WARMING = 60_000  # requests before those that count
LEAST_TIER = 400  # chunks of a host tier, scaled down


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes, measured."""

    full_s: float  # a prompt of PROMPT_TOKENS, nothing stored
    fused_s: float  # the same with all chunks in host memory
    decode_s: float  # of one answer, its share of a full batch
    chunk_bytes: float  # KV of a chunk, int8
    sources: dict[str, str] = field(default_factory=dict)

    def compute_s(self, share: float) -> float:
        """With KV of this share of the chunks at hand."""
        return self.full_s + (self.fused_s - self.full_s) * share


def measured_costs(answer_tokens: int) -> Costs:
    ttft = read_results(RESULTS / "ttft-h200.json")["runs"][-1]
    decode = read_results(RESULTS / "gpu_decode-h200.json")["runs"][-1]

    def cell(**wanted: object) -> dict[str, Any]:
        return next(
            c for c in ttft["cells"] if all(c.get(name) == value for name, value in wanted.items())
        )

    full = cell(size="8k", way="full")
    fused = cell(size="8k", tier="host", way="weave", ratio=0.15)
    loaded = cell(size="8k", tier="disk cold", codec="int8", way="reuse")
    batch = decode["steps"][-1]
    return Costs(
        full["ttft_ms"] / 1e3,
        fused["ttft_ms"] / 1e3,
        answer_tokens * batch["recorded_ms"] / 1e3 / batch["batch"],
        loaded["stages_ms"]["loaded_mb"] * 1e6 / K,
        {"ttft": ttft["commit"], "gpu_decode": decode["commit"]},
    )


@dataclass(frozen=True)
class Setting:
    """One fleet."""

    replicas: int
    chunks: float
    routing: str = "cache"
    host_bytes: float = 1024 * GB
    store_bytes: float = 1000e12
    link_bytes_s: float = 100e9 / 8
    rate: float = 3.0  # requests a second for each replica
    load_factor: float = 1.25
    kb_skew: float = 0.8
    requests: int = 6_000  # that are counted
    lost: int = 0  # replicas that die when counting begins
    scale: int | None = None  # None: chosen so that it fits
    seed: int = 0


class Asked:
    """Requests without end: chunks as numbers."""

    def __init__(self, lists: np.ndarray, corpus: int, kbs: int, skew: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lists = lists.tolist()
        counts = np.bincount(lists.reshape(-1), minlength=corpus)
        self._is_warm = (counts >= 2).tolist()
        self._cold = np.flatnonzero(counts < 2).tolist()
        self._corpus = corpus
        weights = 1.0 / np.arange(1, kbs + 1) ** skew
        self._cumulated = (np.cumsum(weights) / weights.sum()).tolist()
        self.warm_share = float((counts[counts >= 2].sum()) / counts.sum())

    def next(self) -> list[int]:
        rng, is_warm, cold = self._rng, self._is_warm, self._cold
        kb = np.searchsorted(self._cumulated, rng.random()) if len(self._cumulated) > 1 else 0
        base = int(kb) * self._corpus
        places = rng.choice(self._lists)
        return [base + (p if is_warm[p] else rng.choice(cold)) for p in places]


class Recent(OrderedDict[int, None]):
    """A tier: what was not used for longest goes first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def use(self, chunk: int) -> int | None:
        """Take it in, or move it to the end; what had to go."""
        if chunk in self:
            self.move_to_end(chunk)
            return None
        self[chunk] = None
        return self.popitem(last=False)[0] if len(self) > self.most else None


@dataclass
class Server:
    """A replica: one queue, one host tier."""

    tier: Recent
    free_s: float = 0.0  # when all it has is done
    ends: list[float] = field(default_factory=list)  # of what it has, a heap
    served: int = 0
    is_alive: bool = True


class Fleet:
    """The simulation of one setting."""

    def __init__(self, cfg: Setting, costs: Costs, lists: np.ndarray, corpus: int) -> None:
        self.cfg = cfg
        self.costs = costs
        per_replica = cfg.host_bytes / costs.chunk_bytes
        entries = max(MOST_ENTRIES, LEAST_TIER * cfg.replicas)
        fits = math.ceil(cfg.replicas * per_replica / entries)
        self.scale = cfg.scale or max(1, min(fits, int(cfg.chunks / corpus)))
        kbs = max(1, round(cfg.chunks / corpus / self.scale))
        self.tier_chunks = max(K, int(per_replica / self.scale))
        self.asked = Asked(lists, corpus, kbs, cfg.kb_skew, cfg.seed)
        self.servers = [Server(Recent(self.tier_chunks)) for _ in range(cfg.replicas)]
        # knowledge bases are numbered from the one that is asked for most
        self.stored = int(cfg.store_bytes / costs.chunk_bytes / self.scale)
        self.holders: dict[int, list[int]] = {}
        self.turn = itertools.count()
        self.outstanding = 0
        self.rng = random.Random(cfg.seed + 1)

    def run(self) -> dict[str, Any]:
        """Warm up until hits no longer rise, then count."""
        cfg = self.cfg
        now_s, gap_s = 0.0, 1.0 / (cfg.rate * cfg.replicas)
        block = min(10_000, max(2_000, cfg.replicas * self.tier_chunks // (2 * K)))
        before, warmed = -1.0, 0
        while warmed < MOST_WARMING:
            tally = Tally()
            for _ in range(block):
                now_s += self.rng.expovariate(1.0) * gap_s
                self._serve(now_s, tally)
            warmed += block
            rate = tally.rate("host")
            if rate - before < 0.005 and warmed >= 4 * block:
                break
            before = rate
        for number in range(cfg.lost):
            self._lose(number)
        tally = Tally()
        for server in self.servers:
            server.served = 0
        for _ in range(cfg.requests):
            now_s += self.rng.expovariate(1.0) * gap_s
            self._serve(now_s, tally)
        return self._told(tally, warmed)

    def _serve(self, now_s: float, tally: "Tally") -> None:
        chunks = self.asked.next()
        place = self._route(chunks, now_s)
        server, costs = self.servers[place], self.costs
        here = [chunk for chunk in chunks if chunk in server.tier]
        away = [chunk for chunk in chunks if chunk not in server.tier]
        stored = [chunk for chunk in away if chunk < self.stored]
        wait_s = max(0.0, server.free_s - now_s)
        # loading goes on while the prompt waits; the planner takes the cheaper way
        load_s = len(stored) * costs.chunk_bytes / self.cfg.link_bytes_s
        with_s = costs.compute_s((len(here) + len(stored)) / K)
        without_s = costs.compute_s(len(here) / K)
        is_loaded = max(wait_s, load_s) + with_s < wait_s + without_s
        prefill_s = with_s if is_loaded else without_s
        begin_s = now_s + (max(wait_s, load_s) if is_loaded else wait_s)
        end_s = begin_s + prefill_s
        server.free_s = end_s + costs.decode_s
        heapq.heappush(server.ends, server.free_s)
        self.outstanding += 1
        server.served += 1
        self._take_in(place, chunks)
        tally.add(
            host=len(here),
            store=len(stored) if is_loaded else 0,
            computed=len(away) - (len(stored) if is_loaded else 0),
            ttft_s=end_s - now_s,
            busy_s=prefill_s + costs.decode_s,
            loaded_bytes=(len(stored) if is_loaded else 0) * costs.chunk_bytes,
            hottest=chunks,
        )

    def _take_in(self, place: int, chunks: list[int]) -> None:
        tier = self.servers[place].tier
        for chunk in chunks:
            if chunk not in tier:
                self.holders.setdefault(chunk, []).append(place)
            gone = tier.use(chunk)
            if gone is not None and (held := self.holders.get(gone)):
                held.remove(place)
                if not held:
                    del self.holders[gone]

    def _route(self, chunks: list[int], now_s: float) -> int:
        servers = self.servers
        if self.cfg.routing == "round_robin":
            while True:
                place = next(self.turn) % len(servers)
                if servers[place].is_alive:
                    return place
        # seconds until each one in question would be through, as the gateway counts tokens
        most = math.ceil(self.cfg.load_factor * (self.outstanding + 1) / len(servers))
        votes: dict[int, int] = {}
        for chunk in chunks:
            held = self.holders.get(chunk, ())
            for place in held if len(held) <= MOST_HOLDERS else self.rng.sample(held, MOST_HOLDERS):
                votes[place] = votes.get(place, 0) + 1
        asked = [place for place in votes if servers[place].is_alive]
        start = hash((chunks[0], 7)) % len(servers)
        ring = ((start + step) % len(servers) for step in range(len(servers)))
        # of those that hold nothing: the first that has room, as on a ring
        room = (p for p in ring if servers[p].is_alive and self._load(p, now_s) < most)
        asked += [next(room, start)]
        asked = [place for place in asked if self._load(place, now_s) < most] or [
            min((p for p, s in enumerate(servers) if s.is_alive), key=lambda p: servers[p].free_s)
        ]
        costs = {
            place: max(0.0, servers[place].free_s - now_s)
            + self.costs.compute_s(votes.get(place, 0) / K)
            for place in asked
        }
        near_s = min(costs.values()) + LEAST_SHARE * self.costs.full_s
        near = [place for place in asked if costs[place] <= near_s]
        return max(near, key=lambda place: votes.get(place, 0))

    def _load(self, place: int, now_s: float) -> int:
        ends = self.servers[place].ends
        while ends and ends[0] <= now_s:
            heapq.heappop(ends)
            self.outstanding -= 1
        return len(ends)

    def _lose(self, place: int) -> None:
        """A replica dies with its host tier; its requests go to others."""
        server = self.servers[place]
        server.is_alive = False
        self.outstanding -= len(server.ends)
        server.ends.clear()
        for chunk in server.tier:
            if held := self.holders.get(chunk):
                held.remove(place)
        server.tier.clear()

    def _told(self, tally: "Tally", warmed: int) -> dict[str, Any]:
        cfg = self.cfg
        alive = [server.served for server in self.servers if server.is_alive]
        ttft_ms = np.array(tally.ttft_s) * 1e3
        busy_s = tally.busy_s / cfg.requests
        return {
            "replicas": cfg.replicas,
            "chunks": cfg.chunks,
            "routing": cfg.routing,
            "lost": cfg.lost,
            "link_gbps": round(cfg.link_bytes_s * 8 / 1e9),
            "scale": self.scale,
            "warmed": warmed,
            "host_hits": round(tally.rate("host"), 4),
            "store_hits": round(tally.rate("store"), 4),
            "computed": round(tally.rate("computed"), 4),
            "ttft_p50_ms": round(float(np.percentile(ttft_ms, 50)), 1),
            "ttft_p95_ms": round(float(np.percentile(ttft_ms, 95)), 1),
            "busy_ms": round(busy_s * 1e3, 1),
            "rps_at_75": round(0.75 / busy_s, 2),
            "loaded_mb": round(tally.loaded_bytes / cfg.requests / 1e6, 1),
            "load_skew": round(max(alive) / (sum(alive) / len(alive)), 2),
            "hottest_share": round(tally.hottest_share(), 5),
        }


class Tally:
    """What happened to the requests that count."""

    def __init__(self) -> None:
        self.chunks = {"host": 0, "store": 0, "computed": 0}
        self.ttft_s: list[float] = []
        self.busy_s = self.loaded_bytes = 0.0
        self._counts: dict[int, int] = {}

    def add(
        self,
        *,
        host: int,
        store: int,
        computed: int,
        ttft_s: float,
        busy_s: float,
        loaded_bytes: float,
        hottest: list[int],
    ) -> None:
        for name, number in (("host", host), ("store", store), ("computed", computed)):
            self.chunks[name] += number
        self.ttft_s.append(ttft_s)
        self.busy_s += busy_s
        self.loaded_bytes += loaded_bytes
        for chunk in hottest:
            self._counts[chunk] = self._counts.get(chunk, 0) + 1

    def rate(self, name: str) -> float:
        return self.chunks[name] / max(1, sum(self.chunks.values()))

    def hottest_share(self) -> float:
        """Of all references, those to the chunk that is asked for most."""
        return max(self._counts.values()) / max(1, sum(self._counts.values()))


def check_against_measured(costs: Costs) -> dict[str, Any]:
    """One replica against bench/throughput's H200: requests a second within its bound on p95."""
    run = read_results(RESULTS / "throughput-h200.json")["runs"][-1]
    bound_s = run["config"]["ttft_bound_ms"] / 1e3
    told = {}
    for way, share in (("full", 0.0), ("auto", 1.0)):
        service_s = costs.compute_s(share)
        best = 0.0
        for rate in np.arange(0.5, 1.0 / service_s, 0.1):
            rng, now_s, free_s, ttft = random.Random(1), 0.0, 0.0, []
            for _ in range(4000):
                now_s += rng.expovariate(rate)
                begin_s = max(now_s, free_s)
                ttft.append(begin_s + service_s - now_s)
                free_s = begin_s + service_s + costs.decode_s
            if np.percentile(ttft, 95) <= bound_s:
                best = float(rate)
        told[way] = {"simulated": round(best, 1), "measured": run["requests_per_s"][way]}
    return told


def table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Table:
    made = Table(title=title, title_justify="left")
    for words in columns.values():
        made.add_column(words, justify="right")
    for row in rows:
        made.add_row(*(shown(name, row[name]) for name in columns))
    return made


def markdown(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    lines = [f"| {' | '.join(columns.values())} |", f"|{'|'.join('---:' for _ in columns)}|"]
    lines += [f"| {' | '.join(shown(n, row[n]) for n in columns)} |" for row in rows]
    return "\n".join(lines)


def shown(name: str, value: Any) -> str:
    if name == "chunks":
        return f"10^{round(math.log10(value))}"
    if name in ("host_hits", "store_hits", "computed"):
        return f"{100 * value:.1f} %"
    if name == "hottest_share":
        return f"{100 * value:.2f} %"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


FLEET = {
    "chunks": "chunks",
    "replicas": "replicas",
    "routing": "routing",
    "host_hits": "in host memory",
    "store_hits": "from the store",
    "computed": "computed",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p95_ms": "TTFT p95, ms",
    "loaded_mb": "MB from the store per request",
    "load_skew": "busiest ÷ mean",
    "rps_at_75": "requests/s per replica at 75 %",
}
LINKS = {
    "link_gbps": "link, Gbit/s",
    **{n: FLEET[n] for n in ("host_hits", "store_hits", "computed", "ttft_p50_ms", "ttft_p95_ms")},
    "rps_at_75": FLEET["rps_at_75"],
}
LOSS = {
    "replicas": "replicas",
    "lost": "lost",
    **{n: FLEET[n] for n in ("host_hits", "store_hits", "computed", "ttft_p50_ms", "ttft_p95_ms")},
    "load_skew": FLEET["load_skew"],
}


def write_docs(page: Path, told: dict[str, Any]) -> None:
    """Put the tables between the marks of the page."""
    text = page.read_text()
    for name, columns in (("fleet", FLEET), ("links", LINKS), ("loss", LOSS)):
        made = f"<!-- {name}: made by bench/fleet_sim.py -->\n{markdown(told[name], columns)}\n"
        pattern = rf"<!-- {name}: made by bench/fleet_sim.py -->\n.*?(?=<!-- end {name} -->)"
        text, num = re.subn(pattern, lambda _, made=made: made, text, flags=re.DOTALL)
        if num != 1:
            raise SystemExit(f"{page} has no place for the table {name!r}")
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets; else invented lists")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--chunks", type=float, nargs="+", default=[1e6, 1e7, 1e8, 1e9])
    parser.add_argument("--link-gbps", type=float, nargs="+", default=[10, 25, 100, 400])
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second per replica")
    parser.add_argument("--requests", type=int, default=6_000, help="counted in each cell")
    parser.add_argument("--host-gb", type=float, default=1024, help="host tier of a replica")
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--load-factor", type=float, default=1.25)
    parser.add_argument("--kb-skew", type=float, default=0.8)
    parser.add_argument("--check-scale", action="store_true", help="one cell at two scales")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, help="page whose tables are made anew")
    args = parser.parse_args()
    console, costs = Console(width=200), measured_costs(args.answer_tokens)
    if args.data is None:
        lists, corpus = zipf_lists(10_000, K, 35_745)
    else:
        found = [word_lists(args.data, name, K) for name in SETS]
        lists, corpus = np.concatenate([each for each, _ in found]), found[0][1]
    base = Setting(
        1,
        1e6,
        host_bytes=args.host_gb * GB,
        rate=args.rate,
        load_factor=args.load_factor,
        kb_skew=args.kb_skew,
        requests=args.requests,
    )

    def simulate(**how: Any) -> dict[str, Any]:
        told = Fleet(replace(base, **how), costs, lists, corpus).run()
        console.print(json.dumps(told), style="dim", soft_wrap=True)
        return told

    fleet = [
        simulate(replicas=replicas, chunks=chunks, routing=routing)
        for chunks in args.chunks
        for replicas in args.replicas
        for routing in (("cache", "round_robin") if replicas > 1 else ("cache",))
    ]
    middle = {"replicas": args.replicas[len(args.replicas) // 2], "chunks": args.chunks[-2:][0]}
    links = [simulate(**middle, link_bytes_s=gbps * 1e9 / 8) for gbps in args.link_gbps]
    few = max(2, args.replicas[min(1, len(args.replicas) - 1)])
    loss = [
        simulate(replicas=replicas, chunks=args.chunks[0], lost=lost, requests=args.requests // 2)
        for replicas, lost in ((few, 0), (few, 1), (10 * few, 0), (10 * few, 1), (10 * few, few))
    ]
    scales = []
    if args.check_scale:
        scales = [simulate(**middle, scale=scale) for scale in (200, 400)]
    check = check_against_measured(measured_costs(16))
    console.print(table("Fleets", fleet, FLEET))
    console.print(table(f"Links: {middle}", links, LINKS))
    console.print(table("Right after a loss", loss, LOSS))
    console.print(f"one replica, requests/s: {check}")
    told = {
        "bench": "fleet_sim",
        "commit": commit(),
        "device": "simulated: H200, Llama-3.1-8B",
        "config": {
            "k": K,
            "prompt_tokens": PROMPT_TOKENS,
            "questions": len(lists),
            "corpus": corpus,
            "asked_again": round(Asked(lists, corpus, 1, 1.0, 0).warm_share, 4),
            "data": args.data is not None,
            "rate": args.rate,
            "host_gb": args.host_gb,
            "answer_tokens": args.answer_tokens,
            "load_factor": args.load_factor,
            "kb_skew": args.kb_skew,
            "costs": {
                "full_ms": round(costs.full_s * 1e3, 2),
                "fused_ms": round(costs.fused_s * 1e3, 2),
                "decode_ms": round(costs.decode_s * 1e3, 2),
                "chunk_mb": round(costs.chunk_bytes / 1e6, 2),
                "from": costs.sources,
            },
        },
        "check": check,
        "fleet": fleet,
        "links": links,
        "loss": loss,
        "scales": scales,
    }
    if args.docs is not None:
        write_docs(args.docs, told)
    finish(__doc__, told, args.out)


if __name__ == "__main__":
    main()
