"""What a planner reads and what it says, as data; and a request laid out, before it is priced.

It reads the knowledge tree, the chunk store and the gate; what it reads may be stale as soon as it
is read: the engine checks a plan when it admits the request. A `Layout` puts together what of a
prompt is exact, stored or missing. A plan says what to do with each span of the prompt, at what
price, and why. It is frozen, and holds nothing until the engine leases it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvweave.config import QualitySettings
from kvweave.kv.tree.node import DEVICE, HOST, ChunkRef, Match, Node
from kvweave.plan.cost import StrategyInfo
from kvweave.plan.loading_cost import Load
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.profile import link_name
from kvweave.reasons import Reason
from kvweave.types import ChunkId


class SpanKind(StrEnum):
    EXACT = "exact"  # taken as it is
    FUSED = "fused"  # stored chunk KV, some rows recomputed
    COMPUTED = "computed"  # every row


class Span(NamedTuple):  # quicker to make than a frozen dataclass, and a plan makes dozens
    """A run of the request's tokens with one fate. Spans never overlap and leave no gap."""

    kind: SpanKind
    start: int
    num_tokens: int
    chunk_id: ChunkId | None  # None: preamble or question; parts of the history have one too
    reason: Reason
    tier: str = ""  # where its bytes are; "" for computed ones and those on the device
    load_bytes: int = 0
    variant: str = ""  # encoding context of stored chunk KV
    codec: str = ""  # of stored chunk KV; "" for pages of the tree
    in_history: bool = False  # a part of the history, before the chunks of this turn
    exact_after: bool = False  # rows computed here are exact: they may enter the knowledge tree


class Option(NamedTuple):
    """One option for answering, with its price."""

    name: str  # "full", "prefix", "fused epic" or "mixed epic"
    predicted_s: float | None  # to the first token; None: not priced
    rows: int  # tokens computed
    load_bytes: int
    reason: Reason  # why it was taken or not
    ratio: float | None = None  # of a strategy
    load: Load | None = None  # what of the price is loading; None: nothing is loaded
    again_s: float = 0.0  # beside its price: a second prefill, times the chance of a close call

    @property
    def expected_s(self) -> float:
        """What options are compared by."""
        assert self.predicted_s is not None, "declined options are no candidates"
        return self.predicted_s + self.again_s


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the planner is asked. Lengths and names, never text."""

    chunks: tuple[ChunkRef, ...]  # as retrieved
    question_tokens: int  # everything behind the chunks
    order: OrderPermission = OrderPermission.AS_FOUND
    quality_bound: float = QualitySettings().bound  # nats per token of mean KL
    history: tuple[ChunkRef, ...] = ()  # parts between preamble and chunks, in order; never move
    turns: int = 0  # of this conversation before this one whose chunks the history holds
    in_history: tuple[ChunkRef, ...] = ()  # retrieved, and left out because `history` has them
    strategies: tuple[StrategyInfo, ...] = ()  # that could fuse it now; none: the plan is exact


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, what it should cost, and what else there was."""

    spans: tuple[Span, ...]
    chosen: Option
    options: tuple[Option, ...]  # all of them, the chosen one too, as they were considered
    strategy: str | None  # None: exact
    order: tuple[ChunkRef, ...]  # chunks as they will stand
    ordered_by: str  # "given", "frequency", "tree" or "first hit"
    in_history: tuple[ChunkRef, ...]  # left out: the conversation has them
    exact_tokens: int  # of the tree's path: preamble, history and chunks
    close_call: float = 0.0  # nats: a first token that leads by less is computed exactly
    order_kept: Reason | None = None  # why "auto" moves no chunk; None: it might, or was not asked
    evidence: str = ""  # what the ratio of the strategy was measured on; "" where it is exact
    num_kept: int | None = None  # leading parts that may enter the tree, history first; None: all

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """A plan's prediction beside what happened: so that the model can be judged."""

    option: str
    predicted_s: float
    actual_s: float

    @property
    def error(self) -> float:
        """Relative; positive when the model was too pessimistic."""
        return self.predicted_s / self.actual_s - 1 if self.actual_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan that was carried out."""

    plan: Plan
    judged: PredictionCheck


class Stored(NamedTuple):
    """Chunk KV that some tier has."""

    variant: str  # encoding context it was computed in
    tier: str
    size_bytes: int  # of a load that wants nothing beside the layers
    exact_when_first: bool = False  # computed right behind the preamble
    rounded: bool = False  # by a lossy codec: good where the gate lets fused KV in, never exact
    has: frozenset[str] = frozenset()  # what lies beside it, such as "anchors"
    codec: str = ""  # how its bytes are written; "" if that does not matter
    never_first: bool = False  # a chunk right behind the preamble does without it: it is computed

    @property
    def link(self) -> str:
        """The link that its bytes come over."""
        return link_name(self.tier, self.codec) if self.codec else self.tier


class ReadableTree(Protocol):
    """Exact KV behind one preamble, its root. Reading changes nothing.

    The engine thread may change a node between any two reads of it. So readers follow its
    dictionaries by single operations (`get`, `in`, `keys() & …`) and never loop over one.
    """

    @property
    def root(self) -> Node: ...
    def match(self, chunk_ids: Sequence[ChunkId]) -> Match: ...
    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int: ...


# Says where chunk KV lies, without touching it; a chunk of which nothing is stored may be missing.
# Called on the planning thread; must not block.
ChunkPeek = Callable[[Sequence[ChunkId]], Mapping[ChunkId, Sequence[Stored]]]


class PromptShape(NamedTuple):
    """What the price of a shortcut depends on, of one prompt."""

    num_tokens: int
    num_chunks: int  # that might be fused, those of earlier turns among them
    has_history: bool = False
    num_said_tokens: int = 0  # of the history, in what cannot be fused


class Verdict(NamedTuple):
    """What calibration says about a strategy under a bound."""

    ratio: float | None  # smallest that passes; None: none does
    reason: Reason = Reason.BOUND_NOT_MET  # why none does
    # ratios that calibration allows and that are not taken
    passed: tuple[tuple[float, Reason], ...] = ()
    close: float = 0.0  # share of answers that turn out close calls and are computed exactly, too
    close_call: float = 0.0  # nats: a first token that leads by less is one; 0: none is
    evidence: str = ""  # what the ratio was measured on, for people


class Gate(Protocol):
    """The calibration of this model."""

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict: ...

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        """Whether chunks may stand in another order than they were found in: ratio 0 if that was
        measured to cost no more than the bound, else None."""
        ...


class Layout(NamedTuple):
    """Preamble, history, chunks in their order, question; per chunk what could be used of it."""

    preamble: Span
    path: tuple[Span, ...]  # history and chunks matched in the tree, device part first
    behind: tuple[ChunkRef, ...]  # the others, history first
    stored: tuple[Sequence[Stored], ...]  # for each of those
    question_tokens: int
    total: int
    # the first chunk from the store, computed right behind the preamble as here; FUSED if rounded
    first: Span | None
    num_history: int  # parts of the history among `path` and `behind`
    exact_tokens: int  # of the exact path, preamble included
    is_new_in_front: bool = (
        False  # the first of `behind` is stored, but not as it would stand there
    )

    def computed_part(self, place: int, start: int, reason: Reason, exact_after: bool) -> Span:
        """One of `behind`, computed. What was said has its own reason: nothing stores it."""
        chunk_id, num_tokens = self.behind[place]
        in_history = self.is_in_history(place)
        if in_history and not self.stored[place]:
            reason = Reason.HISTORY
        elif place == 0 and self.is_new_in_front and reason is Reason.NOT_STORED:
            reason = Reason.FRONT
        kind = SpanKind.COMPUTED
        return Span(
            kind, start, num_tokens, chunk_id, reason, "", 0, "", "", in_history, exact_after
        )

    def is_in_history(self, place: int) -> bool:
        """Whether one of `behind` is a part of the history."""
        return place < self.num_history - len(self.path)

    def question(self, exact_after: bool) -> Span:
        start = self.total - self.question_tokens
        kind = SpanKind.COMPUTED
        return Span(kind, start, self.question_tokens, None, Reason.ALWAYS, exact_after=exact_after)

    def all_computed(self) -> tuple[Span, ...]:
        """Full prefill."""
        reason = Reason.FULL_IS_FASTER
        spans = [as_computed(self.preamble, Reason.ALWAYS)]
        spans.extend(as_computed(span, reason) for span in self.path)
        start = self.preamble.num_tokens + sum(span.num_tokens for span in self.path)
        for place, chunk in enumerate(self.behind):
            spans.append(self.computed_part(place, start, reason, True))
            start += chunk.num_tokens
        return (*spans, self.question(True))


def lay_out(
    root: Node,
    match: Match,
    chunks: Sequence[ChunkRef],
    stored: Mapping[ChunkId, Sequence[Stored]],
    question_tokens: int,
    can_load: Callable[[str], bool],
    num_history: int = 0,
) -> Layout:
    """Put together what the tree and the store said. A path ends where it cannot be loaded.

    The first `num_history` of `chunks` are parts of the history: chunks of earlier turns, which may
    be stored, and what was said. None of them is exact from the store, nor is what stands behind.
    """
    start = root.num_tokens
    exact = _exact_path(root, match, num_history, can_load)
    path = exact[1:]
    exact_tokens = sum(span.num_tokens for span in exact)
    missing = Reason.NOT_STORED
    preamble = Span(SpanKind.COMPUTED, 0, start, None, missing, exact_after=True)
    if exact:
        preamble, start = exact[0], exact_tokens
    behind = tuple(chunks[len(path) :])
    total = start + sum([chunk.num_tokens for chunk in behind]) + question_tokens
    found: list[Sequence[Stored]] = [stored.get(chunk.id, ()) for chunk in behind]
    first, is_new_in_front = None, False
    if behind and not path:
        in_front = [copy for copy in found[0] if not copy.never_first]
        is_new_in_front = len(found[0]) > 0 and not in_front
        found[0] = found[0] if in_front else ()
        if preamble.kind is SpanKind.EXACT and not num_history:
            first = _first(behind[0], start, in_front, can_load)
    return Layout(
        preamble,
        path,
        behind,
        tuple(found),
        question_tokens,
        total,
        first,
        num_history,
        exact_tokens,
        is_new_in_front,
    )


def _exact_path(
    root: Node, match: Match, num_history: int, can_load: Callable[[str], bool]
) -> tuple[Span, ...]:
    """Return preamble and matched nodes as spans, up to the first that cannot be loaded."""
    if match.num_tokens < root.num_tokens:
        return ()
    spans: list[Span] = []
    start = 0
    for node in (root, *match.nodes):  # the root is no chunk, though it may be one of the tree's
        name = node.chunk_id if spans and node.depth else None
        in_history = 0 < len(spans) <= num_history
        span = _exact(node, start, name, in_history, can_load)
        if span is None:
            break
        spans.append(span)
        start += node.num_tokens
    return tuple(spans)


def _first(
    chunk: ChunkRef, start: int, copies: Sequence[Stored], can_load: Callable[[str], bool]
) -> Span | None:
    """The chunk right behind the preamble from the store, if a copy was computed there."""
    for copy in copies:
        if copy.exact_when_first and can_load(copy.link):
            return Span(
                SpanKind.FUSED if copy.rounded else SpanKind.EXACT,
                start,
                chunk.num_tokens,
                chunk.id,
                Reason.FIRST_ROUNDED if copy.rounded else Reason.FIRST,
                copy.tier,
                copy.size_bytes,
                copy.variant,
                copy.codec,
                exact_after=not copy.rounded,
            )
    return None


def _exact(
    node: Node,
    start: int,
    name: ChunkId | None,
    in_history: bool,
    can_load: Callable[[str], bool],
) -> Span | None:
    """A node of the tree as a span; None when it lies where it cannot be loaded from."""
    tier, load_bytes = "", 0
    if DEVICE not in node.pages and (pages := node.pages.get(HOST)) is not None:
        tier, load_bytes = HOST.value, pages.size_bytes
        if not can_load(tier):
            return None
    size, kind, reason = node.num_tokens, SpanKind.EXACT, Reason.IN_TREE
    return Span(kind, start, size, name, reason, tier, load_bytes, "", "", in_history, True)


def as_computed(span: Span, reason: Reason) -> Span:
    """Return a span with its tokens computed. Behind an exact prefix that is exact too."""
    return span._replace(
        kind=SpanKind.COMPUTED,
        reason=reason,
        tier="",
        load_bytes=0,
        codec="",
        exact_after=True,
    )
