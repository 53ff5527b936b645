"""Policies rank, rankings order, the clock never falls."""

import random

import pytest

from kvweave.errors import ConfigError
from kvweave.kv.policies import GDSF, LFU, LRU, PGDSF, ItemUsage, RankHeap, UsageRecord, open_policy


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


@pytest.mark.parametrize("policy", [GDSF(), PGDSF()], ids=repr)
def test_the_clock_never_falls_and_newcomers_start_at_it(policy: GDSF | PGDSF) -> None:
    policy.left(5.0)
    policy.left(3.0)
    assert policy.clock == 5.0
    assert policy.rank(make_usage()) > 5.0


def test_an_access_an_hour_ago_counts_half() -> None:
    record = UsageRecord(size=1)
    record.touch(0.0)
    record.touch(3600.0)
    assert record.seen().uses == 1.5


def test_the_cost_per_unit_is_the_mean_over_misses() -> None:
    record = UsageRecord(size=1)
    record.computed(1.0, 100)
    record.computed(3.0, 100)
    assert record.seen().cost_per_unit_s == pytest.approx(0.02)


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
