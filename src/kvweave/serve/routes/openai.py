"""The routes that OpenAI's clients know."""

import base64
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvweave.reasons import Reason
from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.chat import ChatFormat, over_kb, read_chat
from kvweave.serve.routes.completions import CompletionFormat, read_completion
from kvweave.serve.routes.context import Context
from kvweave.serve.routes.lane import LaneRoute
from kvweave.serve.routes.model_names import ListedModel
from kvweave.serve.routes.reply import reply
from kvweave.serve.wire.chat import ChatReply, ChatRequest
from kvweave.serve.wire.completions import CompletionReply, CompletionRequest
from kvweave.serve.wire.openai import (
    MOST_CHARS,
    EmbeddingReply,
    EmbeddingRequest,
    ModelCard,
    ModelList,
)
from kvweave.serve.wire.schema import ANSWER_ERRORS, TASK_ERRORS, or_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def answering_routes(context: Context) -> tuple[LaneRoute, LaneRoute]:
    """The routes of chats and of plain completions."""
    names = context.models

    async def chat_completions(body: ChatRequest, request: Request) -> object:
        tenant, asked = tenant_of(request.scope), names.read(body.model)
        body = over_kb(body, asked)
        starts = read_chat(body, context, tenant)
        form = ChatFormat(asked, body, partial(context.kept.add, tenant))
        return await reply(request, context, starts, form, stream=body.stream)

    async def completions(body: CompletionRequest, request: Request) -> object:
        asked = names.read_plain(body.model)
        body = body.model_copy(update={"model": asked.model})
        starts = read_completion(body, context, tenant_of(request.scope))
        form = CompletionFormat(asked.name, body)
        return await reply(request, context, starts, form, stream=body.stream)

    return (
        LaneRoute(CHAT, ChatRequest, chat_completions),
        LaneRoute(COMPLETIONS, CompletionRequest, completions),
    )


def openai_routes(context: Context) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    weave, names = context.weave, context.models
    started = int(time.time())

    def card(listed: ListedModel) -> ModelCard:
        is_model = listed.kind in ("model", "alias")
        drawn = {each.model_name for each in weave.engines if each.runtime.is_random}
        tiers = {each.model_name: each.document_tiers for each in weave.engines}
        return ModelCard(
            id=listed.name,
            created=started,
            kind=listed.kind,
            max_model_len=None if listed.model is None else weave.models().get(listed.model),
            kv_transfer=is_model and bool(weave.engines),
            note=Reason.PERMITTED if listed.model in drawn else None,
            kv_tiers=list(tiers.get(listed.model, ())) if is_model and listed.model else [],
        )

    @routes.get("/v1/models", responses=TASK_ERRORS)
    async def models(request: Request) -> ModelList:
        """What a request may call the model; each knowledge base is one too."""
        listed = await context.run(request, names.list_models, tenant_of(request.scope))
        return ModelList(data=[card(each) for each in listed])

    @routes.get("/v1/models/{name:path}", responses=TASK_ERRORS)
    async def model(request: Request, name: str) -> ModelCard:
        return card(await context.run(request, names.find, name, tenant_of(request.scope)))

    # as they are without the lane, and in the schema
    chat, plain = answering_routes(context)
    routes.post(
        chat.path,
        response_model=ChatReply,
        response_model_exclude_unset=False,
        responses={**ANSWER_ERRORS, 200: or_events("The answer, whole or as events")},
    )(chat.answer)
    routes.post(
        plain.path,
        response_model=CompletionReply,
        responses={**ANSWER_ERRORS, 200: or_events("The answers, whole or as events")},
    )(plain.answer)

    @routes.post("/v1/embeddings", response_model=EmbeddingReply, responses=ANSWER_ERRORS)
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        return await _embed(context, body, request)

    return routes


async def _embed(context: Context, body: EmbeddingRequest, request: Request) -> Response:
    """Make an EmbeddingReply by hand: validating each number again takes longer."""
    name = context.libraries.config.embedder
    if body.model not in (None, name):
        message = f"no embedding model {body.model!r} here; this server has {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    if (num_chars := sum(map(len, body.input))) > MOST_CHARS:
        message = f"'input' must be at most {MOST_CHARS:,} characters, got {num_chars:,}; send less"
        raise ApiError(400, message, param="input")
    for place, text in enumerate(body.input):
        if not text:
            raise ApiError(400, f"'input.{place}' is empty; leave it out", param="input")
    as_query = body.input_type == "query"
    made = await context.run(request, context.libraries.embed, body.input, as_query=as_query)
    dim = made.vectors.shape[1]
    if body.dimensions not in (None, dim):
        message = f"'dimensions' is not supported other than {dim}, got {body.dimensions}"
        raise ApiError(400, message, param="dimensions")

    def encode(vector: Any) -> list[float] | str:
        if body.encoding_format == "float":
            return list(vector.tolist())
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()

    data = [
        {"object": "embedding", "index": index, "embedding": encode(vector)}
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens}
    return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})
