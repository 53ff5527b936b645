"""One request, priced: every option in every order that is asked about, and the one to take."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from kvweave.kv.tree.node import ChunkRef, Node
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.hits import FusedLowerBound, StoredHits, find_hits
from kvweave.plan.layout import Layout, lay_out
from kvweave.plan.options import Candidate, price_fused, price_prefix
from kvweave.plan.ordering import (
    AccessTable,
    Ordering,
    OrderPermission,
    OrderRules,
    OrderWorth,
    choose_order,
)
from kvweave.plan.plan import Option, PlanRequest, ReadableTree, Stored
from kvweave.reasons import Reason
from kvweave.types import ChunkId

# An approximation must win by this share of the exact price. No number of seconds is enough or too
# little on every device: there are those that prefill a short prompt in less than a clock's tick.
MIN_GAIN_SHARE = 0.10


class AllowedStrategy(NamedTuple):
    """A strategy that the gate and the request let through."""

    strategy: StrategyInfo
    ratio: float
    close: float = 0.0  # share of answers that are computed exactly after all
    close_call: float = 0.0  # nats: those whose first token leads by less


class PlanFacts(NamedTuple):
    """What is true while one request is planned, whatever the order."""

    tree: ReadableTree
    costs: CostModel
    stored: Mapping[ChunkId, Sequence[Stored]]
    allowed: Sequence[AllowedStrategy]


class PricedOrder(NamedTuple):
    """One order with every option priced and one of them taken."""

    layout: Layout
    candidates: list[Candidate]
    declined: list[Option]
    chosen: Candidate
    exact: Candidate  # the cheapest option that is exact
    needed_s: float  # by which an approximation must beat it

    def options(self) -> list[Option]:
        """Why each was taken or not, the declined ones last."""
        return [*[_with_reason(candidate, self) for candidate in self.candidates], *self.declined]


class OrderPricing:
    """The options in one order. Lives as long as its request is planned."""

    def __init__(
        self, request: PlanRequest, order: tuple[ChunkRef, ...], full_s: float, facts: PlanFacts
    ) -> None:
        """`full_s` is what full prefill takes, in whatever order."""
        parts = (*request.history, *order) if request.history else order
        self._facts = facts
        self.layout = layout = lay_out(
            facts.tree.root,
            facts.tree.match([part.id for part in parts]),
            parts,
            facts.stored,
            request.question_tokens,
            facts.costs.can_load,
            len(request.history),
        )
        full = Candidate(
            Option("full", full_s, layout.total, 0, Reason.CHEAPEST), layout.all_computed
        )
        self._exact = [full, *price_prefix(facts.costs, layout)]
        self.exact_s = min([price_of(candidate) for candidate in self._exact])
        self._close = {each.strategy.name: each.close for each in facts.allowed}
        # by which an approximation must beat it
        self.needed_s = MIN_GAIN_SHARE * self.exact_s
        self._hits: dict[tuple[tuple[str, ...], frozenset[str], float], StoredHits] = {}
        self._fused: dict[str, Candidate | Reason] = {}

    def fused_candidate(self, strategy: StrategyInfo, ratio: float) -> Candidate | Reason:
        """The best option with this strategy, or why there is none."""
        outcome = self._fused.get(strategy.name)
        if outcome is None:
            outcome = self._fused[strategy.name] = self._price_fused(strategy, ratio)
        return outcome

    def _price_fused(self, strategy: StrategyInfo, ratio: float) -> Candidate | Reason:
        costs, layout = self._facts.costs, self.layout
        kind = (strategy.variants, strategy.needs, strategy.extra_bytes_per_token)
        hits = self._hits.get(kind)  # the same for all that want the same copies
        if hits is None:
            hits = self._hits[kind] = find_hits(costs, layout, strategy)
        priced = price_fused(costs, layout, hits, strategy, ratio)
        close = self._close.get(strategy.name, 0.0)
        if not close or not isinstance(priced, Candidate):
            return priced
        return priced._replace(option=priced.option._replace(again_s=close * self.exact_s))

    @cached_property
    def priced(self) -> PricedOrder:
        """Every option, and the cheapest; but an approximation must win clearly, or the best exact
        one is taken."""
        candidates, declined = list(self._exact), []
        for strategy, ratio, *_ in self._facts.allowed:
            outcome = self.fused_candidate(strategy, ratio)
            if isinstance(outcome, Candidate):
                candidates.append(outcome)
            else:
                declined.append(Option(f"fused {strategy.name}", None, 0, 0, outcome, ratio))
        best, exact = min(candidates, key=_rank), min(self._exact, key=price_of)
        too_close = best.strategy is not None and self.exact_s - price_of(best) < self.needed_s
        chosen = exact if too_close else best
        return PricedOrder(self.layout, candidates, declined, chosen, exact, self.needed_s)


class RequestPricing:
    """Prices one request. Lives as long as its planning; remembers what it has priced."""

    def __init__(
        self,
        request: PlanRequest,
        chunks: tuple[ChunkRef, ...],
        facts: PlanFacts,
        permission: OrderPermission,
    ) -> None:
        """`chunks` are those of the request, each once. `permission` is AS_FOUND or FREE."""
        self._request = request
        self._permission = permission
        self._chunks = chunks
        self._facts = facts
        parts = (*request.history, *chunks)
        tokens = facts.tree.root.num_tokens + sum([part.num_tokens for part in parts])
        self._full_s = facts.costs.full(tokens + request.question_tokens).seconds
        self._orders: dict[tuple[ChunkRef, ...], OrderPricing] = {}

    def order(self, table: AccessTable, tail: bool) -> Ordering:
        """The order to answer in: never one that is priced above the given one."""
        request, tree, stored = self._request, self._facts.tree, self._facts.stored
        start = self._chunks_begin_at()
        # behind a history that is not in the tree no order matches more than another
        permission = OrderPermission.AS_FOUND if start is None else self._permission
        first: dict[ChunkId, int] = {}  # exact right behind the preamble
        for chunk in self._chunks if not request.history else ():
            for copy in stored.get(chunk.id, ()):
                if copy.exact_when_first and not copy.rounded:
                    first[chunk.id] = chunk.num_tokens
        at_root = tree.root.children

        def exact_tokens(order: Sequence[ChunkRef]) -> int:
            parts = (*request.history, *order) if request.history else order
            tokens = tree.match_tokens(parts)
            if not order or order[0].id in at_root:
                return tokens
            return tokens + first.get(order[0].id, 0)

        rules = OrderRules(permission, tail)
        worth = OrderWorth(exact_tokens, first.keys(), self.costs_more)
        return choose_order(start or tree.root, self._chunks, table, rules, worth)

    def costs_more(self, order: tuple[ChunkRef, ...], given: tuple[ChunkRef, ...]) -> bool:
        """Whether the given order would be answered faster, by the same rules of choice.

        Options that cannot be faster are not priced: most of those of the given order.
        """
        priced = self.price(order)
        limit_s = price_of(priced.chosen)
        if self._has_all_of(priced, given):
            return False
        other = self.at(given)
        if other.exact_s < limit_s:
            return True
        at_least = FusedLowerBound(self._facts.costs, other.layout)
        for strategy, ratio, *_ in self._facts.allowed:
            if at_least.is_below(strategy, ratio, limit_s):
                outcome = other.fused_candidate(strategy, ratio)
                if isinstance(outcome, Candidate):
                    fused_s = price_of(outcome)
                    if fused_s < limit_s and other.exact_s - fused_s >= other.needed_s:
                        return True
        return False

    def _has_all_of(self, priced: PricedOrder, given: tuple[ChunkRef, ...]) -> bool:
        """Whether all that is exact in the given order is exact on the device in this one, and its
        cheapest option was taken. Then each option of the given order does the same and more, and
        none need be priced."""
        layout, start = priced.layout, self._chunks_begin_at()
        exact = (layout.preamble, *layout.path)
        if start is None or layout.first is not None or any(span.load_bytes for span in exact):
            return False
        if price_of(priced.chosen) > min([price_of(each) for each in priced.candidates]):
            return False
        here = {span.chunk_id for span in layout.path}
        child = start.children.get(given[0].id)
        if child is None:  # from the store it may be exact in front all the same
            copies = () if self._request.history else self._facts.stored.get(given[0].id, ())
            return given[0].id in here or not any(copy.exact_when_first for copy in copies)
        return _has_leading_path(child, given, here)

    def price(self, order: tuple[ChunkRef, ...]) -> PricedOrder:
        """Every option in this order, and the one to take."""
        return self.at(order).priced

    def at(self, order: tuple[ChunkRef, ...]) -> OrderPricing:
        """The request in this order."""
        found = self._orders.get(order)
        if found is None:
            found = self._orders[order] = OrderPricing(
                self._request, order, self._full_s, self._facts
            )
        return found

    def _chunks_begin_at(self) -> Node | None:
        """The node that the first chunk would stand behind; None if it is not in the tree."""
        node = self._facts.tree.root
        for part in self._request.history:
            child = node.children.get(part.id)
            if child is None:
                return None
            node = child
        return node


def _has_leading_path(
    node: Node, given: Sequence[ChunkRef], here: Collection[ChunkId | None]
) -> bool:
    """Whether all leading chunks of `given` that the tree has, from `node` on, are among `here`."""
    for place, chunk in enumerate(given):
        if chunk.id not in here:
            return False
        child = node.children.get(given[place + 1].id) if place + 1 < len(given) else None
        if child is None:
            return True
        node = child
    return True


def _rank(candidate: Candidate) -> tuple[float, float]:
    """By price; of equal ones first what hides more of its loading, should the machine let it."""
    price_s, load = price_of(candidate), candidate.option.load
    return price_s, price_s if load is None else load.least_s


def _with_reason(candidate: Candidate, priced: PricedOrder) -> Option:
    if candidate is priced.chosen:
        return candidate.option  # which says that it is the cheapest
    gain_s = price_of(priced.exact) - price_of(candidate)
    too_small = candidate.strategy is not None and 0 <= gain_s < priced.needed_s
    reason = Reason.GAIN_TOO_SMALL if too_small else Reason.DEARER
    name, seconds, rows, load_bytes, _, ratio, load, again_s = candidate.option
    # `_replace` takes longer
    return Option(name, seconds, rows, load_bytes, reason, ratio, load, again_s)


def with_computed(options: Sequence[Option], fused: Candidate, taken: Candidate) -> list[Option]:
    """The options of a plan that takes an exact one although `fused` is cheaper this time."""
    dearer = fused.option._replace(reason=Reason.DEARER_IN_THE_END)
    others = [o for o in options if o.name not in (taken.option.name, fused.option.name)]
    return [taken.option, *others, dearer]


def price_of(candidate: Candidate) -> float:
    return candidate.option.expected_s
