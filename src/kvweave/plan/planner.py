"""One planner: exact before approximate, cheap before clever, full prefill when in doubt.

For one request it chooses an order, matches the knowledge tree, peeks the chunk store, prices every
option and takes the cheapest that the gate allows. What the conversation already holds was left out
before. It reads and never changes; the engine makes the plan true. A few hundred
microseconds, no torch.

What is fused, and whether a model was calibrated for it, comes from outside as plain data:
`StrategyInfo` per strategy and a `Gate`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.kv.tree.node import ChunkRef, Node
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.options import Candidate, StoredHits, find_hits, price_fused, price_prefix
from kvweave.plan.ordering import (
    AccessTable,
    Ordering,
    OrderPermission,
    OrderRules,
    OrderWorth,
    choose_order,
    num_worth_keeping,
)
from kvweave.plan.plan import (
    ChunkPeek,
    Gate,
    Layout,
    Option,
    Plan,
    PlanRequest,
    PromptShape,
    ReadableTree,
    Stored,
    lay_out,
)
from kvweave.plan.recent_requests import CloseCalls, PathReturns, TurnShare, is_worth_computing
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
    evidence: str = ""  # what the ratio was measured on


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
    for strategy, ratio, close, *_ in facts.allowed:
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


@dataclass(eq=False)
class RequestPricing:
    """Prices one request. Lives as long as its planning; remembers what it has priced."""

    _request: PlanRequest
    _chunks: tuple[ChunkRef, ...]  # of the request, each once
    _facts: PlanFacts
    _permission: OrderPermission  # AS_FOUND or FREE
    _orders: dict[tuple[ChunkRef, ...], PricedOrder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request, facts = self._request, self._facts
        parts = (*request.history, *self._chunks)
        tokens = facts.tree.root.num_tokens + sum([part.num_tokens for part in parts])
        self._full_s = facts.costs.full(tokens + request.question_tokens).seconds

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


def _nothing() -> Mapping[str, int]:
    return {}


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans requests of one model and preamble. `plan` is pure; `record_answer` and `learn_load`
    learn.

    For any one thread at a time: the caller brings the lock. The engine thread changes tree and
    store meanwhile, so what a plan read of them may be stale when the engine gets it; the engine
    checks on admission and computes what is gone.
    """

    tree: ReadableTree
    costs: CostModel
    peek: ChunkPeek
    gate: Gate
    is_tree_full: Callable[[], bool] = _never  # then chunks that may move share more paths
    accesses: AccessTable = field(default_factory=AccessTable)
    returns: PathReturns = field(default_factory=PathReturns)
    tree_uses: int = 1  # requests that bring a chunk before a free order leaves it in the tree
    turns: TurnShare = field(default_factory=TurnShare)
    close_calls: CloseCalls = field(default_factory=CloseCalls)
    unavailable: Mapping[str, Reason] = field(default_factory=dict)  # strategies that cannot run
    pending_bytes: Callable[[], Mapping[str, int]] = _nothing  # being loaded for others, by tier
    is_busy: Callable[[], bool] = _never  # whether others would run beside a request, now
    now_s: Callable[[], float] = time.time

    def plan(self, request: PlanRequest) -> Plan:
        """The cheapest option that request and gate allow."""
        chunks = tuple({chunk.id: chunk for chunk in request.chunks}.values())  # each once
        stored = self.peek([part.id for part in (*request.history, *chunks)])
        shape = _shape(request, stored, self.tree.root.num_tokens)
        allowed, declined = self._ask_gate(request, shape)
        facts = PlanFacts(self.tree, self._current_costs(), stored, allowed)
        permission, order_kept = self._permission(request, shape)
        pricing = RequestPricing(request, chunks, facts, permission)
        ordering = pricing.order(self.accesses, self.is_tree_full())
        priced = pricing.price(ordering.chunks)
        taken, options = priced.chosen, priced.options()
        if taken.strategy is not None:
            computed = self._computed_once(request, ordering.chunks, priced, facts.costs)
            if computed is not None:
                options = with_computed(options, taken, computed)
                taken = computed
        allowing = next((a for a in allowed if a.strategy.name == taken.strategy), None)
        return Plan(
            spans=taken.spans(),
            chosen=taken.option,
            options=(*options, *declined),
            strategy=taken.strategy,
            order=ordering.chunks,
            ordered_by=ordering.how,
            in_history=request.in_history,
            exact_tokens=priced.layout.exact_tokens,
            close_call=0.0 if allowing is None else allowing.close_call,
            order_kept=order_kept,
            evidence="" if allowing is None else allowing.evidence,
            num_kept=self._num_kept(request, ordering, permission),
        )

    def _num_kept(
        self, request: PlanRequest, ordering: Ordering, permission: OrderPermission
    ) -> int | None:
        """Return how many leading parts the prompt may leave in the tree; None: all. What came
        once would cut the paths of what comes often, if the user asks for more uses than one."""
        if self.tree_uses == 1 or permission is not OrderPermission.FREE:
            return None
        path = (*request.history, *ordering.chunks)
        found = len(self.tree.match([part.id for part in path]).nodes)
        in_front = len(request.history)
        matched = max(0, found - in_front)
        kept = num_worth_keeping(ordering.chunks, matched, self.accesses, self.tree_uses)
        return in_front + kept

    def _computed_once(
        self,
        request: PlanRequest,
        order: tuple[ChunkRef, ...],
        priced: PricedOrder,
        costs: CostModel,
    ) -> Candidate | None:
        """The best exact option, if the path comes back so often that it is cheaper in the end.

        The next turn of a conversation whose history keeps its chunks brings all of this one back,
        and one that had so many turns will have as many more: the same guess as for any path."""
        returns = self.returns.count([part.id for part in (*request.history, *order)])
        returns += request.turns
        total, question = priced.layout.total, request.question_tokens
        known_s = costs.prefix(total - question, total, {}).seconds
        exact_s, fused_s = price_of(priced.exact), price_of(priced.chosen)
        if not is_worth_computing(exact_s, fused_s, known_s, returns):
            return None
        option = priced.exact.option._replace(reason=Reason.RETURNS)
        return priced.exact._replace(option=option)

    def num_returned(self, request: PlanRequest, plan: Plan) -> int:
        """Return how many leading parts of a fused plan's path came before or will come again, and
        are not exact yet: computed once, they would be. 0: none, or all are exact. Ask before
        `record_answer`."""
        if plan.strategy is None:
            return 0
        path = [part.id for part in (*request.history, *plan.order)]
        if request.turns or (not request.history and self.turns.is_likely):
            num_returned = len(path)  # the next turn begins with all of this one
        else:  # or with its history alone, where chunks stand in front of the last question only
            num_returned = max(len(request.history), self.returns.num_known_parts(path))
        if plan.num_kept is not None:
            num_returned = min(num_returned, plan.num_kept)
        return num_returned if num_returned > len(self.tree.match(path).nodes) else 0

    def record_answer(self, request: PlanRequest, plan: Plan, *, was_close: bool = False) -> None:
        """Learn from an answered request. `was_close`: what was fused was thrown away for it."""
        self.close_calls.push(None if plan.strategy is None else was_close)
        self.count_chunks(request)
        self.turns.push(request.turns > 0)
        self.returns.push([part.id for part in (*request.history, *plan.order)])

    def count_chunks(self, request: PlanRequest) -> None:
        """Count the chunks of an answered request, by which the next ones are put in order."""
        self.accesses.push([chunk.id for chunk in request.chunks])

    def learn_load(self, plan: Plan, actual_s: float, *, beside: bool = False) -> None:
        """Learn what loading costs from a plan that was carried out as it says, in so many seconds.
        `beside`: while others ran, whose time is not among them."""
        load = plan.chosen.load
        link = None if load is None else self.costs.profile.link(load.link)
        if load is not None and link is not None:
            link.paid_when(beside).observe(load, actual_s, self.now_s())

    def _permission(
        self, request: PlanRequest, shape: PromptShape
    ) -> tuple[OrderPermission, Reason | None]:
        """Order is a shortcut like any other: it goes through the gate, which may say why not."""
        if request.order is not OrderPermission.AUTO:
            return request.order, None
        verdict = self.gate.may_reorder(request.quality_bound, shape)
        if verdict.ratio is not None:
            return OrderPermission.FREE, None
        is_over = verdict.reason is Reason.BOUND_NOT_MET
        return OrderPermission.AS_FOUND, Reason.ORDER_MATTERS if is_over else verdict.reason

    def _current_costs(self) -> CostModel:
        """The prices with what others load, and with what loading costs now."""
        shares = self.costs.shares_at(self.now_s(), self.is_busy())
        return CostModel(self.costs.profile, self.pending_bytes(), shares)

    def _ask_gate(
        self, request: PlanRequest, shape: PromptShape
    ) -> tuple[list[AllowedStrategy], list[Option]]:
        """Return what the gate lets through, and the other options with the reason why not."""
        allowed: list[AllowedStrategy] = []
        passed: list[Option] = []
        refused: dict[str, Reason] = {}
        for strategy in request.strategies:
            verdict = self.gate.min_ratio(strategy.name, request.quality_bound, shape)
            name = f"fused {strategy.name}"
            passed += [Option(name, None, 0, 0, why, ratio) for ratio, why in verdict.passed]
            if verdict.ratio is None:
                refused[strategy.name] = verdict.reason
            elif verdict.ratio >= 1:
                refused[strategy.name] = Reason.BOUND_NOT_MET
            else:
                close = self.close_calls.share(verdict.close)
                lead = verdict.close_call
                found = AllowedStrategy(strategy, verdict.ratio, close, lead, verdict.evidence)
                allowed.append(found)
        refused |= self.unavailable
        declined = [Option(f"fused {name}", None, 0, 0, why) for name, why in refused.items()]
        return allowed, [*declined, *passed]


def _shape(
    request: PlanRequest, stored: Mapping[ChunkId, Sequence[Stored]], preamble_tokens: int
) -> PromptShape:
    parts = (*request.history, *request.chunks)
    num_tokens = preamble_tokens + sum(part.num_tokens for part in parts) + request.question_tokens
    said = [part for part in request.history if not stored.get(part.id)]
    return PromptShape(
        num_tokens,
        len(parts) - len(said),
        bool(request.history),
        sum(part.num_tokens for part in said),
    )
