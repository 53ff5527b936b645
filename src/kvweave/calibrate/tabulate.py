"""From outcomes per question to a table: means, intervals, shares.

All cells of a table share the same resamples of its questions, so they compare pairwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date

import numpy as np

from kvweave.calibrate.bootstrap import Bootstrap, Values
from kvweave.calibrate.gate import CLOSE_CALLS, MAX_FLIPS, OWN, Cell, Table
from kvweave.calibrate.measure import (
    ORDER,
    CaseOutcomes,
    GoldScores,
    Outcome,
    Setting,
    noise_of,
)


@dataclass(frozen=True, slots=True)
class TableOrigin:
    """What was measured, and on what: fields of its table."""

    revision: str  # of the decoder
    dtype: str
    data: str  # name of the questions' file
    data_hash: str
    context: str  # of the encoding, see contexts.variant_name
    preamble: str  # digest
    num_chunk_tokens: int
    kind: str = OWN
    has_history: bool = False


def tabulate(
    answered: Sequence[CaseOutcomes],
    settings: Sequence[Setting],
    encoding: str,
    origin: TableOrigin,
) -> Table:
    """The table of one encoding. "reuse" among the settings is what recovery counts from."""
    golds = [each.gold for each in answered]
    columns = [
        _Column(setting, [each.outcomes[encoding][i] for each in answered], golds)
        for i, setting in enumerate(settings)
    ]
    boot = Bootstrap(len(answered))
    reused = next((c.kl for c in columns if c.setting.strategy.name == "reuse"), None)
    known = [gold for gold in golds if gold is not None]
    return Table(
        **asdict(origin),
        encoding=encoding,
        date=date.today().isoformat(),
        num_questions=len(answered),
        num_with_answers=len(known),
        mean_prompt_tokens=float(np.mean([each.num_tokens for each in answered])),
        noise=noise_of(answered, encoding),
        full_f1=_mean([gold.f1 for gold in known]),
        full_em=_mean([gold.em for gold in known]),
        cells=tuple(column.cell(boot, reused) for column in columns),
        mean_chunks=float(np.mean([each.num_chunks for each in answered])),
        most_prompt_tokens=max(each.num_tokens for each in answered),
        close_call=CLOSE_CALLS[0],
    )


def _close_call(column: Sequence[Outcome]) -> float:
    """Return the least lead that keeps flips within their bound; the least of all where none
    does."""

    def flips(lead: float) -> float:
        judged = [outcome.judged for outcome in column]
        return sum(j.first_flips and j.margin >= lead for j in judged) / len(judged)

    return next((lead for lead in CLOSE_CALLS if flips(lead) <= MAX_FLIPS), CLOSE_CALLS[0])


def _served_outcome(outcome: Outcome, full: GoldScores | None, close_call: float) -> Outcome:
    """Return the outcome that the user gets: a close call is computed once more, exactly."""
    judged = outcome.judged
    if judged.margin >= close_call:
        return outcome
    exact = judged._replace(kl_mean=0.0, kl_first=0.0, kl_max=0.0, top1=1.0, first_flips=False)
    return Outcome(exact, 0.0, outcome.work + 1.0, full)


class _Column:
    """What one setting gave on every question, as it is served: with close calls computed again."""

    def __init__(
        self, setting: Setting, raw: Sequence[Outcome], full: Sequence[GoldScores | None]
    ) -> None:
        self.setting = setting
        # an order is no prefill that could be thrown away
        lead = self._lead = 0.0 if setting == ORDER else _close_call(raw)
        self._full = full
        self._num_close = sum(outcome.judged.margin < lead for outcome in raw)
        self._outcomes = [_served_outcome(o, f, lead) for o, f in zip(raw, full, strict=True)]
        self.kl: Values = np.array([outcome.judged.kl_mean for outcome in self._outcomes])

    def cell(self, boot: Bootstrap, reused: Values | None) -> Cell:
        outcomes, interval = self._outcomes, boot.mean(self.kl)
        recovered = None if reused is None else boot.recovered_share(self.kl, reused)
        known = [(o.gold, f) for o, f in zip(outcomes, self._full, strict=True) if o.gold and f]
        is_usual = self._lead == CLOSE_CALLS[0] or self.setting == ORDER
        return Cell(
            strategy=self.setting.strategy.name,
            ratio=self.setting.ratio,
            work=self._mean(lambda o: o.work),
            kl=interval.mean,
            kl_low=interval.low,
            kl_high=interval.high,
            kl_p95=float(np.quantile(self.kl, 0.95)),
            kl_max=max(o.judged.kl_max for o in outcomes),
            flips=self._mean(lambda o: o.judged.first_flips),
            top1=self._mean(lambda o: o.judged.top1),
            nll_gap=self._mean(lambda o: o.nll_gap),
            recovered=None if recovered is None else recovered.mean,
            gold_nll_gap=_mean([gold.nll - whole.nll for gold, whole in known]),
            f1=_mean([gold.f1 for gold, _ in known]),
            em=_mean([gold.em for gold, _ in known]),
            close=self._num_close / len(outcomes),
            close_call=None if is_usual else self._lead,
        )

    def _mean(self, figure: Callable[[Outcome], float]) -> float:
        return float(np.mean([figure(outcome) for outcome in self._outcomes]))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
