"""An option that loses by its price, tried all the same: rarely, and only where little can be lost.

A tier whose loading was never paid for is priced dearer than no overlap at all (`loading_cost.py`).
Where it loses at that price no request would ever load from it, and the planner would never learn
that it is cheap.
So one request in `EVERY` may try it, if by the price it loses next to nothing, and if it would win
clearly were loading as cheap as it can be. The plan says that it is a trial.

The same holds for the rows that a fused way recomputes. Their price is measured, but perhaps on a
busy machine, and no exact answer tells of it. Where fewer than a few fused answers told lately, one
request in `EVERY` may try, if a row recomputed at the price of one prefilled would win clearly.
Here the price itself is in doubt, so the trial may lose as much as the request takes: a fiftieth of
all, and only until a few have told.
"""

from collections.abc import Collection, Sequence

from kvweave.plan.cost import CostModel, StrategyInfo, row_budget
from kvweave.plan.loading_cost import Load
from kvweave.plan.options import Candidate
from kvweave.plan.plan import Option, Reason, SpanKind
from kvweave.plan.pricing import OrderPricing, price_of

EVERY = 50  # requests, of which one at most is a trial
MOST_LOSS = 0.05  # of the chosen price: what `auto` may cost beyond full prefill
MOST_ROWS_LOSS = 1.0  # of the chosen price, where that of recomputing is not known
TRIALS = frozenset({Reason.TRIAL, Reason.TRIAL_ROWS})


class TrialBudget:
    """Keeps trials rare. For one thread at a time."""

    def __init__(self) -> None:
        self._since = 0  # requests begun since the last trial

    @property
    def is_due(self) -> bool:
        return self._since >= EVERY - 1

    def begun(self, *, trial: bool) -> None:
        """A request set out, as a trial or not."""
        self._since = 0 if trial else self._since + 1


def find_trial(order: OrderPricing, unsure: Collection[str], busy: bool) -> Candidate | None:
    """The cheapest option that is worth a trial; None if none is, or the chosen one tells as much.

    `unsure` are links of which too few requests have told what loading costs. `busy`: others run,
    and loading is not hidden behind the request's own work, however good the machine is.
    """
    priced = order.priced()
    chosen_s, chosen = price_of(priced.chosen), priced.chosen.option.load
    if chosen is not None and chosen.link in unsure and chosen.tells:
        return None
    most_s = chosen_s + MOST_LOSS * (chosen_s - order.queue_s)
    best: Candidate | None = None
    for candidate in order.loading(unsure):
        load = candidate.option.load
        if load is None or load.link not in unsure:  # what would be learnt is of another one
            continue
        hoped_s = _hoped_s(load, busy)
        if price_of(candidate) > most_s or chosen_s - hoped_s < priced.needed_s:
            continue
        if best is None or price_of(candidate) < price_of(best):
            best = candidate
    return None if best is None else best._replace(option=best.option._replace(reason=Reason.TRIAL))


def find_rows_trial(
    order: OrderPricing, costs: CostModel, strategies: Sequence[StrategyInfo]
) -> Candidate | None:
    """The fused option that is worth a trial because recomputing may be cheaper than its price;
    None if none is, or the chosen one recomputes rows anyway."""
    priced = order.priced()
    if priced.chosen.strategy is not None:
        return None
    # a pass with all rows in its first layers does not tell what a row costs
    told_by = {info.name: info for info in strategies if not info.full_width_layers}
    chosen_s = price_of(priced.chosen)
    most_s = chosen_s + MOST_ROWS_LOSS * (chosen_s - order.queue_s)
    best: Candidate | None = None
    for candidate in priced.candidates:
        info = told_by.get(candidate.strategy or "")
        if info is None or price_of(candidate) > most_s:
            continue
        hoped_s = price_of(candidate) - _overpriced_s(candidate, info, costs, order.layout.total)
        if chosen_s - hoped_s < priced.needed_s:
            continue
        if best is None or price_of(candidate) < price_of(best):
            best = candidate
    if best is None:
        return None
    return best._replace(option=best.option._replace(reason=Reason.TRIAL_ROWS))


def with_trial(options: Sequence[Option], trial: Candidate) -> list[Option]:
    """The options of a plan, the trial in the place of the same strategy's."""
    own = {f"{kind} {trial.strategy}" for kind in ("fused", "mixed")}
    return [*(option for option in options if option.name not in own), trial.option]


def _hoped_s(load: Load, busy: bool) -> float:
    """What it takes if loading is as cheap as it can be."""
    return max(load.least_s, load.work_s + load.seconds) if busy else load.least_s


def _overpriced_s(candidate: Candidate, info: StrategyInfo, costs: CostModel, total: int) -> float:
    """By how much rows are priced above as many tokens of prefill."""
    loaded = sum(span.num_tokens for span in candidate.spans() if span.kind is SpanKind.FUSED)
    ratio = candidate.option.ratio or 0.0
    rows = (
        candidate.option.rows - row_budget(loaded, ratio) + row_budget(loaded, ratio * info.depth)
    )
    prefilled_s = costs.profile.prefill.at(total - rows, rows)
    return max(0.0, costs.profile.recompute.at(total, rows) - prefilled_s)
