"""Prices of a machine that was measured under load follow its answers, and are kept on disk."""

import json
import logging

import pytest

from kvweave import Weave
from kvweave.app.auto.machine_profile import find_machine
from worlds.auto import GREEDY, QUESTION, World, ask, model, planning_of, weave, world

__all__ = ["model", "weave", "world"]


def test_answers_bring_a_profile_that_is_far_off_back_and_it_is_on_disk_at_once(
    world: World, weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is killed would leave it: nothing is closed before the file is read."""
    monkeypatch.setattr("kvweave.app.auto.measurements.SAVE_EVERY_S", 0.0)
    world.set_machine()  # a token takes 10 ms: many times what it takes here
    weave.plan(QUESTION)
    machine = planning_of(weave).machine
    before_s = machine.prefill.at(0, 256)
    for number in range(12):
        note = f"{number}. " + "A node is drained before it is taken away. " * 5
        weave.ask("What of nodes?", documents=[note], reuse="auto", sampling=GREEDY)
    assert machine.prefill.at(0, 256) < before_s / 3
    kept = find_machine(world.decoder)
    assert kept is not None
    assert kept.prefill.at(0, 256) == pytest.approx(machine.prefill.at(0, 256), rel=0.5)
    assert kept.heard.exact + kept.heard.fused >= 11


def test_a_new_measurement_is_not_overwritten_by_what_an_older_one_learnt(
    world: World, weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.app.auto.measurements.SAVE_EVERY_S", 0.0)
    path = world.set_machine()
    weave.plan(QUESTION)
    renewed = find_machine(world.decoder)
    assert renewed is not None
    renewed.measured_s = 2e9
    renewed.save(path)  # as `kvweave measure --renew` beside a server does
    ask(weave)
    kept = find_machine(world.decoder)
    assert kept is not None
    assert kept.measured_s == 2e9


def test_a_profile_of_an_earlier_version_is_measured_anew_without_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    path = world.set_machine()
    saved = json.loads(path.read_text())
    saved["heard"]["fused_s"] = 0.0
    path.write_text(json.dumps({**saved, "version": 2, "doubts": ["busy"], "spread": 2.0}))
    with caplog.at_level(logging.WARNING):
        assert find_machine(world.decoder) is None
    assert not caplog.records
