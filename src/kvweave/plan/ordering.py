"""In which order the chunks of a request should stand (after CRAFT).

An exact prefix is found again only if the chunks stand in the same order again. Retrieval orders by
the question, so the same chunks come in ever new orders; where the caller gives the permission
(`order="free"`), they are put in an order that many requests share. Never at the caller's cost: an
order is used only if it matches clearly more exact tokens than the given one and is not priced
above it: a longer path that lies in a slow tier is no gain.

Only chunks move. The preamble, the history and the question stay where they are.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvweave.config import LibrarySettings, PlannerSettings
from kvweave.errors import ConfigError
from kvweave.kv.tree.node import ChunkRef, Node
from kvweave.types import ChunkId

WINDOW = PlannerSettings().window  # requests that are counted, unless a user says otherwise
PROMOTION = (
    LibrarySettings().promotion
)  # uses in the window before a chunk that requests bring gets its KV stored
MAX_VISITS = 256  # nodes a walk through the tree may look at
MIN_GAIN_TOKENS = 64
MIN_GAIN_SHARE = 0.05


# (an order, the given one) → whether the first is predicted to take longer
CostsMore = Callable[[tuple[ChunkRef, ...], tuple[ChunkRef, ...]], bool]


class OrderPermission(StrEnum):
    """What the caller allows."""

    AS_FOUND = "as_found"  # chunks stand as they were found
    FREE = "free"  # they may move to where more of them is exact
    AUTO = "auto"  # they may if calibration measured that this model does not mind


class AccessTable:
    """How many of the last requests had each name, such as that of a chunk that they retrieved. Not
    thread-safe; below 1 MB where names are those of chunks."""

    def __init__(self, window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"AccessTable.window must be at least 1 request, got {window}")
        self._window = window
        self._requests: deque[frozenset[Hashable]] = deque()
        self._counts: Counter[Hashable] = Counter()

    def push(self, names: Iterable[Hashable]) -> None:
        """Count an answered request. Not before its answer: its order used the old counts."""
        request = frozenset(names)
        self._requests.append(request)
        self._counts.update(request)
        if len(self._requests) > self._window:
            for name in self._requests.popleft():
                self._counts[name] -= 1
                if not self._counts[name]:
                    del self._counts[name]

    def count(self, name: Hashable) -> int:
        return self._counts.get(name, 0)  # Counter's own default is slow

    def rank(self, chunk: ChunkRef) -> int:
        """Return the sort key of a chunk: lowest for what is retrieved most, in powers of two."""
        return -self.count(chunk.id).bit_length()

    def __len__(self) -> int:
        """Return how many names have a count."""
        return len(self._counts)


class Ordering(NamedTuple):
    """An order and what it was chosen for."""

    chunks: tuple[ChunkRef, ...]  # a permutation of what was given
    exact_tokens: int  # matched by it, preamble included
    given_tokens: int  # matched by the given order
    how: str  # "given", "frequency", "tree" or "first hit"


def frequency_order(
    chunks: Sequence[ChunkRef], table: AccessTable, stay: int = 0
) -> tuple[ChunkRef, ...]:
    """Most retrieved first, behind the first `stay` chunks. Ties by chunk id, which is the same on
    every machine.

    Counts are compared in powers of two: two chunks whose counts cross back and forth would
    otherwise swap places and cut off the stored path each time.
    """
    free = sorted(chunks[stay:])  # by id
    free.sort(key=table.rank)
    return (*chunks[:stay], *free)


def num_worth_keeping(
    order: Sequence[ChunkRef], matched: int, table: AccessTable, uses: int
) -> int:
    """Return how many leading chunks of an order may be in the tree: the matched ones and, behind
    them, a run of chunks that `uses` requests brought, this one among them. Ask before `push`."""
    end = matched
    while end < len(order) and table.count(order[end].id) + 1 >= uses:
        end += 1
    return end


def tree_order(root: Node, chunks: Sequence[ChunkRef]) -> tuple[ChunkRef, ...]:
    """The longest stored path (in tokens) made of these chunks alone, then the rest as given."""
    best: list[Node] = []
    best_tokens = root.end
    visits = 0
    left = {chunk.id for chunk in chunks}  # not on the path
    path: list[Node] = []

    def walk(children: Mapping[ChunkId, Node], left_tokens: int) -> None:
        """`left_tokens` are not yet on the path."""
        nonlocal best, best_tokens, visits
        for chunk_id in sorted(children.keys() & left):
            child = children[chunk_id]
            if visits >= MAX_VISITS:
                return
            visits += 1
            end = child.end
            if end > best_tokens:
                best, best_tokens = [*path, child], end
            below = child.children
            if not below:
                continue
            rest = left_tokens - child.num_tokens
            if end + rest <= best_tokens:  # even with all the rest
                continue
            left.discard(chunk_id)
            if not left.isdisjoint(below):  # most paths end here
                path.append(child)
                walk(below, rest)
                path.pop()
            left.add(chunk_id)

    walk(root.children, sum([chunk.num_tokens for chunk in chunks]))
    by_id = {chunk.id: chunk for chunk in chunks}
    left.difference_update([node.chunk_id for node in best])
    return (
        *[by_id[node.chunk_id] for node in best],
        *[chunk for chunk in chunks if chunk.id in left],
    )


@dataclass(frozen=True, slots=True)
class OrderRules:
    """What may move."""

    permission: OrderPermission
    # Also put what stands behind the match in frequency order. That gains nothing for this request
    # and, in a tree with little room, more for the next ones (bench/ordering.py).
    common_tail: bool = False


@dataclass(frozen=True, slots=True)
class OrderWorth:
    """What an order is worth to the request."""

    exact_tokens: Callable[[Sequence[ChunkRef]], int]  # that it would match
    # Chunks whose stored KV is exact right behind the preamble: with nothing in the tree the
    # longest of them goes first.
    exact_when_first: Collection[ChunkId] = ()
    costs_more: CostsMore | None = None  # than the given one; None leaves it to the tokens


def choose_order(
    root: Node,
    chunks: Sequence[ChunkRef],
    table: AccessTable,
    rules: OrderRules,
    worth: OrderWorth,
) -> Ordering:
    """Return the order to use: the given one unless another clearly matches more exact tokens and
    costs no more.

    `root` is where the chunks begin: the preamble's node, or that of the history's last part.
    """
    given = tuple(chunks)
    given_tokens = worth.exact_tokens(given)
    kept = Ordering(given, given_tokens, given_tokens, "given")
    if rules.permission is OrderPermission.AS_FOUND or len(given) < 2:
        return kept
    chosen = _longest_match(root, kept, table, worth)
    if not rules.common_tail:
        return chosen
    stays = max(_num_matched(root, chosen.chunks), int(chosen.how == "first hit"))
    order = frequency_order(chosen.chunks, table, stays)
    if order == chosen.chunks:
        return chosen
    if worth.costs_more is not None and worth.costs_more(order, given):
        return chosen
    how = "frequency" if chosen is kept else chosen.how
    return Ordering(order, worth.exact_tokens(order), given_tokens, how)


def _longest_match(root: Node, kept: Ordering, table: AccessTable, worth: OrderWorth) -> Ordering:
    """Return the order that matches most exact tokens, or `kept`, the given one, unless that is a
    clear gain and costs no more."""
    given = kept.chunks
    candidates = [("tree", tree_order(root, given)), ("frequency", frequency_order(given, table))]
    firsts = [chunk for chunk in given if chunk.id in worth.exact_when_first]
    if firsts:
        first = max(firsts, key=lambda chunk: chunk.num_tokens)
        candidates.append(("first hit", (first, *[c for c in given if c is not first])))
    best = kept
    for how, order in candidates:
        tokens = worth.exact_tokens(order)
        if tokens > best.exact_tokens:
            best = Ordering(order, tokens, kept.given_tokens, how)
    total = sum(chunk.num_tokens for chunk in given)
    gain = best.exact_tokens - kept.given_tokens
    if gain < max(MIN_GAIN_TOKENS, MIN_GAIN_SHARE * total):
        return kept
    too_dear = worth.costs_more is not None and worth.costs_more(best.chunks, given)
    return kept if too_dear else best


def _num_matched(node: Node, chunks: Sequence[ChunkRef]) -> int:
    """Return how many leading chunks are in the tree."""
    for num, chunk in enumerate(chunks):
        child = node.children.get(chunk.id)
        if child is None:
            return num
        node = child
    return len(chunks)
