"""A planner over a small tree, a made-up store and prices that are easy to check by hand."""

from collections.abc import Mapping, Sequence

from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.gate import Verdict
from kvweave.plan.layout import Stored
from kvweave.plan.options import FusionLimits
from kvweave.plan.plan import Plan, PlanRequest, Reason
from kvweave.plan.planner import Planner
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.types import ChunkId
from worlds.tree import World, refs

EPIC = StrategyInfo("epic")
TOKEN_BYTES = 1000
FAST = 1e9


class OpenGate:
    def __init__(self, **ratios: float | None) -> None:
        self.ratios = ratios

    def min_ratio(self, strategy: str, bound: float) -> Verdict:
        if strategy not in self.ratios:
            return Verdict(None, Reason.NOT_CALIBRATED)
        return Verdict(self.ratios[strategy])


def make_planner(
    world: World | None = None,
    stored: Mapping[str, Stored] | None = None,
    links: Mapping[str, float] | None = None,
    strategies: tuple[StrategyInfo, ...] = (EPIC,),
    gate: OpenGate | None = None,
    limits: FusionLimits | None = None,
    queue_s: float = 0.0,
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
        CostModel(profile, queue_s=queue_s),
        peek,
        strategies,
        gate or OpenGate(epic=0.1),
        limits or FusionLimits(),
    )


def on_disk(*names: str, tier: str = "disk", first: bool = False) -> dict[str, Stored]:
    return {name: Stored("isolated", tier, int(name[1:]) * TOKEN_BYTES, first) for name in names}


def ask(*names: str, **more: object) -> PlanRequest:
    return PlanRequest(tuple(refs(names)), 10, **more)  # type: ignore[arg-type]


def kinds(plan: Plan) -> list[str]:
    return [span.kind.value for span in plan.spans]


def price(plan: Plan) -> float:
    assert plan.chosen.predicted_s is not None
    return plan.chosen.predicted_s


def why(plan: Plan, start: str) -> Reason:
    return next(option.reason for option in plan.options if option.name.startswith(start))
