"""What a planner reads and what it says, as data.

It reads the knowledge tree, the chunk store and the gate; what it reads may be stale as soon as it
is read: the engine checks a plan when it admits the request. It says what to do with each span of
the prompt, at what price, and why. A plan is frozen, and holds nothing until the engine leases it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvweave.config import QualitySettings
from kvweave.kv.tree.node import ChunkRef, Match, Node
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


class Gate(Protocol):
    """The calibration of this model."""

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict: ...

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        """Whether chunks may stand in another order than they were found in: ratio 0 if that was
        measured to cost no more than the bound, else None."""
        ...
