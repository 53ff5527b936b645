"""What a planner reads from outside: the knowledge tree, the chunk store, the gate.

Reads may be stale as soon as they return: the engine checks a plan when it admits the request.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvweave.kv.tree.node import ChunkRef, Match, Node
from kvweave.plan.layout import Stored
from kvweave.reasons import Reason
from kvweave.types import ChunkId


class ReadableTree(Protocol):
    """Exact KV behind one preamble, its root. Reading changes nothing.

    The engine thread may change a node between any two reads of it. So readers follow its
    dictionaries by single operations (`get`, `in`, `keys() & …`) and never loop over one.
    """

    @property
    def root(self) -> Node: ...
    def match(self, chunk_ids: Sequence[ChunkId]) -> Match: ...
    def match_tokens(self, chunks: Sequence[ChunkRef]) -> int: ...


class ChunkPeek(Protocol):
    """Where chunk KV lies, without touching it. Called on the planning thread; must not block."""

    def __call__(self, chunk_ids: Sequence[ChunkId]) -> Mapping[ChunkId, Sequence[Stored]]:
        """What is stored of each chunk; a chunk without anything may be missing."""
        ...


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


class ClosedGate:
    """No calibration: nothing approximate passes."""

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(None, Reason.NOT_CALIBRATED)

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(None, Reason.NOT_CALIBRATED)
