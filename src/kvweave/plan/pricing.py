"""One request, priced: every option in every order that is asked about, and the one to take."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import ChunkRef, Node
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.hits import StoredHits, find_hits
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


def price_order(
    request: PlanRequest, order: tuple[ChunkRef, ...], full_s: float, facts: PlanFacts
) -> PricedOrder:
    """Price every option in one order and take the cheapest; but an approximation must win clearly,
    or the best exact one is taken. `full_s` is what full prefill takes, in whatever order."""
    parts = (*request.history, *order) if request.history else order
    layout = lay_out(
        facts.tree.root,
        facts.tree.match([part.id for part in parts]),
        parts,
        facts.stored,
        request.question_tokens,
        facts.costs.can_load,
        len(request.history),
    )
    full = Candidate(Option("full", full_s, layout.total, 0, Reason.CHEAPEST), layout.all_computed)
    candidates, declined = [full, *price_prefix(facts.costs, layout)], list[Option]()
    exact = min(candidates, key=price_of)
    exact_s = price_of(exact)
    known: dict[tuple[tuple[str, ...], frozenset[str], float], StoredHits] = {}
    for strategy, ratio, close, _ in facts.allowed:
        kind = (strategy.variants, strategy.needs, strategy.extra_bytes_per_token)
        hits = known.get(kind)  # the same for all that want the same copies
        if hits is None:
            hits = known[kind] = find_hits(facts.costs, layout, strategy)
        priced = price_fused(facts.costs, layout, hits, strategy, ratio)
        if not isinstance(priced, Candidate):
            declined.append(Option(f"fused {strategy.name}", None, 0, 0, priced, ratio))
        elif close:
            again = priced.option._replace(again_s=close * exact_s)
            candidates.append(priced._replace(option=again))
        else:
            candidates.append(priced)
    best, needed_s = min(candidates, key=_rank), MIN_GAIN_SHARE * exact_s
    too_close = best.strategy is not None and exact_s - price_of(best) < needed_s
    chosen = exact if too_close else best
    return PricedOrder(layout, candidates, declined, chosen, exact, needed_s)


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
        self._orders: dict[tuple[ChunkRef, ...], PricedOrder] = {}

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
        """Whether the given order would be answered faster, by the same rules of choice."""
        return price_of(self.price(given).chosen) < price_of(self.price(order).chosen)

    def price(self, order: tuple[ChunkRef, ...]) -> PricedOrder:
        """Every option in this order, and the one to take."""
        found = self._orders.get(order)
        if found is None:
            found = price_order(self._request, order, self._full_s, self._facts)
            self._orders[order] = found
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
