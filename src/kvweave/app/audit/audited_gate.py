"""The calibrated gate, moved by what audits of real answers found."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from kvweave.app.audit.audit_log import ENOUGH, AuditLog
from kvweave.calibrate.gate import CLOSE_CALLS, MAX_FLIPS, Table
from kvweave.plan.plan import Gate, PromptShape, Verdict
from kvweave.reasons import Reason

log = logging.getLogger(__name__)

ROOMY = 40  # audits of a ratio before a smaller one is tried, and twice as many each next time
ROOM = 0.5  # of the bound: there is room if surely no more is used
MOST_VERDICTS = 512  # that are remembered until the next audit


def measured_ratios(tables: Iterable[Table]) -> dict[str, list[float]]:
    """List, by strategy, the ratios that calibration measured and that leave something to reuse."""
    ladders: dict[str, set[float]] = {}
    for table in tables:
        for cell in table.cells:
            if cell.ratio < 1.0:
                ladders.setdefault(cell.strategy, set()).add(cell.ratio)
    return {strategy: sorted(ratios) for strategy, ratios in ladders.items()}


class AuditedGate:
    """A gate that shuts ratios which audits found over the bound and opens those with room.

    Tighter: a ratio that is surely over the bound gives way to the next larger one that calibration
    measured; where all are, the strategy is refused. Looser: what was shut is tried again, one
    ratio at a time, when the one in its place uses half the bound at most; and one ratio below what
    calibration allows is tried on the same condition. A ratio that is not in use gathers no audits,
    so that what was found of it stays: nothing swings to and fro by itself.

    Any thread. Verdicts are made anew after an audit, and read in between.
    """

    def __init__(self, gate: Gate, ladders: Mapping[str, Sequence[float]], found: AuditLog) -> None:
        """`ladders`: ratios of each strategy that may be taken, ascending."""
        self._gate = gate
        self._ladders = ladders
        self._found = found
        self._made: tuple[int, dict[tuple[str, float, Verdict], Verdict]] = (-1, {})

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        version, verdicts = self._made
        if version != self._found.version or len(verdicts) > MOST_VERDICTS:
            verdicts = {}
            self._made = (self._found.version, verdicts)
        calibrated = self._gate.min_ratio(strategy, bound, shape)
        key = (strategy, bound, calibrated)
        verdict = verdicts.get(key)
        if verdict is None:
            verdict = verdicts[key] = self._move_verdict(strategy, bound, calibrated)
        return verdict

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return self._gate.may_reorder(bound, shape)

    def _move_verdict(self, strategy: str, bound: float, calibrated: Verdict) -> Verdict:
        ladder, ratio = self._ladders.get(strategy, ()), calibrated.ratio
        if ratio is None or ratio not in ladder:
            return calibrated
        verdict = self._judge(strategy, bound, list(ladder), ratio)
        lead = calibrated.close_call
        if lead and verdict.ratio is not None and verdict.ratio < ratio:
            lead = max(lead, CLOSE_CALLS[-1])  # fewer rows want a wider one
        # of a ratio nearby: much the same
        verdict = verdict._replace(
            close=calibrated.close, close_call=lead, evidence=calibrated.evidence
        )
        if self._found.move(strategy, bound, ratio, verdict.ratio):
            self._tell(strategy, bound, ratio, verdict.ratio)
        return verdict

    def _judge(
        self, strategy: str, bound: float, ladder: list[float], calibrated: float
    ) -> Verdict:
        found, start = self._found, ladder.index(calibrated)
        is_shut = [found.is_over(strategy, ratio, bound) for ratio in ladder]
        place = next((i for i in range(start, len(ladder)) if not is_shut[i]), None)
        if place is None:
            shut = tuple((ratio, Reason.AUDITED) for ratio in ladder[start:-1])
            return Verdict(None, Reason.AUDITED, shut)
        if place > start and self._may_reopen(strategy, bound, ladder[place - 1], ladder[place]):
            place -= 1
            found.reopen(strategy, ladder[place])
        elif place == start > 0 and self._may_go_below(strategy, bound, ladder[: place + 1]):
            return Verdict(ladder[start - 1], passed=((calibrated, Reason.AUDIT_ROOM),))
        shut = tuple((ratio, Reason.AUDITED) for ratio in ladder[start:place])
        return Verdict(ladder[place], passed=shut)

    def _may_reopen(self, strategy: str, bound: float, shut: float, used: float) -> bool:
        """Whether a ratio that was shut is tried again, after audits of the one in its place."""
        times = self._found.times_reopened(strategy, shut)
        patience = ROOMY << times
        return self._found.total(strategy, used) >= patience and self._has_room(
            strategy, used, bound
        )

    def _may_go_below(self, strategy: str, bound: float, ladder: list[float]) -> bool:
        """Whether the ratio below the last one of a ladder is tried, or was and is good."""
        below, used = ladder[-2:]
        figures = self._found.figures(strategy, below)
        is_bad = figures.kl > bound or figures.flip_share > MAX_FLIPS
        if figures.answers >= ENOUGH and is_bad:
            return False
        return self._has_room(strategy, used, bound)

    def _has_room(self, strategy: str, ratio: float, bound: float) -> bool:
        figures = self._found.figures(strategy, ratio)
        return (
            figures.answers >= ROOMY
            and figures.kl_high <= ROOM * bound
            and figures.flip_share <= MAX_FLIPS
        )

    def _tell(self, strategy: str, bound: float, calibrated: float, ratio: float | None) -> None:
        figures = self._found.figures(strategy, calibrated)
        taken = "is refused" if ratio is None else f"now recomputes {ratio:g}"
        log.warning(
            "audit: %s %s where calibration allows %g within %g nats per token; "
            "%d audited answers at %g cost %.3g and flipped %d first tokens",
            *(strategy, taken, calibrated, bound),
            *(figures.answers, calibrated, figures.kl, figures.flips),
        )
