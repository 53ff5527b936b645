"""GET /v1/stats, /v1/tree and /v1/quality: replies."""

from typing import Any, Literal

from kvweave.serve.wire.base import Outgoing


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


class TotalsOut(Outgoing):
    """The tenant's own answers since the server began."""

    answers: int
    completion_tokens: int
    prompt_tokens: dict[str, int]  # exact, reused, recomputed, computed
    chunks: dict[str, int]  # of prompts, by the tier that had their KV; none: computed


class TierOut(Outgoing):
    kb: str
    tier: str
    bytes: int | None  # null: a shared tier keeps its own books
    capacity: int | None
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


class EvictionOut(Outgoing):
    at: float  # seconds since 1970
    kb: str | None  # null: exact KV of the knowledge tree
    chunk: str
    title: str
    tier: str
    bytes: int
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


class NodeOut(Outgoing):
    """A chunk behind its path, in the knowledge tree."""

    id: str
    parent: str | None
    chunk: str | None  # null: a system prompt
    title: str  # "": not known
    tokens: int
    end: int  # tokens up to and with it
    tier: str
    bytes: int
    priority: float | None  # the lowest leaves first; null: it stays
    hits: float
    children: int


class TreeOut(Outgoing):
    object: Literal["tree"] = "tree"
    nodes: list[NodeOut]  # used most first


class PointOut(Outgoing):
    ratio: float
    kl_nats: float
    upper: float  # of its 95 % interval
    flips: float
    work: float  # of full prefill's


class CurveOut(Outgoing):
    strategy: str
    kind: str  # of questions
    questions: int
    points: list[PointOut]


class GateOut(Outgoing):
    strategy: str
    ratio: float | None
    allowed: bool
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
