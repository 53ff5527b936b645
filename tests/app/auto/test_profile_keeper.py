"""A machine in doubt is measured again when nothing is answered, and no answer waits for long."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvweave.app.auto.machine_profile import (
    Measurement,
    find_machine,
    made_with,
    profile_path,
)
from kvweave.app.auto.profile_keeper import OFF_IN_A_ROW, ProfileKeeper
from kvweave.app.library.library_kv import CODEC
from kvweave.app.runtime import ModelRuntime
from kvweave.plan.profile import Grid, MachineProfile, load_profile
from worlds.auto import World, model, world

__all__ = ["model", "world"]

LONG_S = 60.0


class Owner:
    """What a planner does with a new measurement."""

    def __init__(self, world: World) -> None:
        self.runtime = ModelRuntime(world.decoder, world.tokenizer, "tiny")
        self.decoder = world.decoder
        self.machine = load_profile(world.set_machine())
        self.renewed = threading.Event()

    def renew(self, measured: MachineProfile) -> None:
        self.machine.renew(measured)
        self.renewed.set()

    def keeper(self) -> ProfileKeeper:
        return ProfileKeeper(self.decoder, CODEC, self.runtime.client, self.machine, self.renew)


@pytest.fixture
def owner(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr("kvweave.app.auto.machine_profile.PREFILL_BUDGET_S", 0.3)
    monkeypatch.setattr("kvweave.app.auto.machine_profile.RECOMPUTE_BUDGET_S", 0.3)
    monkeypatch.setattr("kvweave.app.auto.profile_keeper.PAUSE_S", 0.0)
    owner = Owner(world)
    yield owner
    owner.runtime.close()


def test_a_profile_in_doubt_is_measured_again_and_kept(owner: Owner) -> None:
    before = owner.machine.prefill.at(0, 256)
    owner.machine.doubts = ["it was busy"]
    keeper = owner.keeper()
    assert keeper.wait(LONG_S)
    assert owner.renewed.is_set()
    assert owner.machine.prefill.at(0, 256) < before / 5, "a token never took 10 ms here"
    kept = find_machine(owner.decoder)
    assert kept is not None
    assert kept.measured_s == owner.machine.measured_s > 0
    assert kept.made_with == made_with()
    keeper.close()


def test_nothing_is_measured_while_an_answer_is_in_the_making(owner: Owner) -> None:
    keeper = owner.keeper()
    with owner.runtime.client.answers.one():
        keeper.doubt("a test")
        assert not keeper.wait(0.3)
        assert not owner.renewed.is_set()
    assert keeper.wait(LONG_S)
    assert owner.renewed.is_set()
    keeper.close()


def test_closing_ends_a_measurement_at_once(owner: Owner) -> None:
    keeper = owner.keeper()
    with owner.runtime.client.answers.one():  # never idle
        keeper.doubt("a test")
        started_s = time.monotonic()
        keeper.close()
        assert time.monotonic() - started_s < 5.0
    assert not owner.renewed.is_set()
    keeper.doubt("too late")
    assert keeper.wait(0.0)


@pytest.mark.parametrize("actual_s", [10.0, 0.1])
def test_answers_that_are_far_off_again_and_again_are_a_doubt(
    owner: Owner, actual_s: float
) -> None:
    keeper = owner.keeper()
    for _ in range(OFF_IN_A_ROW - 1):
        keeper.took(1.0, actual_s)
    keeper.took(1.0, 1.0)
    for _ in range(OFF_IN_A_ROW - 1):
        keeper.took(1.0, actual_s)
    keeper.took(1.0, 1 / actual_s)
    assert keeper.wait(0.0), "never so many in a row"
    for _ in range(OFF_IN_A_ROW):
        keeper.took(1.0, actual_s)
    assert keeper.wait(LONG_S)
    assert owner.renewed.is_set()
    keeper.close()


def test_what_another_measured_meanwhile_is_taken_over_instead(owner: Owner) -> None:
    grid = Grid((0,), (1, 1000), [[0.003, 3.0]])
    other = MachineProfile(
        owner.decoder.revision, "test", owner.decoder.spec.num_layers, grid, grid, measured_s=5.0
    )
    other.save(profile_path(owner.decoder))
    keeper = owner.keeper()
    keeper.doubt("a test")
    assert keeper.wait(LONG_S)
    assert owner.machine.prefill == grid
    assert owner.machine.measured_s == 5.0
    keeper.close()


def test_a_closed_engine_ends_it_without_a_word(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.runtime.close()
    keeper = owner.keeper()
    keeper.doubt("a test")
    assert keeper.wait(LONG_S)
    assert not caplog.records
    keeper.close()


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
