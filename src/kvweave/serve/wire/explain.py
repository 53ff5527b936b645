"""The explain block of a reply: what was done for an answer, in plain JSON."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kvweave.app.answer.notes import AnswerTimes, UpstreamNote
from kvweave.app.weave import Answer, AnswerSource
from kvweave.reasons import Reason
from kvweave.serve.wire.base import Outgoing, Rounded, attribute


class ChunkOut(Outgoing):
    """One chunk of the prompt."""

    start: int  # position of its first token
    tokens: Annotated[int, attribute("num_tokens")]
    state: str  # exact, reused (some of it may be recomputed) or computed; "": not known
    recomputed: int  # tokens of it that were
    tier: str | None  # where its KV came from
    why: str | None  # why it was computed


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1e3, 3)


class OptionOut(Outgoing):
    """One option to answer that was considered."""

    name: str
    # to the first token; null: not priced
    predicted_ms: Annotated[float | None, attribute("predicted_s"), BeforeValidator(_ms)]
    # a second prefill, times the chance of a close call; counts as well
    again_ms: Annotated[float, attribute("again_s"), BeforeValidator(_ms)] = 0.0
    rows: int  # tokens computed
    load_bytes: int
    # loading by itself; null: nothing is loaded
    load_ms: Annotated[float | None, attribute("load", "seconds"), BeforeValidator(_ms)] = None
    # of it that the price holds, learnt from earlier requests
    load_share: Annotated[Rounded | None, attribute("load", "share")] = None
    ratio: float | None
    reason: str  # why it was taken or not


class DecisionOut(Outgoing):
    """Why reuse "auto" did what it did."""

    chosen: str
    predicted_ms: Rounded
    actual_ms: Rounded
    ordered_by: str
    order_kept: str | None = None  # why no chunk may move, where that is left to us
    evidence: str | None = None  # what the ratio was measured on; null: all is exact
    options: list[OptionOut]


class Timeline(Outgoing):
    """Where the time went, in milliseconds. The first five add up to `queue` and `total`."""

    waiting: Rounded  # for others: `queue`, their turns, and their rows in the steps of this one
    searching: Rounded  # for chunks
    loading: Rounded  # stored KV
    computing: Rounded  # the prompt. Through a gateway: all that the upstream took
    answering: Rounded  # from the first token on
    queue: Rounded  # admitted, not begun
    first_token: Rounded  # from the begin of the work
    total: Rounded  # likewise


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
    order: str | None = None  # whether chunks may move, and who says so
    # of a fused answer: whether it is computed exactly later, and what that found of others
    audit: dict[str, bool | int | float | None] | None = None
    full_ms: Rounded | None = None  # a full prefill of this prompt, about; null: never measured
    # tokens of the answer that were guessed from what it was made from, and how many were right
    copies: dict[str, int] | None = None
    upstream: dict[str, Any] | None = None  # of a gateway: which one answered, and what it says
    timeline_ms: Timeline


def explain_of(answer: Answer, queue_s: float) -> Explain:
    """The explain block of an answer that waited `queue_s` for its worker."""
    if answer.upstream is not None:
        return _explain_upstream(answer, answer.upstream, queue_s)
    record = answer.explain
    timeline = _timeline(answer, queue_s)
    copies = None if answer.copies is None else answer.copies._asdict()
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
            full_ms=answer.full_ms,
            copies=copies,
            timeline_ms=timeline,
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
        chunks=[ChunkOut.model_validate(chunk) for chunk in record.chunks],
        states=[(str(state), start, end) for state, start, end in record.runs()],
        decision=_decision(answer),
        speculation=None if answer.speculation is None else answer.speculation.document(),
        not_guessed=answer.not_guessed,
        order=answer.order,
        audit=None if answer.audit is None else answer.audit.document(),
        full_ms=answer.full_ms,
        copies=copies,
        timeline_ms=timeline,
    )


def _explain_upstream(answer: Answer, note: UpstreamNote, queue_s: float) -> Explain:
    """What the upstream of a gateway says of an answer, and no more."""
    report, num_tokens = note.told, answer.prompt_tokens
    tokens, why = note.tokens(num_tokens), report.get("why")
    if not tokens:
        why = Reason.UPSTREAM_SILENT
    computed = tokens.get("computed", num_tokens) + tokens.get("recomputed", 0)
    return Explain(
        strategy=strategy_of(answer),
        ratio=float(report.get("ratio", 0.0)),
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
        not_guessed=answer.not_guessed,
        order=answer.order,
        upstream=note.document(),
        timeline_ms=_timeline(answer, queue_s),
    )


def strategy_of(answer: Answer) -> str:
    """How the prompt of an answer was prefilled, in a word."""
    if answer.nothing_found:
        return "nothing_found"
    if answer.upstream is not None:
        report = answer.upstream.told
        return str(report.get("strategy") or report.get("way") or "upstream")
    return "full" if answer.explain is None else answer.explain.strategy


def _decision(answer: Answer) -> DecisionOut | None:
    decision = answer.decision
    if decision is None:
        return None
    judged, plan = decision.judged, decision.plan
    return DecisionOut(
        chosen=judged.option,
        predicted_ms=judged.predicted_s * 1e3,
        actual_ms=judged.actual_s * 1e3,
        ordered_by=plan.ordered_by,
        order_kept=None if plan.order_kept is None else str(plan.order_kept),
        evidence=plan.evidence or None,
        options=[OptionOut.model_validate(option) for option in plan.options],
    )


def _timeline(answer: Answer, queue_s: float) -> Timeline:
    times = answer.times
    if times is None:  # an upstream computed it, or there was nothing to compute
        prompt_s, end_s = answer.ttft_ms / 1e3, (answer.total_ms - answer.ttft_ms) / 1e3
        search_s = prompt_s if answer.upstream is None else answer.upstream.retrieve_ms / 1e3
        times = AnswerTimes(0.0, search_s, 0.0, prompt_s - search_s, end_s)
    return Timeline(
        waiting=(queue_s + times.waiting_s) * 1e3,
        searching=times.searching_s * 1e3,
        loading=times.loading_s * 1e3,
        computing=times.computing_s * 1e3,
        answering=times.answering_s * 1e3,
        queue=queue_s * 1e3,
        first_token=answer.ttft_ms,
        total=answer.total_ms,
    )


class SourceOut(Outgoing):
    """One of the chunks that an answer was made from."""

    cited_as: int  # from 1, best first
    document: str | None  # its id in the knowledge base; null: the request brought it. Not streamed
    document_id: str | None  # the same
    title: str
    chunk: str  # id
    score: float | None  # of the search; null: the request brought it
    span: tuple[int, int] | None  # its tokens in the prompt, [start, end); null: not known
    tier: str | None  # where its KV came from; null: it was computed, or an upstream knows
    # of a reused one some may be recomputed; null: through a gateway, an upstream knows
    fate: Literal["exact", "reused", "computed"] | None


def sources_out(sources: tuple[AnswerSource, ...]) -> list[SourceOut]:
    return [
        SourceOut.model_validate({**source.as_json(), "document_id": source.document})
        for source in sources
    ]


def streamed_sources(sources: tuple[AnswerSource, ...]) -> list[dict[str, Any]]:
    """Sources for the last event of a stream. Without `document`: the page of Open WebUI, which
    streams, has a list of texts of that name in its own sources, and breaks at a string."""
    return [source.model_dump(exclude={"document"}) for source in sources_out(sources)]
