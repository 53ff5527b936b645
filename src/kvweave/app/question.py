"""What a caller asks for: a question with everything that goes with it, checked in one place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

from kvweave.calibrate.gate import BOUND as BOUND
from kvweave.engine.sampling import Sampling
from kvweave.errors import RequestError
from kvweave.fuse.strategy import NAMES
from kvweave.plan.ordering import OrderPermission
from kvweave.text.prompt import Document

TOP_K = 5  # chunks that are put in front of a question
AUTO = "auto"  # a `reuse` that is no strategy: the planner chooses one
REUSES = ("full", AUTO, *(name for name in NAMES if name != "full"))
SpeculationMode = Literal["auto", "on", "off"]


class AskOptions(TypedDict, total=False):
    """Keyword arguments of `Weave.ask`, `stream` and `plan`; `Question` says what each means."""

    documents: Sequence[Document | str] | None
    sampling: Sampling | None
    system: str | None
    k: int
    reuse: str | None
    ratio: float | None
    bound: float
    order: str
    conversation_id: str | None
    history: Sequence[Mapping[str, Any]]
    tenant: str
    speculate: SpeculationMode | None


@dataclass(frozen=True, slots=True)
class Question:
    """One question. Raises RequestError if it cannot be meant."""

    question: str
    documents: Sequence[Document | str] | None = None  # None: the nearest chunks there are
    sampling: Sampling | None = None  # None: the likeliest token each time
    system: str | None = None  # in place of the Weave's own system prompt
    k: int = TOP_K  # chunks to take from the knowledge base
    reuse: str | None = None  # a strategy, or "auto"; None: see `answer/router.py`
    ratio: float | None = None  # of reused tokens to recompute; None: the strategy's own
    bound: float = BOUND  # "auto": nats per token that reuse may cost
    order: str = "keep"  # "auto": "free" lets it move chunks
    conversation_id: str | None = None  # which conversation the history is of
    history: Sequence[Mapping[str, Any]] = field(default=())  # what was said, a user's first
    tenant: str = ""  # whose conversation it is; "": the Weave's own
    speculate: SpeculationMode | None = None  # None: as the Weave does

    def __post_init__(self) -> None:
        if not 0.0 <= self.bound < math.inf:
            raise RequestError(
                f"bound {self.bound:g} is no number of nats from 0 on; give one such as 0.02"
            )
        if self.order not in list(OrderPermission):
            known = ", ".join(OrderPermission)
            raise RequestError(f"order {self.order!r} is unknown; known: {known}")
        if self.speculate not in (None, *get_args(SpeculationMode)):
            known = ", ".join(get_args(SpeculationMode))
            raise RequestError(f"speculate {self.speculate!r} is unknown; known: {known}")
        if self.reuse is not None and self.reuse not in REUSES:
            raise RequestError(f"reuse {self.reuse!r} is unknown; known: {', '.join(REUSES)}")
        if self.reuse == AUTO and self.ratio is not None:
            raise RequestError("reuse 'auto' chooses the ratio itself; leave it out")
        refuse_empty(self.question)

    @property
    def drawn(self) -> Sampling:
        return self.sampling or Sampling()


def refuse_empty(question: str) -> None:
    if not question.strip():
        raise RequestError("the question is empty; ask something")
