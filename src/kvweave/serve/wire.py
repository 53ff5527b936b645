"""What travels over HTTP, as OpenAI's chat API has it.

Requests are read strictly: a number in quotes is a wrong type, and a field that is not here is
refused by name. A null means the same as leaving the field out. Extensions of ours are marked.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError


def _encodable(text: str) -> str:
    """JSON can name halves of a surrogate pair; no tokenizer can read them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "must be valid Unicode text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Incoming(BaseModel):
    """Part of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: part for name, part in value.items() if part is not None}
        return value


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


def _listed(stop: Any) -> Any:
    if not isinstance(stop, str | list):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return [stop] if isinstance(stop, str) else stop


Stops = Annotated[list[Text], BeforeValidator(_listed, json_schema_input_type=str | list[str])]


class StreamOptions(Incoming):
    include_usage: bool = False


class ChatRequest(Incoming):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    model: Text | None = None  # left out: the one that is served
    documents: list[AnyDocument] | None = None  # extension: answer the question from these
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name of the same
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # extension; 0 keeps all tokens
    repetition_penalty: float = 1.0  # extension
    seed: int | None = None
    stop: Stops = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Only the value that asks for nothing is accepted:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    store: bool = False
    # The caller's own bookkeeping; it has no bearing on the answer.
    user: Text | None = None
    metadata: dict[str, str] | None = None


class Outgoing(BaseModel):
    """Part of a reply."""

    model_config = ConfigDict(frozen=True)


class TopLogprob(Outgoing):
    token: str
    logprob: float
    bytes: list[int] | None  # None: part of a character, which JSON text cannot show


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(Outgoing):
    content: list[ContentLogprob]


class Usage(Outgoing):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyMessage(Outgoing):
    role: Literal["assistant"] = "assistant"
    content: str


class ReplyChoice(Outgoing):
    index: int = 0
    message: ReplyMessage
    logprobs: Logprobs | None = None
    finish_reason: str


class ChatReply(Outgoing):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since 1970
    model: str
    choices: list[ReplyChoice]
    usage: Usage


class ModelCard(Outgoing):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvweave"
    max_model_len: int  # tokens of prompt and answer together; the name other servers use


class ModelList(Outgoing):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Outgoing):
    status: Literal["ok"] = "ok"
    model: str
    running: int  # answers being computed
    waiting: int  # admitted, not begun
    finished: int  # since the start, as are the next two
    failed: int
    abandoned: int  # the client left
