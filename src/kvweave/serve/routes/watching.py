"""For those who look at the cache, the quality of reuse and the load: /v1/stats, /v1/tree,
/v1/quality. A tenant sees what is its own."""

from functools import partial

from fastapi import APIRouter, Request

from kvweave.app.hosts import LocalModel
from kvweave.app.libraries.cache_view import evictions, misses, tier_lines, titles, tree_lines
from kvweave.app.libraries.libraries import check_name
from kvweave.app.libraries.quality_view import quality_of
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.observe.memory import resident_bytes
from kvweave.serve.routes.parameters import check_limit
from kvweave.serve.wire.schema import TASK_ERRORS
from kvweave.serve.wire.watching import (
    AuditOut,
    CurveOut,
    EvictionOut,
    GateOut,
    NodeOut,
    NowOut,
    PagesOut,
    PointOut,
    QualityOut,
    SeriesOut,
    StatsOut,
    TierOut,
    TotalsOut,
    TreeOut,
)

MOST_NODES = 1000
NODES = 100  # unless it is said
EVICTIONS = 50  # the last ones
SYSTEM = "system prompt"  # the title of a preamble


def watching_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["looking closer"], responses=TASK_ERRORS)
    tasks = context.tasks

    def of(model: str | None) -> LocalModel:
        """The model that is looked at: the usual one, or one of several by its name."""
        return context.by_name[context.models.read_plain(model).model]

    @routes.get("/stats")
    async def stats(request: Request, model: str | None = None) -> StatsOut:
        """Load, caches, and the last half hour. Of several models, the engine, tiers and evictions
        are of one; answers, their tokens, misses and the half hour of all together."""
        return await tasks.run(
            partial(_stats, context, of(model), tenant_of(request.scope)),
            client=client_of(request.scope),
        )

    @routes.get("/tree")
    async def tree(
        request: Request, node: str | None = None, limit: int = NODES, model: str | None = None
    ) -> TreeOut:
        """What hangs below a node of the knowledge tree; what begins paths, without one. Each of
        several models has its own."""
        check_limit(limit, MOST_NODES)
        return await tasks.run(
            partial(_tree, context, of(model), tenant_of(request.scope), node, limit),
            client=client_of(request.scope),
        )

    @routes.get("/quality")
    async def quality(
        request: Request, kb: str | None = None, model: str | None = None
    ) -> QualityOut:
        """What reuse costs with a model, what the gate lets through, what the audit found; of the
        first that answers from `kb` where no model is named."""
        tenant, weave = tenant_of(request.scope), of(model)
        if kb is None:
            view = partial(_quality_out, weave, over_library=False, is_told=not tenant)
        else:
            named = None if model is None else weave.model_name
            view = partial(_library_quality, context, tenant, check_name(kb), named)
        return await tasks.run(view, client=client_of(request.scope))

    return routes


def _stats(context: Context, weave: LocalModel, tenant: str) -> StatsOut:
    libraries, series = context.libraries, context.tenants
    totals = series.totals(tenant)
    return StatsOut(
        now=_now(context, weave, tenant),
        totals=TotalsOut(
            answers=totals.answers,
            completion_tokens=totals.made,
            prompt_tokens=totals.tokens,
            chunks=totals.tiers,
        ),
        tiers=[
            TierOut(
                kb=line.kb,
                tier=line.tier,
                bytes=line.num_bytes,
                capacity=line.capacity_bytes,
                loads=line.loads,
            )
            for line in tier_lines(libraries, weave.model_name, tenant)
        ],
        misses=misses(libraries, tenant),
        degradations=totals.whys,
        series=SeriesOut.model_validate(series.series(tenant)._asdict()),
        evictions=[
            EvictionOut(
                at=round(line.at_s, 3),
                kb=line.kb,
                chunk=line.chunk,
                title=line.title,
                tier=line.tier,
                bytes=line.num_bytes,
                priority=line.priority,
            )
            for line in evictions(libraries, weave, tenant, EVICTIONS)
        ],
    )


def _now(context: Context, weave: LocalModel, tenant: str) -> NowOut:
    """A tenant is told of its own answers alone; who has none, of the whole server."""
    own = context.answers.under_way(tenant)
    rate = context.tenants.rate(tenant)
    if tenant:
        return NowOut(
            running=own,
            waiting=None,
            tokens_per_s=rate,
            batch=None,
            pages=None,
            device_bytes=None,
            host_bytes=None,
            rss_bytes=None,
        )
    counts, engine = context.answers.counts(), weave.engine.stats()
    used, free = int(engine["pages_used"]), int(engine["pages_free"])
    return NowOut(
        running=counts.running,
        waiting=counts.waiting,
        tokens_per_s=rate,
        batch=int(engine["running"]),
        pages=PagesOut(used=used, total=used + free),
        device_bytes=int(engine["tree_device_bytes"]),
        host_bytes=int(engine["tree_host_bytes"]),
        rss_bytes=resident_bytes(),
    )


def _tree(
    context: Context, weave: LocalModel, tenant: str, node: str | None, limit: int
) -> TreeOut:
    lines = tree_lines(weave.engine.tree, tenant, node, limit)
    chunks = [line.chunk for line in lines if line.chunk is not None]
    with context.libraries.open_of(tenant) as hosts:
        names = titles([host for _, host in hosts], chunks)
    return TreeOut(
        nodes=[
            NodeOut(
                id=line.id,
                parent=line.parent,
                chunk=line.chunk,
                title=SYSTEM if line.chunk is None else names.get(line.chunk, ("", ""))[1],
                tokens=line.num_tokens,
                end=line.end,
                tier=line.tier,
                bytes=line.num_bytes,
                priority=line.priority,
                hits=line.hits,
                children=line.num_children,
            )
            for line in lines
        ]
    )


def _library_quality(context: Context, tenant: str, kb: str, model: str | None) -> QualityOut:
    """Over a knowledge base, with the model that is named or the first that answers from it."""
    with context.libraries.use(tenant, kb) as host:
        weave = host.engines[0] if model is None else host.engine_of(model)
        assert weave is not None, "knowledge bases are where the model is"
        return _quality_out(weave, over_library=True, is_told=True)


def _quality_out(weave: LocalModel, *, over_library: bool, is_told: bool) -> QualityOut:
    """`is_told`: whether the asker may hear what audits found, which others' answers may be in."""
    view = quality_of(weave, over_library=over_library)
    return QualityOut(
        model=weave.model_name,
        bound=view.bound,
        calibrated=view.doubt is None,
        why=view.doubt,
        strategies=[
            CurveOut(
                strategy=curve.strategy,
                kind=curve.kind,
                questions=curve.num_questions,
                points=[
                    PointOut(
                        ratio=point.ratio,
                        kl_nats=point.kl,
                        upper=point.kl_high,
                        flips=point.flips,
                        work=point.work,
                    )
                    for point in curve.points
                ],
            )
            for curve in view.curves
        ],
        gate=[
            GateOut(
                strategy=line.strategy,
                ratio=line.ratio,
                allowed=line.ratio is not None,
                why=line.why,
            )
            for line in view.gate
        ],
        audit=[
            AuditOut(
                strategy=cell.strategy,
                ratio=cell.ratio,
                total=cell.total,
                **cell.figures.document(),
            )
            for cell in (view.audited if is_told else ())
        ],
        moves=[move._asdict() for move in (view.moves if is_told else ())],
    )
