"""GET /v1/stats, /v1/tree and /v1/quality: replies."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kvweave.app.answer.answer_details import AnswerDetails
from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.weave import Answer
from kvweave.serve.wire.base import Outgoing, Rounded, attribute
from kvweave.serve.wire.explain import Explain, SourceOut, explain_of, sources_out


class PagesOut(Outgoing):
    used: int
    total: int


class NowOut(Outgoing):
    """This moment. What says something of others is null for tenants."""

    running: int  # answers being computed or waiting: the tenant's own, or all
    waiting: int | None  # of all, those that have not begun
    tokens_per_s: float  # of the tenant's answers
    batch: int | None  # requests that the engine computes together
    pages: PagesOut | None  # of the engine's pool
    device_bytes: int | None  # exact KV in the pool
    host_bytes: int | None  # exact KV in host memory
    rss_bytes: int | None  # memory of the process; null also where it cannot be told


class TotalsOut(Outgoing):  # made of a TenantTotals
    """The tenant's own answers since the server began."""

    answers: int
    completion_tokens: Annotated[int, attribute("made")]
    # exact, reused, recomputed, computed
    prompt_tokens: Annotated[dict[str, int], attribute("tokens")]
    # of prompts, by the tier that had their KV; none: computed
    chunks: Annotated[dict[str, int], attribute("tiers")]


class TierOut(Outgoing):  # made of a TierLine
    kb: str
    tier: str
    # null: a shared tier keeps its own books
    bytes: Annotated[int | None, attribute("num_bytes")]
    capacity: Annotated[int | None, attribute("capacity_bytes")]
    loads: int


class SeriesOut(Outgoing):
    """Half an hour, one number per step, the newest last."""

    step_s: int
    t0: int  # seconds since 1970, of the first step
    answers: list[int]
    exact: list[int]
    reused: list[int]
    recomputed: list[int]
    computed: list[int]
    hit_rate: list[float | None]
    tokens_per_s: list[float]


class EvictionOut(Outgoing):  # made of a EvictionLine
    at: Annotated[Rounded, attribute("at_s")]  # seconds since 1970
    kb: str | None  # null: exact KV of the knowledge tree
    chunk: str
    title: str
    tier: str
    bytes: Annotated[int, attribute("num_bytes")]
    priority: float | None


class StatsOut(Outgoing):
    object: Literal["stats"] = "stats"
    now: NowOut
    totals: TotalsOut
    tiers: list[TierOut]  # of the tenant's knowledge bases that are open
    misses: dict[str, int]  # chunk KV that was wanted and not there, by reason
    degradations: dict[str, int]  # chunks computed although reuse was asked for, by reason
    series: SeriesOut
    evictions: list[EvictionOut]  # newest first


class NodeOut(Outgoing):  # made of a TreeLine
    """A chunk behind its path, in the knowledge tree."""

    id: str
    parent: str | None
    chunk: str | None  # null: a system prompt
    title: str  # "": not known
    tokens: Annotated[int, attribute("num_tokens")]
    end: int  # tokens up to and with it
    tier: str
    bytes: Annotated[int, attribute("num_bytes")]
    priority: float | None  # the lowest leaves first; null: it stays
    hits: float
    children: Annotated[int, attribute("num_children")]


class TreeOut(Outgoing):
    object: Literal["tree"] = "tree"
    nodes: list[NodeOut]  # used most first


class PointOut(Outgoing):
    ratio: float
    kl_nats: Annotated[float, attribute("kl")]
    upper: Annotated[float, attribute("kl_high")]  # of its 95 % interval
    flips: float
    work: float  # of full prefill's


class CurveOut(Outgoing):
    strategy: str
    kind: str  # of questions
    questions: Annotated[int, attribute("num_questions")]
    points: list[PointOut]


def _is_allowed(ratio: float | None) -> bool:
    return ratio is not None


class GateOut(Outgoing):
    strategy: str
    ratio: float | None
    allowed: Annotated[bool, attribute("ratio"), BeforeValidator(_is_allowed)]
    why: str


class AuditOut(Outgoing):
    strategy: str
    ratio: float
    total: int
    answers: int  # remembered, of which the figures are
    kl: float | None
    kl_low: float | None
    kl_high: float | None
    flips: int


class QualityOut(Outgoing):
    object: Literal["quality"] = "quality"
    model: str
    bound: float
    calibrated: bool
    why: str | None  # not calibrated, and what to do about it
    strategies: list[CurveOut]
    gate: list[GateOut]  # with `kb` alone: it depends on the encoding of chunk KV
    audit: list[AuditOut]
    moves: list[dict[str, Any]]  # where the audit has moved the gate


def _strategy(answer: Answer) -> str:
    return "full" if answer.explain is None else answer.explain.strategy


def _ratio(answer: Answer) -> float:
    return 0.0 if answer.explain is None else answer.explain.ratio


class AnswerSummary(Outgoing):  # made of a KeptAnswer
    """A kept answer as a list shows it."""

    id: str  # of its chat completion
    created: Rounded  # seconds since 1970
    kb: str | None
    question: str
    strategy: Annotated[str, attribute("answer"), BeforeValidator(_strategy)]
    ratio: Annotated[float, attribute("answer"), BeforeValidator(_ratio)]
    ttft_ms: Annotated[Rounded, attribute("answer", "ttft_ms")]
    # what a full prefill would have taken, about
    full_ms: Annotated[Rounded | None, attribute("answer", "full_ms")]
    prompt_tokens: Annotated[int, attribute("answer", "prompt_tokens")]
    completion_tokens: Annotated[int, attribute("answer", "completion_tokens")]


class AnswerList(Outgoing):
    object: Literal["list"] = "list"
    answers: list[AnswerSummary]  # newest first


class PartOut(Outgoing):
    """A run of the prompt's tokens, [start, end)."""

    name: Literal["preamble", "history", "chunk", "question"]
    start: int
    end: int
    chunk: str | None  # id
    summary: str  # of a chunk: its first sentences


class TokensOut(Outgoing):
    """The prompt, token by token."""

    texts: list[str]
    states: str  # a letter each: e exact, r reused, n recomputed, c computed
    scores: list[float | None]  # null: it was not up for recomputation
    parts: list[PartOut]


class LayerOut(Outgoing):
    """One layer of a fused pass; times in milliseconds since the request arrived, null where they
    are not measured (on a GPU, and beside other requests)."""

    layer: int
    loaded_ms: float | None
    started_ms: float | None
    ended_ms: float | None
    rows: int
    left_rows: int  # that went no further


class SelectionOut(Outgoing):
    selector: str
    ratio: float
    layers: list[int]  # whose stored keys or values were looked at


class EntryOut(Outgoing):
    """Something that took time, in milliseconds since the request arrived."""

    name: str
    lane: str
    start_ms: float
    end_ms: float
    detail: str


class AnswerOut(Outgoing):
    """All that is known of one answer."""

    id: str
    object: Literal["answer"] = "answer"
    created: Rounded
    model: str
    kb: str | None
    question: str
    answer: str
    ttft_ms: Rounded
    total_ms: Rounded
    prompt_tokens: int
    completion_tokens: int
    sources: list[SourceOut]
    explain: Explain
    tokens: TokensOut
    layers: list[LayerOut]
    selection: SelectionOut | None
    timeline: list[EntryOut]


def answer_out(kept: KeptAnswer, details: AnswerDetails) -> AnswerOut:
    answer, selection = kept.answer, details.selection
    return AnswerOut(
        id=kept.id,
        created=kept.created,
        model=kept.model,
        kb=kept.kb,
        question=kept.question,
        answer=answer.text,
        ttft_ms=answer.ttft_ms,
        total_ms=answer.total_ms,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        sources=sources_out(answer.sources),
        explain=explain_of(answer, kept.queue_s),
        tokens=TokensOut.model_validate(details),
        layers=[LayerOut.model_validate(layer) for layer in details.layers],
        selection=None if selection is None else SelectionOut.model_validate(selection),
        timeline=[EntryOut.model_validate(entry) for entry in details.timeline],
    )
