"""Arena, shelf, breaker, pool and metrics: the parts that only count."""

import random
import threading
import time

import pytest

from kvweave.kv.breaker import Breaker
from kvweave.kv.io_pool import IoPool
from kvweave.kv.memory import Arena
from kvweave.kv.policies import LFU, LRU, ItemUsage
from kvweave.kv.tier_budget import TierBudget
from kvweave.metrics import Metrics
from worlds.kv import make_key


def make_usage(uses: float = 1, last_access_s: float = 0.0) -> ItemUsage:
    return ItemUsage(uses, last_access_s, 10, 1.0, 1.0)


def make_shelf(capacity: int = 100, entries: int = 10, size: int = 10) -> TierBudget:
    shelf = TierBudget(capacity, LRU())
    for i in range(entries):
        shelf.add(make_key(i), size, make_usage(last_access_s=i), reserved=False)
    return shelf


def test_what_gives_way_leaves_first_and_pushes_out_its_like_alone() -> None:
    shelf = make_shelf()
    often = make_usage(uses=100, last_access_s=1000)._replace(gives_way=True)
    assert shelf.evict_for(10, often) is None
    shelf.touch(make_key(9), often)  # the newest of all
    assert shelf.evict_for(10, often) == [(make_key(9), 10)]
    shelf.settle(10, [(make_key(9), 10)])
    shelf.add(make_key(10), 10, often, reserved=True)
    assert shelf.evict_for(20, make_usage(last_access_s=11)) == [
        (make_key(10), 10),
        (make_key(0), 10),
    ]


def test_an_arena_takes_the_best_hole_and_joins_neighbours() -> None:
    arena = Arena(10 * 16, align=16)
    starts = [arena.take(n * 16) for n in (2, 1, 3, 4)]
    assert starts == [0, 32, 48, 96]
    assert arena.take(1) is None
    arena.give_back(48)
    arena.give_back(0)
    assert arena.take(17) == 0  # two units: the small hole, not the large one
    arena.give_back(32)
    assert arena.take(4 * 16) == 32
    arena.check_integrity()


def test_an_arena_survives_random_use() -> None:
    rng = random.Random(1)
    arena = Arena(64 * 16, align=16)
    taken: list[int] = []
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            arena.give_back(taken.pop(rng.randrange(len(taken))))
        else:
            start = arena.take(rng.randint(1, 200))
            if start is not None:
                taken.append(start)
        arena.check_integrity()
    for start in taken:
        arena.give_back(start)
    assert arena.take(64 * 16) == 0


def test_giving_back_twice_is_a_bug_that_shows() -> None:
    arena = Arena(160, align=16)
    start = arena.take(16)
    assert start is not None
    arena.give_back(start)
    with pytest.raises(KeyError):
        arena.give_back(start)


def test_a_shelf_evicts_the_oldest_and_never_the_pinned() -> None:
    shelf = make_shelf()
    entry = shelf.get(make_key(0))
    assert entry is not None
    entry.pins = 1
    victims = shelf.evict_for(25, make_usage(last_access_s=99))
    assert victims == [(make_key(i), 10) for i in (1, 2, 3)]
    shelf.settle(25, victims)
    assert (shelf.used_bytes, shelf.reserved_bytes) == (70, 25)
    shelf.check_integrity()


def test_victims_count_until_they_are_gone() -> None:
    shelf = make_shelf(entries=2, size=50)
    victims = shelf.evict_for(10, make_usage(last_access_s=99))
    assert victims == [(make_key(0), 50)]
    assert shelf.free_bytes == 0
    shelf.settle(10, victims)
    assert shelf.free_bytes == 40


def test_a_newcomer_worth_less_is_refused_and_nothing_changes() -> None:
    shelf = TierBudget(20, LFU())
    for i in range(2):
        shelf.add(make_key(i), 10, make_usage(uses=5), reserved=False)
    assert shelf.evict_for(10, make_usage(uses=1)) is None
    assert len(shelf) == 2
    assert shelf.evict_for(10, make_usage(uses=6)) is not None


def test_what_is_larger_than_the_tier_is_refused() -> None:
    shelf = make_shelf()
    assert shelf.evict_for(101, make_usage(last_access_s=99)) is None
    assert len(shelf) == 10


def test_a_breaker_opens_after_failures_probes_once_and_doubles_its_rest() -> None:
    now = [0.0]
    breaker = Breaker("disk reads", max_failures=2, rest_s=5.0, clock=lambda: now[0])
    breaker.failed("one")
    assert breaker.allows()
    breaker.failed("two")
    assert breaker.is_open
    assert not breaker.allows()
    now[0] = 5.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.failed("three")
    now[0] = 14.0
    assert not breaker.allows()
    now[0] = 15.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open


def test_a_breaker_says_once_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    breaker = Breaker("disk writes", max_failures=1, rest_s=60.0)
    for _ in range(5):
        breaker.failed("free some space")
    assert [r.getMessage() for r in caplog.records].count(
        "disk writes fail and rest for a while; requests recompute. free some space"
    ) == 1


def test_a_pool_whose_threads_hang_says_for_how_long() -> None:
    pool = IoPool("test", 2)
    gate = threading.Event()
    assert pool.stalled_s() == 0.0
    for _ in range(3):
        pool.submit(lambda: gate.wait() and None)
    time.sleep(0.05)
    assert pool.stalled_s() >= 0.05
    pool.close(timeout_s=0.05)  # returns although two threads hang
    gate.set()
    assert not pool.submit(lambda: None)


def test_counters_add_over_labels_and_threads() -> None:
    metrics = Metrics()

    def work() -> None:
        for i in range(1000):
            metrics.count("kv_loads_total", tier="disk" if i % 2 else "host")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.gauge("kv_tier_bytes", 7, tier="disk")
    assert metrics.value("kv_loads_total") == 4000
    assert metrics.value("kv_loads_total", tier="disk") == 2000
    assert metrics.value("nothing") == 0
    assert [s.name for s in metrics.snapshot()] == ["kv_loads_total"] * 2 + ["kv_tier_bytes"]
