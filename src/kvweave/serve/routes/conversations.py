"""Conversations of the web page, kept on the server for holders of API keys. Where there are none
the browser keeps its own: nobody could tell whose they are."""

from functools import partial

from fastapi import APIRouter, Request

from kvweave.app.libraries.saved_conversations import SavedConversations
from kvweave.serve.auth import client_of, tenant_of
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.wire.conversations import (
    ConversationIn,
    ConversationLineOut,
    ConversationList,
    ConversationOut,
    ConversationRemoved,
)
from kvweave.serve.wire.schema import TASK_ERRORS


def conversation_routes(context: Context, *, has_keys: bool) -> APIRouter:
    routes = APIRouter(prefix="/v1/conversations", tags=["web page"], responses=TASK_ERRORS)
    tasks, folder = context.tasks, context.page.conversations
    saved = SavedConversations(folder) if has_keys and folder is not None else None

    def kept() -> SavedConversations:
        if saved is None:
            message = "conversations are kept where API keys are set; keep them in the browser"
            raise ApiError(404, message, code="not_found")
        return saved

    @routes.get("")
    async def list_conversations(request: Request) -> ConversationList:
        lines = await tasks.run(
            partial(kept().all, tenant_of(request.scope)), client=client_of(request.scope)
        )
        return ConversationList(
            data=[
                ConversationLineOut(
                    id=line.id,
                    title=line.title,
                    updated=line.updated,
                    messages=line.num_messages,
                )
                for line in lines
            ]
        )

    @routes.get("/{conversation_id}")
    async def get_conversation(request: Request, conversation_id: str) -> ConversationOut:
        found = await tasks.run(
            partial(kept().get, tenant_of(request.scope), conversation_id),
            client=client_of(request.scope),
        )
        return ConversationOut(**{**found, "id": conversation_id})

    @routes.put("/{conversation_id}")
    async def put_conversation(
        body: ConversationIn, request: Request, conversation_id: str
    ) -> ConversationOut:
        said, tenant = body.model_dump(), tenant_of(request.scope)
        await tasks.run(
            partial(kept().put, tenant, conversation_id, said), client=client_of(request.scope)
        )
        return ConversationOut(id=conversation_id, **said)

    @routes.delete("/{conversation_id}")
    async def delete_conversation(request: Request, conversation_id: str) -> ConversationRemoved:
        await tasks.run(
            partial(kept().delete, tenant_of(request.scope), conversation_id),
            client=client_of(request.scope),
        )
        return ConversationRemoved(id=conversation_id)

    return routes
