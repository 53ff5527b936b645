"""One request, priced: in whatever order its chunks may stand, the one to answer in."""

from collections.abc import Sequence

from kvweave.kv.tree.node import ChunkRef, Node
from kvweave.plan.load_or_compute import AtLeast
from kvweave.plan.one_order import Facts, OneOrder, Priced, price_of
from kvweave.plan.options import Candidate
from kvweave.plan.ordering import AccessTable, Ordering, OrderPermission, choose_order
from kvweave.plan.plan import PlanRequest, Reuse
from kvweave.types import ChunkId


class Pricing:
    """Prices one request. Lives as long as its planning; remembers what it has priced."""

    def __init__(self, request: PlanRequest, chunks: tuple[ChunkRef, ...], facts: Facts) -> None:
        """`chunks` are those of the request, each once."""
        self._request = request
        self._chunks = chunks
        self._facts = facts
        parts = (*request.history, *chunks)
        tokens = facts.tree.root.num_tokens + sum([part.num_tokens for part in parts])
        self._full_s = facts.costs.full(tokens + request.question_tokens).seconds
        self._orders: dict[tuple[ChunkRef, ...], OneOrder] = {}

    def order(self, table: AccessTable, tail: bool) -> Ordering:
        """The order to answer in: never one that is priced above the given one."""
        request, tree, stored = self._request, self._facts.tree, self._facts.stored
        start = self._chunks_begin_at()
        permission = request.order
        if request.reuse is Reuse.OFF or start is None:  # then no order matches more than another
            permission = OrderPermission.KEEP
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

        return choose_order(
            start or tree.root,
            self._chunks,
            table,
            permission,
            exact_tokens,
            first,
            self._fixed(),
            tail,
            self.costs_more,
        )

    def costs_more(self, order: tuple[ChunkRef, ...], given: tuple[ChunkRef, ...]) -> bool:
        """Whether the given order would be answered faster, by the same rules of choice.

        Ways that cannot be faster are not priced: most of those of the given order.
        """
        limit_s = price_of(self.price(order).chosen)
        other = self.at(given)
        if other.exact_s < limit_s:
            return True
        at_least = AtLeast(self._facts.costs, other.layout)
        for strategy, ratio in self._facts.allowed:
            if at_least.is_below(strategy, ratio, limit_s):
                outcome = other.fused(strategy, ratio)
                if isinstance(outcome, Candidate):
                    fused_s = price_of(outcome)
                    if fused_s < limit_s and other.exact_s - fused_s >= other.needed_s:
                        return True
        return False

    def price(self, order: tuple[ChunkRef, ...]) -> Priced:
        """Every way to answer in this order, and the one to take."""
        return self.at(order).priced()

    def at(self, order: tuple[ChunkRef, ...]) -> OneOrder:
        """The request in this order."""
        found = self._orders.get(order)
        if found is None:
            found = self._orders[order] = OneOrder(self._request, order, self._full_s, self._facts)
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

    def _fixed(self) -> frozenset[int]:
        """Places that must not move; they shift where a chunk was given twice."""
        given, fixed, chunks = self._request.chunks, self._request.fixed, self._chunks
        if len(chunks) == len(given) or not fixed:
            return fixed
        kept = {given[place].id for place in fixed if place < len(given)}
        return frozenset(place for place, chunk in enumerate(chunks) if chunk.id in kept)
