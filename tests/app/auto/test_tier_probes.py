"""A tier that fails or hangs is met again after a while, and no plan waits for it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.app.auto.lessons import FIRST_REST_S, WAIT_S, TierProbes
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import open_tier
from kvweave.plan.loading_cost import PaidShares
from kvweave.plan.profile import TierLink
from worlds.faulty import FaultPlan, FaultyTier
from worlds.kv import LAYERS, make_chunk, make_config, make_key
from worlds.tree import Clock


class World:
    """A disk that can be made to fail, and what is known of its speed."""

    def __init__(self, root: Path) -> None:
        cfg = make_config(root, host_chunks=None)
        (disk,) = [open_tier(tier) for tier in cfg.tiers]
        self.tier = FaultyTier(disk, FaultPlan())
        self.store = KVStore(cfg, tiers=[OpenTier(self.tier, 1 << 20)])
        self.store.save(make_chunk(0), wait_s=10)
        assert self.store.flush()
        self.links: dict[str, TierLink] = {}
        self.clock = Clock()
        self.probes = TierProbes(self.store, LAYERS, "raw", self.links, self.clock)

    def meet(self) -> None:
        self.store.inventory.slots[
            0
        ].reads.record_success()  # the store rests a failing tier by itself
        keys = [make_key(0)]
        self.probes.meet(list(zip(keys, self.store.peek(keys), strict=True)))

    def loads(self) -> float:
        return self.store.metrics.value("kv_loads_total")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.tier.release()
    world.store.close()


def test_a_tier_is_met_once_and_its_speed_kept_by_codec(world: World) -> None:
    world.meet()
    assert list(world.links) == ["faulty disk/raw"]
    world.meet()
    assert world.loads() == 1


def test_a_failed_probe_is_not_repeated_by_every_plan_and_rests_longer_each_time(
    world: World,
) -> None:
    world.tier.plan = FaultPlan(fail=1.0)
    for _ in range(5):
        world.meet()
    assert (world.loads(), world.links) == (1, {})
    world.clock.now_s += FIRST_REST_S
    world.meet()
    world.clock.now_s += FIRST_REST_S
    world.meet()
    assert world.loads() == 2, "the second rest is twice as long"
    world.tier.plan = FaultPlan()
    world.clock.now_s += FIRST_REST_S
    world.meet()
    assert list(world.links) == ["faulty disk/raw"]


def test_a_hung_tier_costs_a_plan_a_moment_and_others_nothing(world: World) -> None:
    world.meet()  # located: what follows hangs in reading, not in looking
    world.links.clear()
    world.tier.plan = FaultPlan(hang=1.0)
    started_s = time.monotonic()
    world.meet()
    assert time.monotonic() - started_s < WAIT_S + 0.5
    assert world.links == {}


def test_a_tier_known_for_long_is_measured_again_without_waiting(world: World) -> None:
    alone, beside = PaidShares([2.0, 3.0], 1.0), PaidShares([4.0], 1.0)
    world.links["faulty disk/raw"] = TierLink(1.0, seen_s=-1e9, paid=alone, paid_beside=beside)
    world.tier.plan = FaultPlan(delay=1.0, delay_s=0.05)
    started_s = time.monotonic()
    world.meet()
    assert time.monotonic() - started_s < WAIT_S, "an old speed does until the new one is there"
    give_up_s = time.monotonic() + 10
    while world.links["faulty disk/raw"].bytes_per_s == 1.0 and time.monotonic() < give_up_s:
        time.sleep(0.02)
        world.meet()
    assert world.links["faulty disk/raw"].bytes_per_s > 1.0
    found = world.links["faulty disk/raw"]
    assert (found.paid, found.paid_beside) == (alone, beside), "what requests found stays"
