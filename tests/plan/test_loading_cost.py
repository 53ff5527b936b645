"""What a request pays for its loading: nothing is assumed hidden, requests tell, time forgets."""

from dataclasses import replace

import pytest

from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.loading_cost import FORGET_S, MOST, UNCHECKED, WINDOW, Load, PaidShares
from kvweave.plan.plan import Plan
from kvweave.plan.planner import Planner
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.reasons import Reason
from worlds.plan import EPIC, OpenGate, ask, make_planner, on_disk, price_fused, why

LOAD = Load("disk", 1.0, UNCHECKED, 0.5, 1.0)  # a second of loading, half a second of work


def told(*shares: float, at_s: float = 0.0) -> PaidShares:
    """After requests that paid these shares of LOAD."""
    paid = PaidShares()
    for share in shares:
        paid.observe(LOAD, LOAD.work_s + share * LOAD.seconds, at_s)
    return paid


def test_what_nobody_told_is_dearer_than_no_overlap() -> None:
    assert PaidShares().share(UNCHECKED, 0.0) == UNCHECKED > 1


def test_one_outlier_changes_nothing_and_two_slow_loads_do() -> None:
    assert told(3.0).share(UNCHECKED, 0.0) == UNCHECKED
    assert told(3.0, 2.0).share(UNCHECKED, 0.0) == pytest.approx(2.0)
    assert told(*[1.0] * 9, 3.0).share(UNCHECKED, 0.0) == pytest.approx(1.0)


def test_fast_loads_are_believed_when_there_are_four() -> None:
    assert told(0.2, 0.2, 0.2).share(UNCHECKED, 0.0) == UNCHECKED
    assert told(0.2, 0.2, 0.2, 0.2).share(UNCHECKED, 0.0) == pytest.approx(0.2)


def test_only_the_last_requests_count() -> None:
    assert told(*[3.0] * 9, *[0.5] * WINDOW).share(UNCHECKED, 0.0) == pytest.approx(0.5)


def test_a_stall_counts_as_much_as_the_slowest_pace_and_a_gain_as_nothing_paid() -> None:
    assert told(100.0, 100.0).shares == [MOST, MOST]
    paid = PaidShares()
    paid.observe(LOAD, 0.1, 0.0)  # faster than its work alone
    assert paid.shares == [0.0]


def test_a_small_load_says_nothing() -> None:
    paid = PaidShares()
    paid.observe(LOAD._replace(seconds=0.05), 2.0, 0.0)
    assert paid.shares == []


def test_slow_loads_are_forgotten_one_by_one_the_highest_first() -> None:
    paid = told(2.0, 3.0, 4.0)
    assert paid.share(UNCHECKED, FORGET_S - 1) == pytest.approx(3.0)
    assert paid.share(UNCHECKED, FORGET_S) == pytest.approx(2.0)
    assert paid.share(UNCHECKED, 2 * FORGET_S) == UNCHECKED
    paid.observe(LOAD, 0.5 + 4.0, 2 * FORGET_S)
    assert paid.shares == pytest.approx([2.0, 4.0]), "what was forgotten stays forgotten"


def test_a_tier_that_nobody_loads_from_gets_cheaper_until_one_request_tries() -> None:
    silent, told_twice = PaidShares(at_s=5.0), told(3.0, 3.0, at_s=5.0)
    assert silent.share(UNCHECKED, 5.0 + FORGET_S - 1) == UNCHECKED
    assert silent.share(UNCHECKED, 5.0 + FORGET_S) == UNCHECKED / 2
    assert told_twice.share(UNCHECKED, 5.0 + 2 * FORGET_S) == UNCHECKED
    assert told_twice.share(UNCHECKED, 5.0 + 4 * FORGET_S) == UNCHECKED / 4
    silent.observe(LOAD, 0.5 + 2.0, 5.0 + 9 * FORGET_S)
    assert silent.share(UNCHECKED, 5.0 + 9 * FORGET_S) == UNCHECKED, "it told: back to the start"
    assert PaidShares().share(UNCHECKED, 1e9) == UNCHECKED, "since when is not known"


def test_shares_of_a_clock_that_was_set_back_lock_no_tier_out() -> None:
    later_s = 1000 * FORGET_S
    paid = told(*[4.0] * WINDOW, at_s=later_s)
    assert paid.share(UNCHECKED, later_s - 1) == pytest.approx(4.0), "a second is no setting back"
    assert paid.share(UNCHECKED, 0.0) == UNCHECKED
    paid.observe(LOAD, 0.5 + 0.2, 0.0)
    assert paid.shares == pytest.approx([0.2])


def costs(share: float | None = None) -> CostModel:
    """A millisecond per token; a megabyte is a second from disk and a tenth from host."""
    grid = Grid((0,), (1, 1000), [[0.001, 1.0]])
    links = {"disk": TierLink(1e6), "host": TierLink(1e7)}
    shares = {} if share is None else {"disk": share}
    profile = MachineProfile("m", "test", 10, grid, grid, links)
    return CostModel(profile, shares=shares)


LOADS = {"disk": 1_000_000}


def test_an_unchecked_tier_is_priced_as_if_nothing_overlapped_and_more() -> None:
    price = price_fused(costs(), EPIC, 500, 1000, 10, 800, LOADS)
    assert price.seconds == pytest.approx(0.5 + UNCHECKED * (1.0 + 0.1))
    assert price.load == ("disk", pytest.approx(1.1), UNCHECKED, 0.5, pytest.approx(1.05))


def test_a_share_of_nothing_is_perfect_overlap_and_no_price_is_below_it() -> None:
    assert price_fused(costs(0.0), EPIC, 500, 1000, 10, 800, LOADS).seconds == pytest.approx(1.05)
    assert price_fused(costs(0.1), EPIC, 500, 1000, 10, 800, LOADS).seconds == pytest.approx(1.05)
    assert price_fused(costs(0.9), EPIC, 500, 1000, 10, 800, LOADS).seconds == pytest.approx(1.49)


def test_host_memory_is_hidden_until_seen_otherwise() -> None:
    price = costs().prefix(500, 1000, {"host": 1_000_000})
    assert price.seconds == pytest.approx(0.5, abs=0.02)
    assert price.load is not None
    assert price.load.share == 0.0


def test_of_two_tiers_the_one_that_is_paid_for_longest_is_named() -> None:
    price = costs().prefix(500, 1000, {"host": 9_000_000, "disk": 100_000})
    assert price.load is not None
    assert price.load.link == "disk"
    assert price.seconds >= 0.9


# ---- the planner


def fused(plan: Plan) -> bool:
    return plan.strategy == "epic"


def optimistic() -> Planner:
    """Full prefill takes 0.61 s; from disk it is thought to take 0.07 + 0.1 of loading."""
    return make_planner(stored=on_disk("a300", "b300"), links={"disk": 6e6})


def test_a_price_that_is_too_low_is_corrected_after_two_requests() -> None:
    planner, request = optimistic(), ask("a300", "b300")
    planner = replace(planner, now_s=lambda: 0.0)
    for _ in range(2):
        plan = planner.plan(request)
        assert fused(plan)
        planner.learn_load(plan, 1.5)
    corrected = planner.plan(request)
    assert not fused(corrected)
    assert why(corrected, "fused epic") is not Reason.CHEAPEST


def test_a_tier_that_was_shut_out_is_tried_again_and_stays_if_it_recovered() -> None:
    planner, request = optimistic(), ask("a300", "b300")
    now_s = 0.0
    planner = replace(planner, now_s=lambda: now_s)
    for _ in range(WINDOW):
        planner.learn_load(planner.plan(request), 1.5)
    for _ in range(7):
        now_s += 0.9 * FORGET_S
        assert not fused(planner.plan(request)), "not before something is forgotten"
        now_s += 0.2 * FORGET_S
        plan = planner.plan(request)
        assert fused(plan), "then one request tries"
        planner.learn_load(plan, 1.5)
        assert not fused(planner.plan(request)), "and the next ones know"
    now_s += 9 * FORGET_S
    for _ in range(9):
        plan = planner.plan(request)
        assert fused(plan)
        planner.learn_load(plan, 0.15)
    assert plan.chosen.predicted_s == pytest.approx(0.15, rel=0.2)


def test_what_a_request_pays_for_one_codec_is_none_of_anothers() -> None:
    names = ("a300", "b300")
    stored = {n: c._replace(codec="int8") for n, c in on_disk(*names).items()}
    planner = make_planner(stored=stored, links={"disk/int8": 6e6, "disk/raw": 6e6})
    for _ in range(2):
        planner.learn_load(planner.plan(ask(*names)), 1.5)
    links = planner.costs.profile.links
    assert len(links["disk/int8"].paid.shares) == 2
    assert not links["disk/raw"].paid.shares


def test_a_plan_that_loads_nothing_teaches_nothing() -> None:
    planner = make_planner()
    planner.learn_load(planner.plan(ask("a300")), 99.0)
    assert not any(link.paid.shares for link in planner.costs.profile.links.values())


def test_between_equal_prices_the_one_that_could_hide_more_is_taken() -> None:
    waiting = StrategyInfo("prophet", waits_for_all=True)
    planner = make_planner(
        stored=on_disk("a300", "b300"),
        links={"disk": 5e6},
        gate=OpenGate(epic=0.3, prophet=0.3),
    )
    plan = planner.plan(ask("a300", "b300", strategies=(waiting, EPIC)))
    prices = {o.name: o.predicted_s for o in plan.options}
    assert prices["fused prophet"] == prices["fused epic"]
    assert fused(plan)
