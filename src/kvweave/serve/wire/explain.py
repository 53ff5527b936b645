"""The explain block of a reply: what was done for an answer, in plain JSON."""

import math
from typing import Any

from kvweave.app.answer.notes import UpstreamNote
from kvweave.app.weave import Answer
from kvweave.reasons import Reason
from kvweave.serve.wire.base import Outgoing


class ChunkOut(Outgoing):
    """One chunk of the prompt."""

    start: int  # position of its first token
    tokens: int
    state: str  # exact, reused (some of it may be recomputed) or computed; "": not known
    recomputed: int  # tokens of it that were
    tier: str | None  # where its KV came from
    why: str | None  # why it was computed


class OptionOut(Outgoing):
    """One option to answer that was considered."""

    name: str
    predicted_ms: float | None  # to the first token; null: not priced
    again_ms: float = 0.0  # a second prefill, times the chance of a close call; counts as well
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
    order_kept: str | None = None  # why no chunk may move, where that is left to us
    options: list[OptionOut]


class Timeline(Outgoing):
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
    why: str | None = None  # not more is reused, and what could be done about it
    encoding: str | None  # of the stored chunk KV
    tokens: dict[str, int]  # by state: exact, reused, recomputed, computed
    work: float  # rows computed ÷ rows of a full prefill
    loaded_bytes: dict[str, int]  # by tier
    left_out: int = 0  # chunks that were found and not sent: the history holds them
    way: str | None = None  # of fused prompts: joined, streamed or whole; see docs/engine.md
    chunks: list[ChunkOut]
    states: list[tuple[str, int, int]]  # runs of tokens of one state: state, start, end
    decision: DecisionOut | None  # null unless reuse is "auto"
    speculation: dict[str, int | float | None] | None = None  # what was guessed while searching
    not_guessed: str | None = None  # why nothing was to be guessed
    # of a fused answer: whether it is computed exactly later, and what that found of others
    audit: dict[str, bool | int | float | None] | None = None
    full_ms: float | None = None  # a full prefill of this prompt, about; null: never measured
    upstream: dict[str, Any] | None = None  # of a gateway: which one answered, and what it says
    timeline_ms: Timeline


def explain_of(answer: Answer, queue_s: float) -> Explain:
    """The explain block of an answer that waited `queue_s` for its worker."""
    record = answer.explain
    if answer.upstream is not None:
        return _routed(answer, answer.upstream, queue_s)
    if record is None:  # nothing stored was looked at: all was computed
        return Explain(
            strategy="full",
            ratio=0.0,
            encoding=None,
            tokens={"exact": 0, "reused": 0, "recomputed": 0, "computed": answer.prompt_tokens},
            work=1.0,
            loaded_bytes={},
            chunks=[],
            states=[("computed", 0, answer.prompt_tokens)],
            decision=None,
            full_ms=_full_ms(answer),
            timeline_ms=_timeline(answer, queue_s),
        )
    return Explain(
        strategy=record.strategy,
        ratio=record.ratio,
        why=record.why,
        encoding=record.encoding,
        tokens=record.counts,
        work=round(record.work, 4),
        loaded_bytes=record.loaded_bytes,
        left_out=record.left_out,
        way=record.way,
        chunks=[
            ChunkOut(
                start=chunk.start,
                tokens=chunk.num_tokens,
                state=str(chunk.state),
                recomputed=chunk.recomputed,
                tier=chunk.tier,
                why=chunk.why,
            )
            for chunk in record.chunks
        ],
        states=[(str(state), start, end) for state, start, end in record.runs()],
        decision=_decision(answer),
        speculation=None if answer.speculation is None else answer.speculation.document(),
        not_guessed=answer.not_guessed,
        audit=None if answer.audit is None else answer.audit.document(),
        full_ms=_full_ms(answer),
        timeline_ms=_timeline(answer, queue_s),
    )


def _routed(answer: Answer, note: UpstreamNote, queue_s: float) -> Explain:
    """Of an answer that came through a gateway: what the upstream says, no more."""
    told, num_tokens = note.told, answer.prompt_tokens
    tokens, why = note.tokens(num_tokens), told.get("why")
    if not tokens:
        why = Reason.UPSTREAM_SILENT
    computed = tokens.get("computed", num_tokens) + tokens.get("recomputed", 0)
    timeline = _timeline(answer, queue_s)
    return Explain(
        strategy=str(told.get("strategy") or told.get("way") or "upstream"),
        ratio=float(told.get("ratio", 0.0)),
        why=None if why is None else str(why),
        encoding=None,
        tokens=tokens,
        work=round(computed / max(1, num_tokens), 4),
        loaded_bytes={},
        left_out=note.left_out,
        chunks=[
            ChunkOut(start=start, tokens=end - start, state="", recomputed=0, tier=None, why=None)
            for start, end in note.chunks
        ],
        states=[],
        decision=None,
        speculation=None if answer.speculation is None else answer.speculation.document(),
        upstream=note.document(),
        timeline_ms=timeline.model_copy(
            update={
                "retrieve": round(note.retrieve_ms, 3),
                "compute": round(answer.ttft_ms - note.retrieve_ms, 3),
            }
        ),
    )


def _decision(answer: Answer) -> DecisionOut | None:
    decision = answer.decision
    if decision is None:
        return None
    return DecisionOut(
        chosen=decision.judged.option,
        predicted_ms=round(decision.judged.predicted_s * 1e3, 3),
        actual_ms=round(decision.judged.actual_s * 1e3, 3),
        ordered_by=decision.plan.ordered_by,
        order_kept=None if decision.plan.order_kept is None else str(decision.plan.order_kept),
        options=[
            OptionOut(
                name=option.name,
                predicted_ms=_ms(option.predicted_s),
                again_ms=round(option.again_s * 1e3, 3),
                rows=option.rows,
                load_bytes=option.load_bytes,
                load_ms=None if option.load is None else _ms(option.load.seconds),
                load_share=None if option.load is None else round(option.load.share, 3),
                ratio=option.ratio,
                reason=str(option.reason),
            )
            for option in decision.plan.options
        ],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1e3, 3)


def _full_ms(answer: Answer) -> float | None:
    return None if answer.full_ms is None else round(answer.full_ms, 3)


def _timeline(answer: Answer, queue_s: float) -> Timeline:
    stages = None if answer.explain is None else answer.explain.stages
    return Timeline(
        queue=round(queue_s * 1e3, 3),
        retrieve=round(stages.retrieve, 3) if stages else 0.0,
        load=round(stages.load, 3) if stages else 0.0,
        select=round(stages.select, 3) if stages else 0.0,
        compute=round(stages.compute if stages else answer.ttft_ms, 3),
        first_token=round(answer.ttft_ms, 3),
        total=round(answer.total_ms, 3),
    )
