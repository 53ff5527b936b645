"""For those who look closer: /v1/stats, /v1/tree, /v1/quality, /v1/answers. A tenant sees what is
its own."""

import os
from pathlib import Path

from fastapi import APIRouter, Request

from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.hosts import LocalModel
from kvweave.app.libraries.cache_view import evictions, misses, tier_lines, titles, tree_lines
from kvweave.app.libraries.libraries import NoSuchKnowledgeBase, check_name
from kvweave.app.libraries.quality_view import quality_of
from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.routes.context import Context, check_limit
from kvweave.serve.wire.schema import TASK_ERRORS
from kvweave.serve.wire.watching import (
    AnswerList,
    AnswerOut,
    AnswerSummary,
    AuditOut,
    CurveOut,
    EvictionOut,
    GateOut,
    NodeOut,
    NowOut,
    PagesOut,
    QualityOut,
    StatsOut,
    TierOut,
    TotalsOut,
    TreeOut,
    answer_out,
)

MOST_NODES = 1000
NODES = 100  # unless it is said
EVICTIONS = 50  # the last ones
SYSTEM = "system prompt"  # the title of a preamble
STATM = Path("/proc/self/statm")  # of Linux


def watching_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["looking closer"], responses=TASK_ERRORS)

    def find_model(model: str | None) -> LocalModel:
        """The model that is looked at: the usual one, or one of several by its name."""
        return context.by_name[context.models.read_plain(model).model]

    @routes.get("/stats")
    async def stats(request: Request, model: str | None = None) -> StatsOut:
        """Load, caches, and the last half hour. Of several models, the engine, tiers and evictions
        are of one; answers, their tokens, misses and the half hour of all together."""
        tenant = tenant_of(request.scope)
        return await context.run(request, _stats, context, find_model(model), tenant)

    @routes.get("/tree")
    async def tree(
        request: Request, node: str | None = None, limit: int = NODES, model: str | None = None
    ) -> TreeOut:
        """What hangs below a node of the knowledge tree; what begins paths, without one. Each of
        several models has its own."""
        check_limit(limit, MOST_NODES)
        weave, tenant = find_model(model), tenant_of(request.scope)
        return await context.run(request, _tree, context, weave, tenant, node, limit)

    @routes.get("/quality")
    async def quality(
        request: Request, kb: str | None = None, model: str | None = None
    ) -> QualityOut:
        """What reuse costs with a model, what the gate lets through, what the audit found; of the
        first that answers from `kb` where no model is named."""
        tenant, weave = tenant_of(request.scope), find_model(model)
        if kb is None:
            return await context.run(
                request, _quality_out, weave, over_library=False, with_audits=not tenant
            )
        named = None if model is None else weave.model_name
        return await context.run(request, _library_quality, context, tenant, check_name(kb), named)

    @routes.get("/answers")
    async def list_answers(request: Request) -> AnswerList:
        found = await context.run(request, _kept_answers, context, tenant_of(request.scope))
        return AnswerList(answers=[AnswerSummary.model_validate(kept) for kept in found])

    @routes.get("/answers/{answer_id}")
    async def get_answer(request: Request, answer_id: str) -> AnswerOut:
        return await context.run(request, _answer, context, tenant_of(request.scope), answer_id)

    return routes


def _stats(context: Context, weave: LocalModel, tenant: str) -> StatsOut:
    libraries = context.libraries
    totals = context.tenants.totals(tenant)
    tiers = tier_lines(libraries, weave.model_name, tenant)
    gone = evictions(libraries, weave, tenant, EVICTIONS)
    return StatsOut(
        now=_now(context, weave, tenant),
        totals=TotalsOut.model_validate(totals),
        tiers=[TierOut.model_validate(line) for line in tiers],
        misses=misses(libraries, tenant),
        degradations=totals.whys,
        series=context.tenants.series(tenant),
        evictions=[EvictionOut.model_validate(line) for line in gone],
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


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where that cannot be told."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _tree(
    context: Context, weave: LocalModel, tenant: str, node: str | None, limit: int
) -> TreeOut:
    lines = tree_lines(weave.engine.tree, tenant, node, limit)
    chunks = [line.chunk for line in lines if line.chunk is not None]
    with context.libraries.open_of(tenant) as hosts:
        names = titles([host for _, host in hosts], chunks)
    nodes = []
    for line in lines:
        title = SYSTEM if line.chunk is None else names.get(line.chunk, ("", ""))[1]
        nodes.append(NodeOut.model_validate({**line._asdict(), "title": title}))
    return TreeOut(nodes=nodes)


def _library_quality(context: Context, tenant: str, kb: str, model: str | None) -> QualityOut:
    """Over a knowledge base, with the model that is named or the first that answers from it."""
    with context.libraries.use(tenant, kb) as host:
        weave = host.engines[0] if model is None else host.engine_of(model)
        assert weave is not None, "knowledge bases are where the model is"
        return _quality_out(weave, over_library=True, with_audits=True)


def _quality_out(weave: LocalModel, *, over_library: bool, with_audits: bool) -> QualityOut:
    """`with_audits`: what audits found is shown, which answers to others may be in."""
    view = quality_of(weave, over_library=over_library)
    return QualityOut(
        model=weave.model_name,
        bound=view.bound,
        calibrated=view.doubt is None,
        why=view.doubt,
        strategies=[CurveOut.model_validate(curve) for curve in view.curves],
        gate=[GateOut.model_validate(line) for line in view.gate],
        audit=[
            AuditOut(
                strategy=cell.strategy,
                ratio=cell.ratio,
                total=cell.total,
                **cell.figures.document(),
            )
            for cell in (view.audited if with_audits else ())
        ],
        moves=[move._asdict() for move in (view.moves if with_audits else ())],
    )


def _kept_answers(context: Context, tenant: str) -> list[KeptAnswer]:
    for kb in {kept.kb for kept in context.kept.all(tenant)}:
        _hear_removals(context, tenant, kb)
    return context.kept.all(tenant)


def _answer(context: Context, tenant: str, answer_id: str) -> AnswerOut:
    _hear_removals(context, tenant, context.kept.get(tenant, answer_id).kb)
    kept = context.kept.get(tenant, answer_id)  # if it still is
    details = context.by_name[kept.model].details(kept.answer, kept.queue_s)
    return answer_out(kept, details)


def _hear_removals(context: Context, tenant: str, kb: str | None) -> None:
    """Another process may have deleted what an answer was made from."""
    if kb is None:
        return
    try:
        context.libraries.catch_up(tenant, kb)
    except NoSuchKnowledgeBase:
        context.kept.forget_kb(tenant, kb)
