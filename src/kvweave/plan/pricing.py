"""One request, priced: every way to answer it, in whatever order its chunks may stand."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import ChunkRef, Node
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.dear import AtLeast
from kvweave.plan.hits import Hits, find_hits
from kvweave.plan.layout import Layout, Stored, lay_out
from kvweave.plan.options import Candidate, Limits, price_fused, price_prefix
from kvweave.plan.ordering import AccessTable, Ordering, OrderPermission, choose_order
from kvweave.plan.plan import Option, PlanRequest, Reason, Reuse
from kvweave.plan.readable_tree import ReadableTree
from kvweave.types import ChunkId

MIN_GAIN_S = 0.020  # an approximation must win by this
MIN_GAIN_SHARE = 0.10  # and by this share of the exact price


class Allowed(NamedTuple):
    """A strategy that the gate and the request let through."""

    strategy: StrategyInfo
    ratio: float


class Facts(NamedTuple):
    """What is true while one request is planned, whatever the order."""

    tree: ReadableTree
    costs: CostModel
    stored: Mapping[ChunkId, Sequence[Stored]]
    allowed: Sequence[Allowed]
    limits: Limits


class Priced(NamedTuple):
    """One order with every way to answer priced and one of them taken."""

    layout: Layout
    candidates: list[Candidate]
    declined: list[Option]
    chosen: Candidate
    exact: Candidate  # the cheapest way that is exact
    needed_s: float  # by which an approximation must beat it

    def options(self) -> list[Option]:
        """Why each was taken or not, the declined ones last."""
        return [*(_judged(candidate, self) for candidate in self.candidates), *self.declined]


class Pricing:
    """Prices one request. Lives as long as its planning; remembers what it has priced."""

    def __init__(self, request: PlanRequest, facts: Facts) -> None:
        self._request = request
        self._facts = facts
        self._priced: dict[tuple[ChunkRef, ...], Priced] = {}

    def order(self, chunks: tuple[ChunkRef, ...], table: AccessTable, tail: bool) -> Ordering:
        """The order to answer in: never one that is priced above the given one."""
        request, tree, stored = self._request, self._facts.tree, self._facts.stored
        start = self._chunks_begin_at()
        permission = request.order
        if request.reuse is Reuse.OFF or start is None:  # then no order matches more than another
            permission = OrderPermission.KEEP
        first: dict[ChunkId, int] = {}  # exact right behind the preamble
        for chunk in chunks if not request.history else ():
            for copy in stored.get(chunk.id, ()):
                if copy.exact_when_first and not copy.rounded:
                    first[chunk.id] = chunk.num_tokens

        def exact_tokens(order: Sequence[ChunkRef]) -> int:
            parts = (*request.history, *order) if request.history else order
            tokens = tree.match_tokens(parts)
            if not order or order[0].id in tree.root.children:
                return tokens
            return tokens + first.get(order[0].id, 0)

        return choose_order(
            start or tree.root,
            chunks,
            table,
            permission,
            exact_tokens,
            first,
            self._fixed(chunks),
            tail,
            self.costs_more,
        )

    def costs_more(self, order: tuple[ChunkRef, ...], given: tuple[ChunkRef, ...]) -> bool:
        """Whether the given order would be answered faster, by the same rules of choice.

        Ways that cannot be faster are not priced: most of those of the given order.
        """
        limit_s = price_of(self.price(order).chosen)
        layout, exact = self._exact(given)
        exact_s = min(map(price_of, exact))
        if exact_s < limit_s:
            return True
        needed_s = _needed_s(exact_s - self._facts.costs.queue_s)
        costs, limits = self._facts.costs, self._facts.limits
        at_least = AtLeast(costs, layout)
        cheap = [
            (strategy, ratio)
            for strategy, ratio in self._facts.allowed
            if at_least.is_below(strategy, ratio, limit_s)
        ]
        for strategy, ratio, found in self._hits(layout, cheap):
            outcome = price_fused(costs, layout, found, strategy, ratio, limits)
            if isinstance(outcome, Candidate):
                fused_s = price_of(outcome)
                if fused_s < limit_s and exact_s - fused_s >= needed_s:
                    return True
        return False

    def price(self, order: tuple[ChunkRef, ...]) -> Priced:
        """Every way to answer in this order, and the one to take."""
        priced = self._priced.get(order)
        if priced is None:
            priced = self._priced[order] = self._price(order)
        return priced

    def _price(self, order: tuple[ChunkRef, ...]) -> Priced:
        layout, candidates = self._exact(order)
        declined: list[Option] = []
        costs, limits = self._facts.costs, self._facts.limits
        for strategy, ratio, hits in self._hits(layout, self._facts.allowed):
            outcome = price_fused(costs, layout, hits, strategy, ratio, limits)
            if isinstance(outcome, Candidate):
                candidates.append(outcome)
            else:
                declined.append(Option(f"fused {strategy.name}", None, 0, 0, outcome, ratio))
        return _take(layout, candidates, declined, costs.queue_s)

    def _exact(self, order: tuple[ChunkRef, ...]) -> tuple[Layout, list[Candidate]]:
        """An order laid out, and the ways to answer in it that are exact."""
        request, facts = self._request, self._facts
        parts = (*request.history, *order)
        layout = lay_out(
            facts.tree.root,
            facts.tree.match([part.id for part in parts]),
            parts,
            facts.stored,
            request.question_tokens,
            facts.costs.can_load,
            len(request.history),
        )
        off = request.reuse is Reuse.OFF
        seconds = facts.costs.full(layout.total).seconds
        full = Candidate(
            Option("full", seconds, layout.total, 0, Reason.CHEAPEST),
            lambda: layout.all_computed(Reason.FORBIDDEN if off else Reason.FULL_IS_FASTER),
        )
        return layout, [full] if off else [full, *price_prefix(facts.costs, layout)]

    def _hits(
        self, layout: Layout, allowed: Sequence[tuple[StrategyInfo, float]]
    ) -> list[tuple[StrategyInfo, float, Hits]]:
        """Each strategy with the stored chunks that it can use."""
        found: dict[tuple[tuple[str, ...], frozenset[str], float], Hits] = {}
        parted = []
        for strategy, ratio in allowed:
            kind = (strategy.variants, strategy.needs, strategy.extra_bytes_per_token)
            if kind not in found:
                found[kind] = find_hits(self._facts.costs, layout, strategy)
            parted.append((strategy, ratio, found[kind]))
        return parted

    def _chunks_begin_at(self) -> Node | None:
        """The node that the first chunk would stand behind; None if it is not in the tree."""
        node = self._facts.tree.root
        for part in self._request.history:
            child = node.children.get(part.id)
            if child is None:
                return None
            node = child
        return node

    def _fixed(self, chunks: tuple[ChunkRef, ...]) -> frozenset[int]:
        """Places that must not move; they shift where a chunk was given twice."""
        given, fixed = self._request.chunks, self._request.fixed
        if len(chunks) == len(given) or not fixed:
            return fixed
        kept = {given[place].id for place in fixed if place < len(given)}
        return frozenset(place for place, chunk in enumerate(chunks) if chunk.id in kept)


def _take(
    layout: Layout, candidates: list[Candidate], declined: list[Option], queue_s: float
) -> Priced:
    """The cheapest; but an approximation must win clearly, or the best exact way is taken."""
    best = min(candidates, key=_rank)
    exact = min((c for c in candidates if c.strategy is None), key=price_of)
    needed_s = _needed_s(price_of(exact) - queue_s)
    too_close = best.strategy is not None and price_of(exact) - price_of(best) < needed_s
    return Priced(layout, candidates, declined, exact if too_close else best, exact, needed_s)


def _rank(candidate: Candidate) -> tuple[float, float]:
    """By price; of equal ones first what hides more of its loading, should the machine let it."""
    price_s, load = price_of(candidate), candidate.option.load
    return price_s, price_s if load is None else load.least_s


def _needed_s(exact_s: float) -> float:
    """By how much an approximation must beat the exact way, whose own seconds these are."""
    return max(MIN_GAIN_SHARE * exact_s, MIN_GAIN_S)


def _judged(candidate: Candidate, priced: Priced) -> Option:
    if candidate is priced.chosen:
        return candidate.option  # which says that it is the cheapest
    gain_s = price_of(priced.exact) - price_of(candidate)
    too_small = candidate.strategy is not None and 0 <= gain_s < priced.needed_s
    reason = Reason.GAIN_TOO_SMALL if too_small else Reason.DEARER
    name, seconds, rows, load_bytes, _, ratio, load = candidate.option
    return Option(name, seconds, rows, load_bytes, reason, ratio, load)  # `_replace` takes longer


def price_of(candidate: Candidate) -> float:
    assert candidate.option.predicted_s is not None, "declined options are no candidates"
    return candidate.option.predicted_s
