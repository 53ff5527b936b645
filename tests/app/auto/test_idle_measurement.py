"""A machine that never was measured is, when nothing is answered; no answer waits for long."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvweave.app.auto.machine_profile import Measurement, find_machine
from kvweave.app.auto.measurements import IdleMeasurement, Measurements
from kvweave.app.auto.other_work import BUSY_CORES, STAT, OtherWork
from kvweave.app.library.library_kv import CODEC
from kvweave.app.library.runtime import ModelRuntime
from kvweave.plan.profile import MachineProfile
from worlds.auto import World, model, world

__all__ = ["model", "world"]

LONG_S = 60.0


class Owner:
    """What a planner does with a new measurement."""

    def __init__(self, world: World) -> None:
        self.runtime = ModelRuntime(world.decoder, world.tokenizer, "tiny")
        self.decoder = world.decoder
        self.machine: MachineProfile | None = None
        self.is_found = threading.Event()

    def take(self, measured: MachineProfile) -> None:
        self.machine = measured
        self.is_found.set()

    def measure(self) -> IdleMeasurement:
        return IdleMeasurement(self.decoder, CODEC, self.runtime.client, self.take)


@pytest.fixture
def owner(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr("kvweave.app.auto.machine_profile.PREFILL_BUDGET_S", 0.3)
    monkeypatch.setattr("kvweave.app.auto.machine_profile.RECOMPUTE_BUDGET_S", 0.3)
    monkeypatch.setattr("kvweave.app.auto.measurements.PAUSE_S", 0.0)
    owner = Owner(world)
    yield owner
    owner.runtime.close()


def test_a_machine_is_measured_and_kept(owner: Owner) -> None:
    idle = owner.measure()
    assert idle.wait(LONG_S)
    assert owner.machine is not None
    assert 0 < owner.machine.prefill.at(0, 256) < 1.0, "a token never took 4 ms here"
    kept = find_machine(owner.decoder)
    assert kept is not None
    assert kept.measured_s == owner.machine.measured_s > 0
    idle.close()


def test_nothing_is_measured_while_an_answer_is_in_the_making(owner: Owner) -> None:
    with owner.runtime.client.answers.one():
        idle = owner.measure()
        assert not idle.wait(0.3)
        assert not owner.is_found.is_set()
    assert idle.wait(LONG_S)
    assert owner.is_found.is_set()
    idle.close()


def test_closing_ends_a_measurement_at_once(owner: Owner) -> None:
    with owner.runtime.client.answers.one():  # never idle
        idle = owner.measure()
        started_s = time.monotonic()
        idle.close()
        assert time.monotonic() - started_s < 5.0
    assert not owner.is_found.is_set()
    assert find_machine(owner.decoder) is None


def test_a_closed_engine_ends_it_without_a_word(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.runtime.close()
    idle = owner.measure()
    assert idle.wait(LONG_S)
    assert not caplog.records
    idle.close()


def test_a_measurement_in_pieces_prices_long_prompts_by_its_slices(owner: Owner) -> None:
    measurement = Measurement(owner.decoder, CODEC, longest_s=0.3)
    num = 0
    while measurement.step():
        num += 1
    found = measurement.profile()
    assert num > 10
    assert max(found.recompute.ys) <= 128
    assert found.prefill.ys[-1] >= 1024
    assert found.prefill.at(0, 1024) > found.prefill.at(0, 64)


@contextmanager
def busy_loop() -> Iterator[None]:
    """Another program that wants a core."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


@pytest.mark.skipif(not STAT.exists(), reason="the system does not tell what others use")
def test_other_programs_are_seen_and_own_work_is_not_theirs() -> None:
    with busy_loop():
        others = OtherWork()
        time.sleep(1.0)
        assert others.cores() > BUSY_CORES
    others, began_s, began_own_s = OtherWork(), time.monotonic(), time.process_time()
    matrix = torch.ones(512, 512)
    while time.monotonic() - began_s < 1.0:  # on all cores
        matrix = (matrix @ matrix).clamp(max=1.0)
    own = (time.process_time() - began_own_s) / (time.monotonic() - began_s)
    num_cores = os.cpu_count() or 1
    assert others.cores() <= num_cores - own + 0.3, "what is left for other tests"


def test_what_was_measured_beside_other_programs_is_measured_again_once_they_rest(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s = 0.0

    def others_work() -> float:
        nonlocal used_s
        used_s += 1e3
        return used_s

    where = "kvweave.app.auto.other_work._used_by_others_s"
    monkeypatch.setattr(where, others_work)
    measured = Measurements(owner.runtime, CODEC)
    measured.measure()
    assert measured.machine.is_provisional
    first_s = measured.machine.measured_s
    measured.measure_when_idle()
    time.sleep(0.3)
    assert measured.machine.measured_s == first_s, "they still do"
    monkeypatch.setattr(where, lambda: 0.0)
    until_s = time.monotonic() + LONG_S
    while measured.machine.is_provisional and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not measured.machine.is_provisional
    assert measured.machine.measured_s > first_s
    kept = find_machine(owner.decoder)
    assert kept is not None
    assert not kept.is_provisional
    measured.close()
