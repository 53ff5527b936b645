"""Conversations that the server keeps: bodies and replies."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvweave.serve.wire.base import Incoming, Outgoing, Text

LONGEST_TITLE = 300
MOST_MESSAGES = 2000


class SavedMessage(Incoming):
    """What was said; the page's own notes on it go with it."""

    role: Literal["system", "user", "assistant"]
    content: Text
    meta: dict[str, Any] | None = None  # the page's own: id, times, sources


class ConversationIn(Incoming):
    """The body of PUT /v1/conversations/{id}."""

    title: Annotated[Text, Field(max_length=LONGEST_TITLE)] = ""
    messages: Annotated[list[SavedMessage], Field(max_length=MOST_MESSAGES)]
    updated: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # seconds since 1970
    meta: dict[str, Any] | None = None  # the page's own: knowledge base, dial


class ConversationOut(Outgoing):
    id: str
    title: str
    messages: list[dict[str, Any]]
    updated: float
    meta: dict[str, Any] | None = None


class ConversationLineOut(Outgoing):
    id: str
    title: str
    updated: float
    messages: int  # how many


class ConversationList(Outgoing):
    object: Literal["list"] = "list"
    data: list[ConversationLineOut]  # newest first


class ConversationRemoved(Outgoing):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
