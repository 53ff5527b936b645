"""Loading that nothing hides, held against computing instead.

Where loading and computing add up there is no best mixture of the two: of each tier it is all
chunks or none, and which can be said from a few numbers per tier, before any option is priced.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvweave.plan.cost import CostModel, StrategyInfo, row_budget
from kvweave.plan.layout import Layout


class UnhiddenLink(NamedTuple):
    """A link whose loading nothing hides. Tiers load together: without the slowest, the next one is
    waited for, and what computing saves is the difference."""

    times: float  # what is saved by not loading, over computing every row of it
    link: str
    num_tokens: int
    paid_s: float  # for loading


def unhidden_links(
    costs: CostModel, total: int, rows: int, tokens: Mapping[str, int], loads: Mapping[str, int]
) -> tuple[UnhiddenLink, ...]:
    """What loading costs that nothing hides, the slowest link first. `rows` are computed anyway."""
    paid = []
    for link in tokens:
        seconds, share = costs.load(link, loads[link])
        if share >= 1:
            paid.append((share * seconds, link))
    if not paid:
        return ()
    paid.sort(reverse=True)
    recompute, num_tokens = costs.profile.recompute, sum(tokens.values())
    rows_s = recompute.at(total, rows + num_tokens) - recompute.at(total, rows)
    row_s = max(1e-12, rows_s / num_tokens)
    nexts = [*(paid_s for paid_s, _ in paid[1:]), 0.0]
    return tuple(
        UnhiddenLink((paid_s - next_s) / (tokens[link] * row_s), link, tokens[link], paid_s)
        for (paid_s, link), next_s in zip(paid, nexts, strict=True)
    )


def too_slow_links(links: Sequence[UnhiddenLink], ratio: float) -> set[str]:
    """Links whose hits are computed, because loading them takes longer. `links` slowest first."""
    found = set()
    for each in links:
        if each.times <= 1 - ratio:
            break
        found.add(each.link)
    return found


class FusedLowerBound:
    """What fused options cannot cost less than, before it is known which copies a strategy can use.

    The stored chunks of a tier are loaded and paid for, or computed.
    """

    def __init__(self, costs: CostModel, layout: Layout) -> None:
        self._costs, self._total = costs, layout.total
        self._most = 0  # tokens that may be hits
        tokens: dict[str, int] = {}
        loads: dict[str, int] = {}
        first = 1 if layout.first else 0
        for chunk, copies in zip(layout.behind[first:], layout.stored[first:], strict=True):
            if not copies:
                continue
            self._most += chunk.num_tokens
            link = copies[0].link
            size_bytes = copies[0].size_bytes
            if len(copies) > 1:  # which of them is taken is not known yet
                if any(copy.link != link for copy in copies[1:]):
                    continue
                size_bytes = min(copy.size_bytes for copy in copies)
            if link in tokens:
                tokens[link] += chunk.num_tokens
                loads[link] += size_bytes
            elif costs.can_load(link):
                tokens[link], loads[link] = chunk.num_tokens, size_bytes
        exact = layout.exact_tokens + (layout.first.num_tokens if layout.first else 0)
        self._besides = layout.total - exact - self._most
        self._known: dict[float, float] = {}  # by the ratio that is paid for
        self._paid: list[tuple[float, int]] = []  # seconds, tokens
        for link, size_bytes in loads.items():
            load_s, share = costs.load(link, size_bytes)
            if share >= 1:
                self._paid.append((share * load_s, tokens[link]))

    def is_below(self, strategy: StrategyInfo, ratio: float, limit_s: float) -> bool:
        """Whether an option may take less than `limit_s`."""
        paid = ratio * strategy.depth
        besides_s = 0.0
        if strategy.full_width_layers:  # all else is the same for most strategies
            besides_s = self._costs.full_width_s(strategy, self._total)
        at_least_s = self._known.get(paid)
        if at_least_s is None:
            at_least_s = self._known[paid] = self._recompute_s(paid)
        return besides_s + at_least_s < limit_s

    def _recompute_s(self, ratio: float) -> float:
        """Of the rows, and what is paid for loading; or of more rows, where nothing is loaded."""
        rows = self._besides + row_budget(self._most, ratio)
        recompute, total = self._costs.profile.recompute, self._total
        loaded_s = least_s = recompute.at(total, rows)
        for paid_s, num in self._paid:
            # budgets are rounded down, here and there
            more = rows + num - row_budget(num, ratio) - 1
            least_s = max(least_s, min(loaded_s + paid_s, recompute.at(total, more)))
        return least_s
