"""Tighter where audits find a breach, looser where they find room, and no swinging between."""

import logging
from types import SimpleNamespace

import pytest

from kvweave.app.audit.audit_log import AuditLog, AuditSubject
from kvweave.app.audit.audited_gate import AuditedGate
from kvweave.app.auto.facts import CalibratedGate
from kvweave.calibrate.gate import CLOSE_CALLS
from kvweave.plan.plan import PromptShape, Verdict
from kvweave.reasons import Reason

BOUND = 0.02
LADDER = [0.05, 0.15, 0.3]
SHAPE = PromptShape(1000, 5)


class Calibration:
    """Allows one ratio, whatever else it is told."""

    def __init__(self, ratio: float | None) -> None:
        self.ratio = ratio
        self.asked: list[tuple[object, ...]] = []

    def min_ratio(self, strategy: str, bound: float, *about: object) -> Verdict:
        self.asked.append(about)
        return Verdict(self.ratio)

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(0.0)


@pytest.fixture
def found() -> AuditLog:
    return AuditLog(AuditSubject("m", "e"))


def gate_of(found: AuditLog, ratio: float | None = 0.15) -> AuditedGate:
    return AuditedGate(Calibration(ratio), {"weave": LADDER}, found)


def audit(found: AuditLog, ratio: float, kl: float, times: int = 40, flips: int = 0) -> None:
    for i in range(times):
        found.add("weave", ratio, kl, flipped=i < flips)


def ratio(gate: AuditedGate) -> float | None:
    return gate.min_ratio("weave", BOUND, SHAPE).ratio


def test_without_audits_it_is_calibration_s(found: AuditLog) -> None:
    assert gate_of(found).min_ratio("weave", BOUND, SHAPE) == Verdict(0.15)
    assert gate_of(found, None).min_ratio("weave", BOUND, SHAPE) == Verdict(None)
    closed = AuditedGate(CalibratedGate((), ""), {}, found)
    assert closed.min_ratio("weave", BOUND, SHAPE).reason is Reason.NOT_CALIBRATED


def test_a_ratio_over_the_bound_gives_way_to_the_next_and_the_plan_can_say_so(
    found: AuditLog, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_of(found)
    assert ratio(gate) == 0.15
    audit(found, 0.15, 0.1, times=7)
    assert ratio(gate) == 0.15, "too few answers to shut anything"
    with caplog.at_level(logging.WARNING):
        audit(found, 0.15, 0.1, times=1)
        for _ in range(3):
            verdict = gate.min_ratio("weave", BOUND, SHAPE)
    assert verdict == Verdict(0.3, passed=((0.15, Reason.AUDITED),))
    assert len(caplog.records) == 1
    assert found.metrics.value("audit_gate_moves_total", strategy="weave") == 1
    assert gate.min_ratio("weave", 0.5, SHAPE).ratio == 0.15, "who allows more, gets more"


def test_a_strategy_of_which_every_ratio_is_over_is_refused(found: AuditLog) -> None:
    gate = gate_of(found)
    audit(found, 0.15, 0.1)
    audit(found, 0.3, 0.1)
    verdict = gate.min_ratio("weave", BOUND, SHAPE)
    assert (verdict.ratio, verdict.reason) == (None, Reason.AUDITED)


def test_flips_shut_a_ratio_too(found: AuditLog) -> None:
    audit(found, 0.15, 0.001, times=10, flips=4)
    assert ratio(gate_of(found)) == 0.3


def test_what_was_shut_is_tried_again_ever_more_rarely(found: AuditLog) -> None:
    gate = gate_of(found)
    audit(found, 0.15, 0.1)
    needed = []
    for _ in range(3):
        assert ratio(gate) == 0.3
        before = found.total("weave", 0.3)
        while ratio(gate) == 0.3:
            audit(found, 0.3, 0.001, times=1)
            assert found.total("weave", 0.3) < 1000
        needed.append(found.total("weave", 0.3) - before)
        assert ratio(gate) == 0.15
        audit(found, 0.15, 0.1, times=8)  # as bad as before
    assert needed == [40, 40, 80], "40, 80, 160 in all"


def test_a_ratio_that_is_good_by_now_stays_open(found: AuditLog) -> None:
    gate = gate_of(found)
    audit(found, 0.15, 0.1)
    assert ratio(gate) == 0.3
    audit(found, 0.3, 0.001)
    assert ratio(gate) == 0.15
    audit(found, 0.15, 0.012, times=100)
    assert ratio(gate) == 0.15


def test_a_pessimistic_table_is_undercut_by_one_ratio(found: AuditLog) -> None:
    gate = gate_of(found, 0.3)
    audit(found, 0.3, 0.001, times=39)
    assert ratio(gate) == 0.3
    audit(found, 0.3, 0.001, times=1)
    verdict = gate.min_ratio("weave", BOUND, SHAPE)
    assert verdict == Verdict(0.15, passed=((0.3, Reason.AUDIT_ROOM),))
    audit(found, 0.15, 0.001)
    assert ratio(gate) == 0.15, "and by no more than one"


def test_with_fewer_rows_than_calibrated_close_calls_are_taken_wider(found: AuditLog) -> None:
    calibrated = Verdict(0.3, close=0.05, close_call=0.2)
    fixed = SimpleNamespace(min_ratio=lambda *_: calibrated)
    gate = AuditedGate(fixed, {"weave": [0.15, 0.3, 0.5]}, found)  # type: ignore[arg-type]
    assert gate.min_ratio("weave", BOUND, SHAPE) == calibrated
    audit(found, 0.3, 0.001, times=40)
    below = gate.min_ratio("weave", BOUND, SHAPE)
    assert (below.ratio, below.close_call) == (0.15, CLOSE_CALLS[-1])


def test_half_the_bound_is_no_room_and_a_bad_try_is_not_repeated(found: AuditLog) -> None:
    gate = gate_of(found, 0.3)
    audit(found, 0.3, 0.012)
    assert ratio(gate) == 0.3
    audit(found, 0.3, 0.0001, times=500)
    assert ratio(gate) == 0.15
    audit(found, 0.15, 0.021, times=8)
    assert ratio(gate) == 0.3
    audit(found, 0.3, 0.0001, times=500)
    assert ratio(gate) == 0.3


def test_what_the_gate_inside_wants_to_know_is_passed_on(found: AuditLog) -> None:
    inside = Calibration(0.15)
    gate = AuditedGate(inside, {"weave": LADDER}, found)
    longer = SHAPE._replace(num_tokens=3000)
    gate.min_ratio("weave", BOUND, SHAPE)
    gate.min_ratio("weave", BOUND, longer)
    assert inside.asked == [(SHAPE,), (longer,)]
    assert gate.may_reorder(BOUND, SHAPE).ratio == 0.0
