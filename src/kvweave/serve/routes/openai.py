"""The routes that OpenAI's clients know."""

import time
from functools import partial

from fastapi import APIRouter, Request, Response

from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.routes.chat import ChatFormat, read_chat
from kvweave.serve.routes.completions import CompletionFormat, read_completion
from kvweave.serve.routes.embeddings import embeddings
from kvweave.serve.routes.reply import reply
from kvweave.serve.routes.sampling import find_model
from kvweave.serve.wire.chat import ChatReply, ChatRequest
from kvweave.serve.wire.completions import CompletionReply, CompletionRequest
from kvweave.serve.wire.embeddings import EmbeddingReply, EmbeddingRequest
from kvweave.serve.wire.schema import ANSWER_ERRORS, ERRORS, or_events
from kvweave.serve.wire.status import ModelCard, ModelList


def openai_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])
    weave, answers, limits = context.weave, context.answers, context.limits
    started = int(time.time())

    def card(name: str, max_context: int | None) -> ModelCard:
        return ModelCard(
            id=name,
            created=started,
            max_model_len=max_context,
            kv_transfer=weave.takes_transfer,
        )

    @routes.get("/models", responses=ERRORS)
    async def models() -> ModelList:
        return ModelList(data=[card(*each) for each in weave.models().items()])

    @routes.get("/models/{name:path}", responses={**ERRORS})
    async def model(name: str) -> ModelCard:
        return card(name, find_model(name, weave))

    @routes.post(
        "/chat/completions",
        response_model=ChatReply,
        response_model_exclude_unset=False,
        responses={**ANSWER_ERRORS, 200: or_events("The answer, whole or as events")},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> object:
        tenant = tenant_of(request.scope)
        starts = read_chat(body, context, tenant)
        form = ChatFormat(body.model or weave.model_name, body, partial(context.kept.add, tenant))
        return await reply(
            request, answers, starts, form, stream=body.stream, within_s=limits.request_s
        )

    @routes.post(
        "/completions",
        response_model=CompletionReply,
        responses={**ANSWER_ERRORS, 200: or_events("The answers, whole or as events")},
    )
    async def completions(body: CompletionRequest, request: Request) -> object:
        starts = read_completion(body, context, tenant_of(request.scope))
        form = CompletionFormat(body.model or weave.model_name, body)
        return await reply(
            request, answers, starts, form, stream=body.stream, within_s=limits.request_s
        )

    @routes.post("/embeddings", response_model=EmbeddingReply, responses=ANSWER_ERRORS)
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        return await embeddings(body, context, client_of(request.scope))

    return routes
