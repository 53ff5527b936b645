"""A tier that loses at the price of the unknown is tried: rarely, at little risk, and said so."""

from dataclasses import replace

import pytest

from kvweave.plan.loading_cost import WINDOW
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.plan import Plan, PlanRequest, Reason, Reuse
from kvweave.plan.planner import Planner
from kvweave.plan.trial import EVERY, MOST_LOSS
from worlds.plan import ask, make_planner, on_disk, price, why

NAMES = ("a300", "b300")


def make(load_s: float, codec: str = "") -> Planner:
    """Full prefill takes 0.61 s; fused is 0.07 s of work and a load of `load_s` by itself."""
    stored = {n: copy._replace(codec=codec) for n, copy in on_disk(*NAMES).items()}
    planner = make_planner(stored=stored, links={"disk": 600_000 / load_s})
    return replace(planner, now_s=lambda: 0.0)


def answer(planner: Planner, share: float = 1.0, request: PlanRequest | None = None) -> Plan:
    """Plan a request and carry it out: its load is paid for by `share`."""
    plan = planner.plan(request or ask(*NAMES))
    planner.begun(plan)
    if plan.chosen.load is not None:
        planner.took(plan, plan.chosen.load.work_s + share * plan.chosen.load.seconds)
    return plan


def is_trial(plan: Plan) -> bool:
    return plan.chosen.reason is Reason.TRIAL


LOSES = 0.45  # 0.07 + 1.25 × 0.45 s: above 0.61 s, by less than it may


@pytest.mark.parametrize("codec", ["", "int8"])
def test_a_tier_that_loses_is_tried_by_one_request_in_fifty_and_the_plan_says_so(
    codec: str,
) -> None:
    planner = make(LOSES, codec)
    plans = [answer(planner, share=2.0) for _ in range(EVERY)]
    assert [is_trial(plan) for plan in plans] == [False] * (EVERY - 1) + [True]
    trial = plans[-1]
    assert trial.strategy == "epic"
    assert [span.kind.value for span in trial.spans] == ["exact", "fused", "fused", "computed"]
    assert trial.chosen in trial.options
    assert [o.name for o in trial.options if o.name.endswith("epic")] == ["fused epic"]
    assert why(trial, "prefix") is Reason.CHEAPEST, "by its price, and it is still shown"
    assert why(plans[0], "fused epic") is not Reason.TRIAL


def test_a_trial_that_was_cheap_leads_to_others_until_it_is_believed() -> None:
    planner = make(LOSES)
    plans = [answer(planner, share=0.3) for _ in range((WINDOW - 1) * EVERY)]
    assert sum(map(is_trial, plans)) == WINDOW - 1
    after = planner.plan(ask(*NAMES))
    assert (after.strategy, after.chosen.reason) == ("epic", Reason.CHEAPEST)


def test_a_tier_that_was_slow_twice_is_left_alone() -> None:
    planner = make(LOSES)
    assert sum(is_trial(answer(planner, share=2.0)) for _ in range(9 * EVERY)) == 2


def test_a_tier_that_is_as_slow_as_it_was_thought_is_known_after_a_few_trials() -> None:
    planner = make(LOSES)
    assert sum(is_trial(answer(planner, share=1.25)) for _ in range(9 * EVERY)) == WINDOW - 1


def test_no_trial_is_predicted_to_lose_more_than_it_may() -> None:
    for load_s in (0.3, 0.4, 0.42, 0.44, 0.456, 0.46, 0.5, 1.0):
        planner = make(load_s)
        for _ in range(EVERY - 1):
            planner.begun(planner.plan(ask(*NAMES, reuse=Reuse.OFF)))
        plan = planner.plan(ask(*NAMES))
        exact_s = min(o.predicted_s for o in plan.options if o.name == "prefix" and o.predicted_s)
        assert price(plan) <= (1 + MOST_LOSS) * exact_s
        assert is_trial(plan) == (0.4 <= load_s <= 0.456), load_s


def test_what_could_not_win_clearly_is_not_tried() -> None:
    """Nine of ten rows are computed anyway: hidden or not, loading gains nothing to speak of."""
    planner = make(0.01)
    planner.gate.ratios["epic"] = 0.95  # type: ignore[attr-defined]
    assert not any(is_trial(answer(planner)) for _ in range(EVERY))


def test_a_way_that_is_chosen_anyway_is_no_trial() -> None:
    planner = make(0.1)
    plans = [answer(planner) for _ in range(EVERY)]
    assert all(plan.strategy == "epic" for plan in plans)
    assert not any(map(is_trial, plans))


def test_looking_at_plans_brings_no_trial_nearer() -> None:
    planner = make(LOSES)
    assert not any(is_trial(planner.plan(ask(*NAMES))) for _ in range(2 * EVERY))


@pytest.mark.parametrize("reuse", [Reuse.EXACT, Reuse.OFF])
def test_who_forbids_approximations_gets_none_as_a_trial(reuse: Reuse) -> None:
    planner = make(LOSES)
    request = ask(*NAMES, reuse=reuse)
    assert not any(is_trial(answer(planner, request=request)) for _ in range(2 * EVERY))


def test_a_trial_keeps_the_order_that_was_chosen() -> None:
    planner = make(LOSES)
    request = ask(*NAMES, order=OrderPermission.FREE)
    plans = [answer(planner, request=request) for _ in range(EVERY)]
    assert is_trial(plans[-1])
    assert plans[-1].order == plans[0].order


# ---- beside others


def test_what_requests_beside_others_pay_is_a_number_of_its_own() -> None:
    planner = make(0.1)
    for _ in range(WINDOW):
        answer(planner, share=0.2)
    assert planner.plan(ask(*NAMES)).chosen.load.share == pytest.approx(0.2)  # type: ignore[union-attr]
    planner = replace(planner, is_busy=lambda: True)
    beside = planner.plan(ask(*NAMES))
    assert beside.chosen.load.share == pytest.approx(0.2), "until one tells"  # type: ignore[union-attr]
    for _ in range(2):
        planner.took(beside, beside.chosen.load.work_s + 0.1, beside=True)  # type: ignore[union-attr]
    assert planner.plan(ask(*NAMES)).chosen.load.share == pytest.approx(1.0)  # type: ignore[union-attr]
    planner = replace(planner, is_busy=lambda: False)
    assert planner.plan(ask(*NAMES)).chosen.load.share == pytest.approx(0.2)  # type: ignore[union-attr]


@pytest.mark.parametrize(("load_s", "alone", "tried"), [(0.42, 1.25, True), (0.482, 1.15, False)])
def test_beside_others_only_a_load_that_wins_with_nothing_hidden_is_tried(
    load_s: float, alone: float, tried: bool
) -> None:
    """0.07 + 0.42 s wins clearly against 0.61 s, 0.07 + 0.482 s does not. Both lose a little at the
    share that those who were alone paid."""
    planner = make(load_s)
    planner = replace(planner, is_busy=lambda: True)
    planner.costs.profile.links["disk"].paid.shares = [alone] * WINDOW
    plans = [answer(planner) for _ in range(EVERY)]
    assert any(map(is_trial, plans)) == tried
    assert all(plan.strategy is None for plan in plans[:-1])


def test_a_host_load_too_small_to_tell_anything_keeps_no_tier_from_its_trial() -> None:
    """One chunk in host memory: the chosen way loads it in no time and will never be told apart."""
    stored = on_disk(*NAMES) | on_disk("c300", tier="host")
    planner = make_planner(stored=stored, links={"disk": 600_000 / 0.44, "host": 1e9})
    planner = replace(planner, now_s=lambda: 0.0)
    request = ask(*NAMES, "c300")
    plans = [answer(planner, 0.3, request) for _ in range((WINDOW - 1) * EVERY)]
    loads = [plan.chosen.load for plan in plans if not is_trial(plan)]
    assert all(load is not None and load.link == "host" and not load.tells for load in loads)
    assert sum(map(is_trial, plans)) == WINDOW - 1
    after = planner.plan(request).chosen
    assert after.load is not None
    assert (after.load.link, after.reason) == ("disk", Reason.CHEAPEST)
