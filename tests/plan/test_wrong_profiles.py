"""A machine whose costs are known, planned with a profile that is wrong: does `auto` recover?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from kvweave.plan.plan import Plan
from kvweave.plan.planner import Planner
from kvweave.plan.profile import Grid, MachineProfile
from worlds.plan import ask, make_planner, on_disk

TOKEN_S = 0.001
NAMES = ("a700", "b700", "c600")  # 2,000 tokens, and 10 of a question
ENOUGH = 60  # requests, within which a planner must be right again


@dataclass
class TrueMachine:
    """What requests really take: prefill a millisecond per token, a row recomputed `relation`."""

    relation: float
    took_s: float = 0.0
    exact_s: float = 0.0  # what they would have taken without fusing anything
    stalls: Sequence[int] = ()
    num: int = 0
    slower: float = 1.0  # all of it, for a while

    def carry_out(self, planner: Planner, plan: Plan) -> None:
        total, rows = plan.num_tokens, plan.chosen.rows
        now = self.slower * (5.0 if self.num in self.stalls else 1.0)
        seconds = now * rows * TOKEN_S * (1.0 if plan.strategy is None else self.relation)
        self.num += 1
        self.took_s += seconds
        self.exact_s += now * total * TOKEN_S
        machine = planner.costs.profile
        if plan.strategy is None:
            machine.saw_exact(total - rows, rows, seconds)
        else:
            machine.saw_fused(total, rows, seconds)


def start(prefill: float, recompute: float, relation: float, ratio: float = 0.15) -> Planner:
    """A planner whose profile has its two grids so many times too dear."""
    planner = make_planner(stored=on_disk(*NAMES, tier="host"), links={"host": 1e12})
    planner.gate.ratios["epic"] = ratio  # type: ignore[attr-defined]
    made = planner.costs.profile
    xs, ys = (0, 512, 2048), (16, 256, 2048)
    grids = [
        Grid(xs, ys, [[off * y * TOKEN_S for y in ys] for _ in xs])
        for off in (prefill, recompute * relation)
    ]
    machine = MachineProfile("m", "test", 10, *grids, made.links)
    return replace(planner, costs=replace(planner.costs, profile=machine), now_s=lambda: 0.0)


def answer(planner: Planner, machine: TrueMachine, num: int) -> list[Plan]:
    plans = []
    for _ in range(num):
        plan = planner.plan(ask(*NAMES))
        machine.carry_out(planner, plan)
        plans.append(plan)
    return plans


OFF = [(1.0, 10.0), (10.0, 10.0), (10.0, 1.0), (1.0, 0.1), (0.1, 0.1), (0.1, 1.0), (0.1, 10.0)]


@pytest.mark.parametrize("ratio", [0.15, 0.3])
@pytest.mark.parametrize(("prefill", "recompute"), OFF)
def test_where_fusing_is_fast_it_is_fused_again_before_long(
    prefill: float, recompute: float, ratio: float
) -> None:
    planner, machine = start(prefill, recompute, 1.0, ratio), TrueMachine(1.0)
    answer(planner, machine, ENOUGH)
    after = answer(planner, machine, 20)
    assert all(plan.strategy == "epic" for plan in after)
    assert after[-1].chosen.predicted_s == pytest.approx(after[-1].chosen.rows * TOKEN_S, rel=0.1)


@pytest.mark.parametrize("relation", [9.0, 12.0, 20.0])
@pytest.mark.parametrize(("prefill", "recompute"), [(1.0, 1.0), *OFF])
def test_where_fusing_is_slow_trying_it_costs_little(
    prefill: float, recompute: float, relation: float
) -> None:
    """At 15 % a fused prompt takes 1.4, 1.9 and 3.1 times as long as an exact one."""
    planner, machine = start(prefill, recompute, relation), TrueMachine(relation)
    planner.costs.profile.relation = relation  # as answers of both kinds showed before
    plans = answer(planner, machine, 500)
    assert machine.took_s <= 1.05 * machine.exact_s
    assert sum(plan.strategy is not None for plan in plans[-200:]) <= 4


def test_a_machine_that_gets_slow_and_fast_again_is_fused_on_most_of_the_time() -> None:
    planner, machine = start(1.0, 1.0, 1.0), TrueMachine(1.0)
    exact = 0
    for slower in (1.0, 6.0, 1.0, 6.0, 1.0):
        machine.slower = slower
        exact += sum(plan.strategy is None for plan in answer(planner, machine, 100))
    assert exact <= 20


def test_a_stall_now_and_then_turns_no_choice_over() -> None:
    planner, machine = start(1.0, 1.0, 1.0), TrueMachine(1.0, stalls=range(7, 400, 13))
    assert all(plan.strategy == "epic" for plan in answer(planner, machine, 400))
