"""What the planner chooses where chunk KV lies on disk, played with the times each mode took.

The profile is made of the run's own measurements: full prefill, passes over chunk KV that was on
the device, the speed at which each store was read, and copies from host memory. The planner itself
plans; what its choice took is looked up among the runs of that mode and told to it as the engine
would. So there is a first choice, from measured parts alone, and later ones that know what earlier
ones took.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from common.counting_owner import CountingOwner
from kvweave.fuse.request import budget
from kvweave.kv.tree import ChunkRef, KnowledgeTree, Pages, TreeConfig
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.plan import Plan, PlanRequest, PromptShape, Stored, Verdict
from kvweave.plan.planner import Planner
from kvweave.plan.profile import Grid, MachineProfile, TierLink, link_name
from kvweave.reasons import Reason
from kvweave.types import ChunkId

ROUNDS = 12  # requests for the same chunks, one after another
SOME = 0.15
GATES: Mapping[str, Mapping[str, float]] = {
    "choices": {"reuse": 0.0, "fusionrag": SOME},
    "choices_15": {"fusionrag": SOME},  # a gate that asks for recomputed rows
}

Cell = Mapping[str, Any]


class Prompts(NamedTuple):
    """The prompts of the run."""

    num_chunks: Mapping[str, int]  # by size
    chunk_tokens: int
    preamble: int
    question: int
    num_layers: int

    def total(self, size: str) -> int:
        return self.preamble + self.num_chunks[size] * self.chunk_tokens + self.question


class OpenGate:
    def __init__(self, ratios: Mapping[str, float]) -> None:
        self._ratios = ratios

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(self._ratios.get(strategy), Reason.NOT_CALIBRATED)


def choices(prompts: Prompts, cells: Sequence[Cell], host_bytes_per_s: float) -> dict[str, Any]:
    """Per gate, size, disk state and codec: what is chosen first and later, against full prefill.

    `over_full` is the first choice's time over full prefill's, `worst_over_full` that of the
    slowest mode chosen in a row of requests; for one case and, at the end, for all of them.
    """
    by = {(c["size"], c["tier"], c["codec"], c["way"]): c for c in cells}
    found: dict[str, Any] = {gate: [] for gate in GATES}
    for size in prompts.num_chunks:
        needed = ("none", "", "full"), ("device", "raw", "reuse"), ("device", "raw", "epic")
        if any((size, *which) not in by for which in needed):
            return {**found, "why": "full prefill or the device tier was not measured"}
        for gate, ratios in GATES.items():
            for state in ("disk warm", "disk cold"):
                for codec in dict.fromkeys(c["codec"] for c in cells if c["tier"] == state):
                    if (size, state, codec, "reuse") in by:
                        case = Case(prompts, by, size, state, codec, host_bytes_per_s, ratios)
                        found[gate].append(case.play())
    for name in ("over_full", "worst_over_full"):
        every = [case[name] for gate in GATES for case in found[gate] if case[name] is not None]
        found["first_over_full" if name == "over_full" else name] = max(every, default=None)
    return found


class Case:
    """One size in one state of one store, asked for again and again."""

    def __init__(
        self,
        prompts: Prompts,
        by: Mapping[tuple[str, str, str, str], Cell],
        size: str,
        state: str,
        codec: str,
        host_bytes_per_s: float,
        ratios: Mapping[str, float],
    ) -> None:
        self.size, self.state, self.codec = size, state, codec
        self._runs = {
            mode: by[size, state, codec, mode]
            for mode in ratios
            if (size, state, codec, mode) in by
        }
        self._full = by[size, "none", "", "full"]
        self._link = link_name("disk", codec)
        num_chunks, tokens = prompts.num_chunks[size], prompts.chunk_tokens
        total, question = prompts.total(size), prompts.question
        read = by[size, state, codec, "reuse"]["stages_ms"]
        self._bytes = int(read["loaded_mb"] * 1e6)
        names = [ChunkId(f"chunk {i}") for i in range(num_chunks)]
        copy = Stored("isolated", "disk", self._bytes // num_chunks, False, codec=codec)
        rows = (question, question + budget(num_chunks * tokens, SOME), total)
        passes = [*(by[size, "device", "raw", mode] for mode in ("reuse", "epic")), self._full]
        self._profile = MachineProfile(
            "bench",
            "bench",
            prompts.num_layers,
            Grid((0,), (total,), [[self._full["ttft_ms"] / 1e3]]),
            Grid((total,), rows, [[cell["ttft_ms"] / 1e3 for cell in passes]]),
            {"host": TierLink(host_bytes_per_s), self._link: TierLink(read["read_gb_s"] * 1e9)},
        )
        preamble = ChunkRef(ChunkId("preamble"), prompts.preamble)
        config, pages = TreeConfig(1 << 40, 0), Pages(1, None)
        tree = KnowledgeTree(config, CountingOwner(), lambda cached, new: 1.0, preamble, pages)
        self._planner = Planner(
            tree,
            CostModel(self._profile),
            lambda asked: {chunk: [copy] for chunk in asked},
            OpenGate(ratios),
            now_s=lambda: self._now_s,
        )
        self._now_s = 0.0
        chunks = tuple(ChunkRef(name, tokens) for name in names)
        strategies = tuple(StrategyInfo(mode) for mode in ratios)
        self._request = PlanRequest(chunks, question, strategies=strategies)

    def play(self) -> dict[str, Any]:
        full_ms = self._full["ttft_ms"]
        rounds: list[tuple[Plan, str, float]] = []
        for number in range(ROUNDS):
            plan = self._planner.plan(self._request)
            mode = plan.strategy or "full"
            if mode not in (*self._runs, "full") or plan.chosen.name.startswith("mixed"):
                break  # that was not measured
            runs = seconds(self._cell(mode))
            rounds.append((plan, mode, runs[number % len(runs)]))
            self._learn(plan, mode, rounds[-1][2])
        said: dict[str, Any] = {"size": self.size, "tier": self.state, "codec": self.codec}
        if not rounds:
            return {**said, "over_full": None, "worst_over_full": None, "why": "not measured"}
        (first, mode, _), (last, later, _) = rounds[0], rounds[-1]
        modes = [mode for _, mode, _ in rounds]
        took_ms = self._cell(mode)["ttft_ms"]
        medians = [self._cell(mode)["ttft_ms"] for mode in modes]
        return {
            **said,
            "choice": mode,
            "priced_ms": priced_ms(first),
            "took_ms": took_ms,
            "over_full": round(took_ms / full_ms, 3),
            "later": later,
            "later_priced_ms": priced_ms(last),
            "later_share": round(self._share(), 3),
            "ways": ", ".join(f"{w} {len(list(group))}" for w, group in groupby(modes)),
            "worst_over_full": round(max(medians) / full_ms, 3),
        }

    def price_s(self, mode: str, ratio: float) -> float:
        """What a mode is priced at with every chunk loaded, before anything was learnt."""
        chunks, question = self._request.chunks, self._request.question_tokens
        tokens = sum(chunk.num_tokens for chunk in chunks)
        rows, total = question + budget(tokens, ratio), self._profile.prefill.ys[0]
        loads = {self._link: self._bytes}
        costs = self._planner.costs
        loaded = costs.load_set(tokens, loads)
        rows_s = costs.profile.recompute.at(total, rows)
        return costs.fused_price(StrategyInfo(mode), rows_s, total, question, loaded).seconds

    def _cell(self, mode: str) -> Cell:
        return self._full if mode == "full" else self._runs[mode]

    def _learn(self, plan: Plan, mode: str, took_s: float) -> None:
        """As app/auto/lessons.py does when an answer begins."""
        self._now_s += 1.0
        if mode == "full":
            return
        speed = self._runs[mode]["stages_ms"]["read_gb_s"] * 1e9
        self._profile.links[self._link].observe(self._bytes, self._bytes / speed)
        self._planner.learn_load(plan, took_s)

    def _share(self) -> float:
        return self._planner.costs.shares_at(self._now_s)[self._link]


def priced_ms(plan: Plan) -> dict[str, float]:
    """What each mode was priced at; `full` among them."""
    return {
        option.name.rpartition(" ")[2]: round(option.predicted_s * 1e3, 1)
        for option in plan.options
        if option.predicted_s is not None
    }


def seconds(cell: Cell) -> list[float]:
    """Of every run of a cell, or of the middle one where they were not kept."""
    return [ms / 1e3 for ms in cell.get("times_ms") or [cell["ttft_ms"]]]
