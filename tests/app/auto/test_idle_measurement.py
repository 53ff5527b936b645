"""A machine that never was measured is, when nothing is answered; no answer waits for long."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvweave.app.auto.machine_profile import Measurement, find_machine
from kvweave.app.auto.measurements import IdleMeasurement
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
