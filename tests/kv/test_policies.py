"""Policies rank, rankings order, the clock never falls."""

import random

import pytest

from kvweave.errors import ConfigError
from kvweave.kv.policies import (
    GDSF,
    HALF_LIFE_S,
    LFU,
    LRU,
    PGDSF,
    ItemUsage,
    RankHeap,
    UsageRecord,
    open_policy,
)


def make_usage(
    uses: float = 1,
    last_access_s: float = 0,
    size: int = 100,
    cost_s: float = 1,
    per_unit: float = 1,
) -> ItemUsage:
    return ItemUsage(uses, last_access_s, size, cost_s, per_unit)


def test_lru_keeps_the_recent_and_lfu_the_frequent() -> None:
    old_and_frequent = make_usage(uses=9, last_access_s=1)
    new_and_rare = make_usage(uses=1, last_access_s=2)
    assert LRU().rank(new_and_rare) > LRU().rank(old_and_frequent)
    assert LFU().rank(new_and_rare) < LFU().rank(old_and_frequent)


@pytest.mark.parametrize("policy", [GDSF(), PGDSF()], ids=repr)
def test_of_two_equals_the_cheaper_and_the_rarer_leave_first(policy: GDSF | PGDSF) -> None:
    base = policy.rank(make_usage())
    assert policy.rank(make_usage(cost_s=0.5, per_unit=0.5)) < base
    assert policy.rank(make_usage(uses=0.5)) < base


def test_gdsf_prefers_small_things_and_pgdsf_has_size_divided_out() -> None:
    assert GDSF().rank(make_usage(size=10)) > GDSF().rank(make_usage(size=100))
    assert PGDSF().rank(make_usage(size=10)) == PGDSF().rank(make_usage(size=100))


def test_the_clock_of_gdsf_never_falls_and_newcomers_start_at_it() -> None:
    policy = GDSF()
    policy.record_eviction(5.0)
    policy.record_eviction(3.0)
    assert policy.clock == 5.0
    assert policy.rank(make_usage()) > 5.0


def test_an_access_of_a_half_life_ago_counts_half() -> None:
    record = UsageRecord(size=1)
    record.touch(0.0)
    record.touch(HALF_LIFE_S)
    assert record.snapshot().uses == 1.5


@pytest.mark.parametrize("later_s", [1.0, 1e4, 1e7])
def test_the_order_by_heat_is_that_of_the_counts_as_they_have_decayed(later_s: float) -> None:
    rng = random.Random(0)
    usages = [
        make_usage(uses=rng.uniform(0.5, 9), last_access_s=rng.uniform(0, 9 * HALF_LIFE_S))
        for _ in range(50)
    ]
    now_s = 9 * HALF_LIFE_S + later_s

    def decayed(usage: ItemUsage) -> float:
        return usage.uses * 0.5 ** ((now_s - usage.last_access_s) / HALF_LIFE_S)

    assert sorted(usages, key=lambda u: u.heat) == sorted(usages, key=decayed)
    policy = PGDSF()
    assert sorted(usages, key=policy.rank) == sorted(usages, key=decayed), "at the same cost"


def test_twice_the_cost_is_worth_twice_the_uses() -> None:
    policy = PGDSF()
    assert policy.rank(make_usage(uses=4, per_unit=1)) == policy.rank(make_usage(2, per_unit=2))


def test_what_was_never_used_leaves_first_and_unknown_costs_leave_the_order_to_use() -> None:
    policy = PGDSF()
    unknown = make_usage(uses=1, per_unit=0)
    assert policy.rank(make_usage(uses=0)) < policy.rank(unknown)
    assert policy.rank(unknown) < policy.rank(make_usage(uses=2, per_unit=0))
    assert policy.rank(make_usage(uses=2, per_unit=0)) < policy.rank(make_usage(uses=1))


def test_the_cost_per_unit_is_the_mean_over_misses() -> None:
    record = UsageRecord(size=1)
    record.record_computation(1.0, 100)
    record.record_computation(3.0, 100)
    assert record.snapshot().cost_per_unit_s == pytest.approx(0.02)


def test_a_ranking_yields_the_lowest_that_may_leave_like_a_sorted_list() -> None:
    rng = random.Random(0)
    ranking: RankHeap[int] = RankHeap()
    model: dict[int, float] = {}
    for step in range(3000):
        thing = rng.randrange(50)
        if rng.random() < 0.2 and thing in model:
            ranking.remove(thing)
            del model[thing]
        else:
            model[thing] = rng.random()
            ranking.set(thing, model[thing], step)
        if step % 100 == 0:
            got = [t for t, _ in ranking.lowest(lambda t: t % 3 != 0)]
            assert got == sorted((t for t in model if t % 3), key=model.__getitem__)
    assert len(ranking) == len(model)


def test_an_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="no policy 'fifo'; known: gdsf, lfu, lru, pgdsf"):
        open_policy("fifo")
