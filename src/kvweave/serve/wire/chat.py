"""POST /v1/chat/completions: request and reply, as OpenAI's API has them. Extensions are marked."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvweave.serve.wire.base import (
    MOST_CHUNKS,
    NAME_PATTERN,
    Incoming,
    Outgoing,
    SamplingFields,
    Text,
    Usage,
    schema_only,
)
from kvweave.serve.wire.explain import Explain
from kvweave.serve.wire.sources import SourceOut


class TextPart(Incoming):
    type: Literal["text"]
    text: Text


def _parts(content: Any) -> Any:
    """A string is one text part. Not a union type: those report each fault once per member."""
    if not isinstance(content, str | list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ChatMessage(Incoming):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
    ]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class DocumentIn(Incoming):
    text: Text
    title: Text = ""


def _titled(document: Any) -> Any:
    """A plain string is a document without a title."""
    if not isinstance(document, str | dict):
        raise PydanticCustomError("document", "must be a string or an object with text and title")
    return {"text": document} if isinstance(document, str) else document


AnyDocument = Annotated[
    DocumentIn, BeforeValidator(_titled, json_schema_input_type=str | DocumentIn)
]


class ReuseIn(Incoming):
    strategy: Text = "auto"  # "full", "auto" or a strategy by name
    ratio: float | None = None  # share of chunk rows recomputed; None: the strategy's own
    bound: float | None = None  # nats per token that "auto" may cost


def _named(reuse: Any) -> Any:
    if not isinstance(reuse, str | dict):
        raise PydanticCustomError("reuse", "must be a string or an object with a strategy")
    return {"strategy": reuse} if isinstance(reuse, str) else reuse


AnyReuse = Annotated[ReuseIn, BeforeValidator(_named, json_schema_input_type=str | ReuseIn)]


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], schema_only(minItems=1)]
    # Extensions: what to answer from, and how
    documents: list[AnyDocument] | None = None  # these chunks
    # the nearest chunks of this knowledge base; its chunk KV is reused
    kb: Annotated[Text | None, schema_only(pattern=NAME_PATTERN)] = None
    k: Annotated[int | None, schema_only(minimum=1, maximum=MOST_CHUNKS)] = None  # so many of them
    conversation_id: Text | None = None  # chunks of earlier turns stay in front, each once
    order: Literal["as_found", "free", "auto"] | None = None  # may chunks move?
    reuse: AnyReuse | None = None
    speculate: Literal["auto", "on", "off"] | None = None  # compute while a search goes on?
    explain: bool = False  # say in the reply what was done

    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[int | None, schema_only(minimum=0, maximum=20)] = None
    store: Annotated[bool, schema_only(const=False)] = False
    metadata: dict[str, str] | None = None  # the caller's own


class TopLogprob(Outgoing):
    token: str
    logprob: float
    bytes: list[int] | None  # None: part of a character, which JSON text cannot show


class ContentLogprob(Outgoing):
    token: str
    logprob: float
    bytes: list[int] | None  # as in TopLogprob
    top_logprobs: list[TopLogprob]


class Logprobs(Outgoing):
    content: list[ContentLogprob]


class ReplyMessage(Outgoing):
    role: Literal["assistant"] = "assistant"
    content: str


class ReplyChoice(Outgoing):
    index: int = 0
    message: ReplyMessage
    logprobs: Logprobs | None = None
    finish_reason: str
    stopped_because: str | None = None  # extension; "repetition": it was ended in a loop


class ChatReply(Outgoing):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since 1970
    model: str
    choices: list[ReplyChoice]
    usage: Usage
    sources: list[SourceOut]  # extension; the chunks of `kb` or `documents`, best first
    explain: Explain | None = None  # extension; where it was asked for
