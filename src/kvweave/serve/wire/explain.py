"""Replies that belong to no request in particular: models, health, explain."""

from typing import Literal

from kvweave.serve.wire.chat import Outgoing, ReplyChoice, Usage


class ChunkOut(Outgoing):
    """One chunk of the prompt."""

    start: int  # position of its first token
    tokens: int
    state: str  # exact, reused (some of it may be recomputed) or computed
    recomputed: int  # tokens of it that were
    tier: str | None  # where its KV came from
    why: str | None  # why it was computed


class OptionOut(Outgoing):
    """One way to answer that was considered."""

    name: str
    predicted_ms: float | None  # to the first token; null: not priced
    rows: int  # tokens computed
    load_bytes: int
    load_ms: float | None = None  # loading by itself; null: nothing is loaded
    load_share: float | None = None  # of it that the price holds, learnt from earlier requests
    ratio: float | None
    reason: str  # why it was taken or not


class DecisionOut(Outgoing):
    """Why reuse "auto" did what it did."""

    chosen: str
    predicted_ms: float
    actual_ms: float
    ordered_by: str
    options: list[OptionOut]


class TimelineOut(Outgoing):
    """Where the time went, in milliseconds."""

    queue: float  # admitted, not begun
    retrieve: float
    load: float
    select: float
    compute: float
    first_token: float  # from the begin of the work
    total: float


class Explain(Outgoing):
    """What was done for the prompt of the first choice."""

    strategy: str
    ratio: float
    encoding: str | None  # of the stored chunk KV
    tokens: dict[str, int]  # by state: exact, reused, recomputed, computed
    work: float  # rows computed ÷ rows of a full prefill
    loaded_bytes: dict[str, int]  # by tier
    way: str | None = None  # of fused prompts: joined, streamed or whole; see docs/engine.md
    chunks: list[ChunkOut]
    states: list[tuple[str, int, int]]  # runs of tokens of one state: state, start, end
    decision: DecisionOut | None  # null unless reuse is "auto"
    speculation: dict[str, int | float | None] | None = None  # what was guessed while searching
    timeline_ms: TimelineOut


class ChatReply(Outgoing):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since 1970
    model: str
    choices: list[ReplyChoice]
    usage: Usage
    explain: Explain | None = None  # extension; where it was asked for


class ModelCard(Outgoing):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvweave"
    max_model_len: int  # tokens of prompt and answer together; the name other servers use


class ModelList(Outgoing):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Outgoing):
    status: Literal["ok"] = "ok"
    model: str
    running: int  # answers being computed
    waiting: int  # admitted, not begun
    finished: int  # since the start, as are the next two
    failed: int
    abandoned: int  # the client left
    pinned: int  # chunk KV that some lease holds


class Ready(Outgoing):
    status: Literal["ready"] = "ready"
    model: str
