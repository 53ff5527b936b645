"""One planner: exact before approximate, cheap before clever, full prefill when in doubt.

For one request it parts what the conversation has, chooses an order, matches the knowledge tree,
peeks the chunk store, prices every way to answer and takes the cheapest that the gate allows. It
reads and never changes; the engine makes the plan true. A few hundred microseconds, no torch.

What is fused, and whether a model was calibrated for it, comes from outside as plain data:
`StrategyInfo` per strategy and a `Gate`. Without them the planner serves exact KV only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvweave.kv.tree.node import ChunkRef, Match, Node
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.dedup import ChunkMap, Deduped
from kvweave.plan.layout import Layout, Stored, lay_out
from kvweave.plan.options import Candidate, Hits, Limits, find_hits, price_fused, price_prefix
from kvweave.plan.ordering import (
    PROMOTION,
    AccessTable,
    Ordering,
    OrderPermission,
    choose_order,
    num_promotable,
)
from kvweave.plan.plan import Option, Plan, PlanRequest, Reason, Reuse
from kvweave.types import ChunkId

MIN_GAIN_S = 0.020  # an approximation must win by this
MIN_GAIN_SHARE = 0.10  # and by this share of the exact price


class ChunkPeek(Protocol):
    """Where chunk KV lies, without touching it. Called on the planning thread; must not block."""

    def __call__(self, chunk_ids: Sequence[ChunkId]) -> Mapping[ChunkId, Sequence[Stored]]:
        """What is stored of each chunk; a chunk without anything may be missing."""
        ...


class Verdict(NamedTuple):
    """What calibration says about a strategy under a bound."""

    ratio: float | None  # smallest that passes; None: none does
    reason: Reason = Reason.BOUND_NOT_MET  # why none does


class Gate(Protocol):
    """The calibration of this model."""

    def min_ratio(self, strategy: str, bound: float) -> Verdict: ...


class ClosedGate:
    """No calibration: nothing approximate passes."""

    def min_ratio(self, strategy: str, bound: float) -> Verdict:
        return Verdict(None, Reason.NOT_CALIBRATED)


class ReadableTree(Protocol):
    """What a planner reads of a knowledge tree: exact KV behind one preamble, its root."""

    @property
    def root(self) -> Node: ...
    def match(self, chunk_ids: Sequence[ChunkId]) -> Match: ...
    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int: ...


@dataclass(slots=True)
class Planner:
    """Plans requests of one model and preamble. `plan` is pure; `finished` learns from a run."""

    tree: ReadableTree
    costs: CostModel
    peek: ChunkPeek
    strategies: tuple[StrategyInfo, ...] = ()
    gate: Gate = field(default_factory=ClosedGate)
    limits: Limits = field(default_factory=Limits)
    promotion: int = PROMOTION  # uses before a chunk may enter the tree; 1 where room is plenty
    common_tail: bool = False  # see choose_order
    accesses: AccessTable = field(default_factory=AccessTable)
    conversations: ChunkMap = field(default_factory=ChunkMap)

    def plan(self, request: PlanRequest) -> Plan:
        deduped = self.conversations.part(request.conversation, request.history, request.chunks)
        stored = self.peek([chunk.id for chunk in deduped.new])
        ordering = self._order(request, deduped, stored)
        match = self.tree.match([chunk.id for chunk in ordering.chunks])
        layout = lay_out(
            self.tree.root,
            match,
            ordering.chunks,
            stored,
            request.question_tokens,
            self.costs.can_load,
        )
        off = request.reuse is Reuse.OFF
        full = Candidate(
            Option("full", self.costs.full(layout.total).seconds, layout.total, 0, Reason.CHEAPEST),
            lambda: layout.all_computed(Reason.FORBIDDEN if off else Reason.FULL_IS_FASTER),
        )
        if off:
            return _decide(request, [full], [], layout, ordering, deduped)
        exact = [full, *price_prefix(self.costs, layout)]
        fused, declined = self._fused(request, layout)
        return _decide(request, [*exact, *fused], declined, layout, ordering, deduped)

    def finished(self, request: PlanRequest, plan: Plan, message: str = "") -> int:
        """The request was answered. Returns how many chunks of its order may be in the tree.

        `message`: key under which the turn will stand in the history of its conversation.
        """
        self.accesses.push([chunk.id for chunk in request.chunks])
        self.conversations.sent(request.conversation, message, [c.id for c in plan.order])
        matched = len(self.tree.match([chunk.id for chunk in plan.order]).nodes)
        return num_promotable(plan.order, matched, self.accesses, self.promotion)

    def _order(
        self,
        request: PlanRequest,
        deduped: Deduped,
        stored: Mapping[ChunkId, Sequence[Stored]],
    ) -> Ordering:
        root = self.tree.root
        chunks = deduped.new
        fixed = request.fixed
        if len(chunks) != len(request.chunks) and fixed:
            kept = {request.chunks[place].id for place in fixed if place < len(request.chunks)}
            fixed = frozenset(p for p, chunk in enumerate(chunks) if chunk.id in kept)
        first = {
            chunk.id: chunk.num_tokens
            for chunk in chunks
            if any(c.exact_when_first and not c.rounded for c in stored.get(chunk.id, ()))
        }

        def exact_tokens(order: Sequence[ChunkRef]) -> int:
            tokens = self.tree.match_tokens(order)
            if not order or order[0].id in root.children:
                return tokens
            return tokens + first.get(order[0].id, 0)

        return choose_order(
            root,
            chunks,
            self.accesses,
            OrderPermission.KEEP if request.reuse is Reuse.OFF else request.order,
            exact_tokens,
            first,
            fixed,
            self.common_tail,
        )

    def _fused(self, request: PlanRequest, layout: Layout) -> tuple[list[Candidate], list[Option]]:
        """Priced candidates, and those declined before pricing with their reasons."""
        candidates: list[Candidate] = []
        declined: list[Option] = []
        hits: dict[tuple[tuple[str, ...], frozenset[str]], Hits] = {}
        for strategy in self.strategies:
            name = f"fused {strategy.name}"
            if request.reuse is not Reuse.AUTO:
                declined.append(Option(name, None, 0, 0, Reason.FORBIDDEN))
                continue
            verdict = self.gate.min_ratio(strategy.name, request.quality_bound)
            if verdict.ratio is None or verdict.ratio >= 1:
                reason = verdict.reason if verdict.ratio is None else Reason.BOUND_NOT_MET
                declined.append(Option(name, None, 0, 0, reason))
                continue
            kind = (strategy.variants, strategy.needs)
            if kind not in hits:
                hits[kind] = find_hits(self.costs, layout, strategy)
            outcome = price_fused(
                self.costs, layout, hits[kind], strategy, verdict.ratio, self.limits
            )
            if isinstance(outcome, Candidate):
                candidates.append(outcome)
            else:
                declined.append(Option(name, None, 0, 0, outcome, verdict.ratio))
        return candidates, declined


def _decide(
    request: PlanRequest,
    candidates: list[Candidate],
    declined: list[Option],
    layout: Layout,
    ordering: Ordering,
    deduped: Deduped,
) -> Plan:
    """The cheapest; but an approximation must win clearly, or the best exact way is taken."""
    best = min(candidates, key=_price)
    exact = min((c for c in candidates if c.strategy is None), key=_price)
    needed = max(MIN_GAIN_SHARE * _price(exact), MIN_GAIN_S)
    too_close = best.strategy is not None and _price(exact) - _price(best) < needed
    chosen = exact if too_close else best
    options = [_judged(c, chosen, exact, needed) for c in candidates]
    return Plan(
        spans=chosen.spans(),
        chosen=next(o for o, c in zip(options, candidates, strict=True) if c is chosen),
        options=(*options, *declined),
        strategy=chosen.strategy,
        order=ordering.chunks,
        ordered_by=ordering.how,
        in_history=deduped.in_history,
        exact_tokens=layout.exact_tokens,
    )


def _judged(candidate: Candidate, chosen: Candidate, exact: Candidate, needed: float) -> Option:
    option = candidate.option
    if candidate is chosen:
        return option._replace(reason=Reason.CHEAPEST)
    if candidate.strategy is not None and 0 <= _price(exact) - _price(candidate) < needed:
        return option._replace(reason=Reason.GAIN_TOO_SMALL)
    return option._replace(reason=Reason.DEARER)


def _price(candidate: Candidate) -> float:
    assert candidate.option.predicted_s is not None, "declined options are no candidates"
    return candidate.option.predicted_s
