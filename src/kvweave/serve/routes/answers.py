"""Answers that were given: which are kept, and how each came about."""

from functools import partial

from fastapi import APIRouter, Request

from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.weave import Weave
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.wire.answers import AnswerList, AnswerOut, answer_out, summary_out
from kvweave.serve.wire.schema import TASK_ERRORS


def answer_routes(context: Context, weave: Weave) -> APIRouter:
    routes = APIRouter(prefix="/v1/answers", tags=["looking closer"], responses=TASK_ERRORS)
    kept, tasks = context.kept, context.tasks

    @routes.get("")
    async def list_answers(request: Request) -> AnswerList:
        tenant = tenant_of(request.scope)
        found = await tasks.run(partial(kept.all, tenant), client=client_of(request.scope))
        return AnswerList(answers=[summary_out(each) for each in found])

    @routes.get("/{answer_id}")
    async def get_answer(request: Request, answer_id: str) -> AnswerOut:
        tenant = tenant_of(request.scope)
        return await tasks.run(
            lambda: _details(weave, kept.get(tenant, answer_id)), client=client_of(request.scope)
        )

    return routes


def _details(weave: Weave, kept: KeptAnswer) -> AnswerOut:
    details = weave.details(kept.answer, kept.queue_s)
    return answer_out(kept, details, weave.model_name)
