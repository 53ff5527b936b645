"""What is let through with random weights, of which nothing can be calibrated: for load tests.

It hangs on the weights themselves (`Weights.is_random`), which no checkpoint and no setting says.
"""

from dataclasses import replace

from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.plan.plan import PromptShape, Verdict
from kvweave.reasons import Reason

STRATEGY, RATIO = "weave", 0.15


def permitted_strategies(facts: ModelFacts) -> dict[str, Strategy]:
    """The one strategy, its rows not weighed by what they cost: random weights look at all rows
    alike, so that the cheapest, at the front of the prompt, would win everywhere."""
    strategy = open_strategy(STRATEGY, facts)
    if isinstance(strategy.selector, QueryAttention):
        strategy = replace(strategy, selector=replace(strategy.selector, late=0.0))
    return {STRATEGY: strategy}


class PermittedGate:
    """Lets one strategy through at one ratio, whatever it costs. Chunks stay where they are."""

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        is_it = strategy == STRATEGY
        return Verdict(RATIO if is_it else None, Reason.NOT_CALIBRATED)

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(None, Reason.NOT_CALIBRATED)
