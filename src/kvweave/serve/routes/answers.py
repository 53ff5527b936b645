"""Answers that were given: which are kept, and how each came about."""

from functools import partial

from fastapi import APIRouter, Request

from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.libraries.libraries import NoSuchKnowledgeBase
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.wire.answers import AnswerList, AnswerOut, answer_out, summary_out
from kvweave.serve.wire.schema import TASK_ERRORS


def answer_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1/answers", tags=["looking closer"], responses=TASK_ERRORS)
    tasks = context.tasks

    @routes.get("")
    async def list_answers(request: Request) -> AnswerList:
        tenant = tenant_of(request.scope)
        found = await tasks.run(partial(_all, context, tenant), client=client_of(request.scope))
        return AnswerList(answers=[summary_out(each) for each in found])

    @routes.get("/{answer_id}")
    async def get_answer(request: Request, answer_id: str) -> AnswerOut:
        tenant = tenant_of(request.scope)
        look = partial(_details, context, tenant, answer_id)
        return await tasks.run(look, client=client_of(request.scope))

    return routes


def _all(context: Context, tenant: str) -> list[KeptAnswer]:
    for kb in {each.kb for each in context.kept.all(tenant)}:
        _hear_removals(context, tenant, kb)
    return context.kept.all(tenant)


def _details(context: Context, tenant: str, answer_id: str) -> AnswerOut:
    _hear_removals(context, tenant, context.kept.get(tenant, answer_id).kb)
    kept = context.kept.get(tenant, answer_id)  # if it still is
    details = context.by_name[kept.model].details(kept.answer, kept.queue_s)
    return answer_out(kept, details, kept.model)


def _hear_removals(context: Context, tenant: str, kb: str | None) -> None:
    """Another process may have deleted what an answer was made from."""
    if kb is None:
        return
    try:
        context.libraries.catch_up(tenant, kb)
    except NoSuchKnowledgeBase:
        context.kept.forget_kb(tenant, kb)
