"""A doubtful profile in the cache is told of at the start, serves, and is renewed when idle."""

import logging
import time

import pytest

from kvweave import Weave
from kvweave.app.auto.machine_profile import find_machine
from kvweave.plan.profile import Grid, load_profile
from worlds.auto import World, model, planning_of, weave, world

__all__ = ["model", "weave", "world"]


def test_a_doubtful_profile_is_told_of_and_renewed_in_idle_time(
    world: World, weave: Weave, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.app.auto.machine_profile.PREFILL_BUDGET_S", 0.3)
    monkeypatch.setattr("kvweave.app.auto.machine_profile.RECOMPUTE_BUDGET_S", 0.3)
    monkeypatch.setattr("kvweave.app.auto.profile_keeper.PAUSE_S", 0.0)
    path = world.set_machine()
    saved = load_profile(path)
    saved.recompute = Grid((2048,), (1, 1000), [[0.1, 100.0]])  # ten times prefill
    saved.save(path)
    with caplog.at_level(logging.WARNING):
        weave.measure()  # as a server does before it is ready
    assert [r.message for r in caplog.records if "are doubtful: recomputing" in r.message]
    machine = weave._answerer.measured.machine
    give_up_s = time.monotonic() + 60
    while not machine.measured_s and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert machine.measured_s > 0
    assert machine.prefill.at(0, 256) < 1.0, "a token never took 10 ms here"
    weave.plan("How do I drain a node?")
    assert planning_of(weave).machine is machine
    kept = find_machine(world.decoder)
    assert kept is not None
    assert kept.measured_s == machine.measured_s
