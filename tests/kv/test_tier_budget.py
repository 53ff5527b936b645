"""A tier's budget: what leaves, what stays, what counts."""

from kvweave.kv.policies import LFU, LRU, ItemUsage
from kvweave.kv.tier_slot import TierBudget
from worlds.kv import make_key
from worlds.kv_checks import check_budget


def make_usage(uses: float = 1, last_access_s: float = 0.0) -> ItemUsage:
    return ItemUsage(uses, last_access_s, 10, 1.0, 1.0)


def make_budget(capacity: int = 100, entries: int = 10, size: int = 10) -> TierBudget:
    budget = TierBudget(capacity, LRU())
    for i in range(entries):
        budget.add(make_key(i), size, make_usage(last_access_s=i), reserved=False)
    return budget


def test_what_gives_way_leaves_first_and_pushes_out_its_like_alone() -> None:
    budget = make_budget()
    often = make_usage(uses=100, last_access_s=1000)._replace(gives_way=True)
    assert budget.evict_for(10, often) is None
    budget.touch(make_key(9), often)  # the newest of all
    assert budget.evict_for(10, often) == [(make_key(9), 10)]
    budget.settle(10, [(make_key(9), 10)])
    budget.add(make_key(10), 10, often, reserved=True)
    assert budget.evict_for(20, make_usage(last_access_s=11)) == [
        (make_key(10), 10),
        (make_key(0), 10),
    ]


def test_a_budget_evicts_the_oldest_and_never_the_pinned() -> None:
    budget = make_budget()
    entry = budget.get(make_key(0))
    assert entry is not None
    entry.pins = 1
    victims = budget.evict_for(25, make_usage(last_access_s=99))
    assert victims == [(make_key(i), 10) for i in (1, 2, 3)]
    budget.settle(25, victims)
    assert (budget.used_bytes, budget.reserved_bytes) == (70, 25)
    check_budget(budget)


def test_victims_count_until_they_are_gone() -> None:
    budget = make_budget(entries=2, size=50)
    victims = budget.evict_for(10, make_usage(last_access_s=99))
    assert victims == [(make_key(0), 50)]
    assert budget.free_bytes == 0
    budget.settle(10, victims)
    assert budget.free_bytes == 40


def test_a_newcomer_worth_less_is_refused_and_nothing_changes() -> None:
    budget = TierBudget(20, LFU())
    for i in range(2):
        budget.add(make_key(i), 10, make_usage(uses=5), reserved=False)
    assert budget.evict_for(10, make_usage(uses=1)) is None
    assert len(budget) == 2
    assert budget.evict_for(10, make_usage(uses=6)) is not None


def test_what_is_larger_than_the_tier_is_refused() -> None:
    budget = make_budget()
    assert budget.evict_for(101, make_usage(last_access_s=99)) is None
    assert len(budget) == 10
