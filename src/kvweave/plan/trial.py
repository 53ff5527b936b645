"""An option that loses by its price, tried all the same: rarely, and only where little can be lost.

A tier whose loading was never paid for is priced dearer than no overlap at all (`loading_cost.py`).
Where it loses at that price no request would ever load from it, and the planner would never learn
that it is cheap.
So one request in `EVERY` may try it, if by the price it loses next to nothing, and if it would win
clearly were loading as cheap as it can be. The plan says that it is a trial.
"""

from collections.abc import Collection, Sequence

from kvweave.plan.loading_cost import Load
from kvweave.plan.options import Candidate
from kvweave.plan.plan import Option, Reason
from kvweave.plan.pricing import OrderPricing, price_of

EVERY = 50  # requests, of which one at most is a trial
MOST_LOSS = 0.05  # of the chosen price: what `auto` may cost beyond full prefill


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


def with_trial(options: Sequence[Option], trial: Candidate) -> list[Option]:
    """The options of a plan, the trial in the place of the same strategy's."""
    own = {f"{kind} {trial.strategy}" for kind in ("fused", "mixed")}
    return [*(option for option in options if option.name not in own), trial.option]


def _hoped_s(load: Load, busy: bool) -> float:
    """What it takes if loading is as cheap as it can be."""
    return max(load.least_s, load.work_s + load.seconds) if busy else load.least_s
