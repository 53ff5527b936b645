"""What answers teach the planner, also those that others run beside."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.engine.request import EngineRequest
from kvweave.engine.sampling import Sampling
from kvweave.fuse.record import JOINED
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.plan.plan import Plan
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from worlds.auto import QUESTION, TEXTS, World, ask, load_links, model, planning_of, world
from worlds.weaves import ingest_with_fronts

__all__ = ["model", "world"]

LINK = "disk/int8"


@pytest.fixture
def weave(world: World, tmp_path: Path) -> Iterator[Weave]:
    """With chunk KV on disk alone, and a strategy that reuses all of it."""
    world.tier = DiskTierConfig(tmp_path / "disk")
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
        world.set_machine()
        weave.plan(QUESTION)  # opens the planning
        yield weave


def load_in(weave: Weave, seconds: float) -> Plan:
    """Have the planner think that the chunks take so long to load."""
    links = load_links(weave)
    links[LINK] = TierLink(1e12, seen_s=time.time())
    size_bytes = weave.plan(QUESTION).chosen.load_bytes
    links[LINK] = TierLink(size_bytes / seconds, seen_s=time.time())
    return weave.plan(QUESTION)


@contextmanager
def company(weave: Weave) -> Iterator[None]:
    """Somebody else is being answered all the while."""
    request = EngineRequest((5, 6, 7), Sampling(max_tokens=3000), frozenset())
    ticket = weave.engine.submit(request)
    next(ticket)
    yield
    assert not ticket.is_done, "it was to last longer than the answers beside it"
    ticket.cancel()


def test_a_server_that_is_always_busy_learns_what_its_requests_pay(weave: Weave) -> None:
    load_in(weave, 1.0)
    paid = load_links(weave)[LINK]
    with company(weave):
        answer = ask(weave)
    assert answer.explain is not None
    assert answer.explain.way == JOINED
    assert answer.explain.counts["reused"]
    assert paid.paid.shares == [], "it was not alone"
    (share,) = paid.paid_beside.shares
    waited_s = answer.explain.stages.load / 1e3
    assert share == pytest.approx(waited_s, rel=0.01), "of a second, whatever its steps took"
    ask(weave)
    assert (len(paid.paid.shares), len(paid.paid_beside.shares)) == (1, 1)


def test_prices_of_a_server_that_is_always_busy_come_down_too(weave: Weave) -> None:
    """What was measured under load must not stay: nobody is ever alone there."""
    machine = planning_of(weave).machine
    before_s = machine.recompute.at(1000, 100)
    with company(weave):
        for _ in range(6):
            ask(weave)
    assert machine.heard.fused + machine.heard.exact >= 6
    assert machine.recompute.at(1000, 100) < before_s / 2
    cheap = MachineProfile("m", "cpu", 3, *[Grid((0,), (1, 1000), [[1e-9, 1e-6]])] * 2)
    machine.prefill, machine.recompute = cheap.prefill, cheap.recompute
    with company(weave):
        ask(weave)
    assert machine.recompute.at(1000, 100) == cheap.recompute.at(1000, 100), "never dearer"


def test_beside_others_the_price_is_what_those_beside_others_paid(weave: Weave) -> None:
    load_in(weave, 1.0)
    load_links(weave)[LINK].paid_beside.shares = [3.0] * 5
    load_links(weave)[LINK].paid_beside.at_s = time.time()
    alone = weave.plan(QUESTION).chosen.load
    assert alone is not None
    assert alone.share != 3.0
    with company(weave):
        beside = ask(weave).decision
    assert beside is not None
    assert beside.plan.chosen.load is not None
    assert beside.plan.chosen.load.share == 3.0
