"""A planner over a small tree, a made-up store and prices that are easy to check by hand."""

from collections.abc import Mapping, Sequence

from kvweave.plan.cost import CostModel, Price, StrategyInfo
from kvweave.plan.plan import Plan, PlanRequest, PromptShape, Stored, Verdict
from kvweave.plan.planner import Planner
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.reasons import Reason
from kvweave.types import ChunkId
from worlds.tree import World, refs

EPIC = StrategyInfo("epic")
TOKEN_BYTES = 1000
FAST = 1e9


class OpenGate:
    def __init__(self, close: float = 0.0, close_call: float = 0.0, **ratios: float | None) -> None:
        """`close`: share of fused answers that are computed exactly after all, those whose first
        token leads by less than `close_call` nats."""
        self.ratios = ratios
        self.close = close
        self.close_call = close_call

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        if strategy not in self.ratios:
            return Verdict(None, Reason.NOT_CALIBRATED)
        return Verdict(self.ratios[strategy], close=self.close, close_call=self.close_call)

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(self.ratios.get("order"))


def make_planner(
    world: World | None = None,
    stored: Mapping[str, Stored] | None = None,
    links: Mapping[str, float] | None = None,
    gate: OpenGate | None = None,
) -> Planner:
    """A token costs a millisecond to compute; links are given in bytes per second."""
    grid = Grid((0,), (1, 1000), [[0.001, 1.0]])
    speeds = links or {"disk": FAST, "host": FAST}
    profile = MachineProfile(
        "m", "test", 10, grid, grid, {name: TierLink(speed) for name, speed in speeds.items()}
    )

    def peek(chunk_ids: Sequence[ChunkId]) -> Mapping[ChunkId, Sequence[Stored]]:
        found = stored or {}
        return {c: [found[str(c)]] for c in chunk_ids if str(c) in found}

    return Planner(
        (world or World(device_tokens=5000)).tree,
        CostModel(profile),
        peek,
        gate or OpenGate(epic=0.1),
    )


def on_disk(*names: str, tier: str = "disk", first: bool = False) -> dict[str, Stored]:
    return {name: Stored("isolated", tier, int(name[1:]) * TOKEN_BYTES, first) for name in names}


def ask(*names: str, strategies: tuple[StrategyInfo, ...] = (EPIC,), **more: object) -> PlanRequest:
    chunks = tuple(refs(names))
    return PlanRequest(chunks, 10, strategies=strategies, **more)  # type: ignore[arg-type]


def price_fused(
    costs: CostModel,
    strategy: StrategyInfo,
    rows: int,
    total: int,
    question: int,
    hit_tokens: int,
    loads: Mapping[str, int],
) -> Price:
    """`rows` of `total` tokens computed; `hit_tokens` come as `loads` bytes per link."""
    loaded = costs.load_set(hit_tokens, loads, strategy.extra_bytes_per_token)
    rows_s = costs.profile.recompute.at(total, rows)
    return costs.fused_price(strategy, rows_s, total, question, loaded)


def kinds(plan: Plan) -> list[str]:
    return [span.kind.value for span in plan.spans]


def price(plan: Plan) -> float:
    assert plan.chosen.predicted_s is not None
    return plan.chosen.predicted_s


def why(plan: Plan, start: str) -> Reason:
    return next(option.reason for option in plan.options if option.name.startswith(start))
