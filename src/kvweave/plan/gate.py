"""What calibration allows, as the planner sees it."""

from typing import NamedTuple, Protocol

from kvweave.plan.plan import Reason


class Verdict(NamedTuple):
    """What calibration says about a strategy under a bound."""

    ratio: float | None  # smallest that passes; None: none does
    reason: Reason = Reason.BOUND_NOT_MET  # why none does


class Gate(Protocol):
    """The calibration of this model."""

    def min_ratio(self, strategy: str, bound: float) -> Verdict: ...


class ClosedGate:
    """No calibration: nothing approximate passes."""

    def min_ratio(self, strategy: str, bound: float) -> Verdict:
        return Verdict(None, Reason.NOT_CALIBRATED)
