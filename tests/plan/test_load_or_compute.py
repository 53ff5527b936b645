"""Loading that nothing hides is held against computing, tier by tier."""

import pytest

from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.options import Candidate, find_hits, price_fused, too_slow_links, unhidden_links
from kvweave.plan.plan import Option, lay_out
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from kvweave.types import ChunkId
from worlds.plan import on_disk
from worlds.tree import World, refs

POOL = ["a300", "b200", "c100", "d64", "e400"]


def make_costs(shares: dict[str, float] | None = None, **speeds: float) -> CostModel:
    """A millisecond per token."""
    grid = Grid((0,), (1, 1000), [[0.001, 1.0]])
    links = {name: TierLink(speed) for name, speed in speeds.items()}
    profile = MachineProfile("m", "test", 10, grid, grid, links)
    return CostModel(profile, shares=shares or {})


def test_a_link_is_too_dear_when_loading_costs_more_than_the_rows_it_saves() -> None:
    costs = make_costs(disk=1.25e7)  # 0.08 s for a megabyte, paid for with a quarter more
    dear = unhidden_links(costs, 1000, 10, {"disk": 100}, {"disk": 1_000_000})
    assert dear[0].times == pytest.approx(1.0)
    assert too_slow_links(dear, 0.0) == set(), "the same: loaded"
    assert too_slow_links(dear, 0.1) == {"disk"}, "a tenth of its rows is computed anyway"


def test_rows_that_were_measured_on_a_busy_machine_do_not_make_loading_dear() -> None:
    """128 and 384 rows took the same time there: as if a thousand more would cost nothing."""
    grid = Grid((512, 2048), (32, 128, 384), [[0.1, 0.5, 0.5]] * 2)
    profile = MachineProfile("m", "test", 10, grid, grid, {"disk": TierLink(1.7e8)})
    costs = CostModel(profile)
    dear = unhidden_links(costs, 1050, 20, {"disk": 1000}, {"disk": 6_000_000})
    assert too_slow_links(dear, 0.35) == set(), "35 ms against a second"


def test_a_link_that_is_hidden_is_never_too_dear() -> None:
    costs = make_costs({"disk": 0.9}, disk=1.0)
    assert unhidden_links(costs, 1000, 10, {"disk": 100}, {"disk": 1_000_000}) == ()


def test_without_the_slowest_link_the_next_one_is_waited_for() -> None:
    """Each alone is too dear; to compute the slowest alone saves next to nothing."""
    costs = make_costs(disk=5e6, remote=4.9e6)
    tokens, loads = dict.fromkeys(("disk", "remote"), 100), {"disk": 10**6, "remote": 10**6}
    dear = unhidden_links(costs, 1000, 10, tokens, loads)
    assert [each.link for each in dear] == ["remote", "disk"]
    assert dear[0].times < 0.1 < 1 < dear[1].times
    assert too_slow_links(dear, 0.15) == set()


def test_rows_that_leave_early_are_paid_for_as_parts_of_rows() -> None:
    """A way at 0.4 whose rows run through half of the layers costs what one at 0.2 does; it still
    holds twice the rows."""
    costs = make_costs(disk=1e9)
    tree, parts = World(device_tokens=700).tree, tuple(refs(["a300", "b200", "e400"]))
    found = {ChunkId(name): [copy] for name, copy in on_disk("a300", "b200", "e400").items()}
    match = tree.match([part.id for part in parts])
    layout = lay_out(tree.root, match, parts, found, 10, costs.can_load, 0)

    def priced(strategy: StrategyInfo, ratio: float) -> Option:
        hits = find_hits(costs, layout, strategy)
        outcome = price_fused(costs, layout, hits, strategy, ratio)
        assert isinstance(outcome, Candidate)
        return outcome.option

    half, whole = StrategyInfo("half", depth=0.5), StrategyInfo("whole")
    ours, plain = priced(half, 0.4), priced(whole, 0.2)
    assert ours.predicted_s == pytest.approx(plain.predicted_s)
    assert ours.rows == priced(whole, 0.4).rows > plain.rows
