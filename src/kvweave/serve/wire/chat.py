"""Chat requests and replies, and what all bodies share, as OpenAI's API has it.

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

NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # of a knowledge base, see libraries.py


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


def _said(**bounds: Any) -> Any:
    """Bounds for the schema alone: they are checked where the words for it are better."""
    return Field(json_schema_extra=bounds)


class StreamOptions(Incoming):
    include_usage: bool = False


class ReuseIn(Incoming):
    strategy: Text = "auto"  # "full", "auto" or a strategy by name
    ratio: float | None = None  # share of chunk rows recomputed; None: the strategy's own
    bound: float | None = None  # nats per token that "auto" may cost


def _named(reuse: Any) -> Any:
    if not isinstance(reuse, str | dict):
        raise PydanticCustomError("reuse", "must be a string or an object with a strategy")
    return {"strategy": reuse} if isinstance(reuse, str) else reuse


AnyReuse = Annotated[ReuseIn, BeforeValidator(_named, json_schema_input_type=str | ReuseIn)]


class SamplingFields(Incoming):
    """How answers are drawn: what chat and plain completions share."""

    model: Text | None = None  # left out: the one that is served
    max_tokens: Annotated[int | None, _said(minimum=1)] = None
    temperature: Annotated[float, _said(minimum=0, maximum=100)] = 1.0
    top_p: Annotated[float, _said(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, _said(minimum=0)] = 0  # extension; 0 keeps all tokens
    repetition_penalty: Annotated[float, _said(minimum=0.01, maximum=100)] = 1.0  # extension
    seed: Annotated[int | None, _said(minimum=0, maximum=2**63 - 1)] = None
    stop: Annotated[Stops, _said(maxItems=4)] = Field(default_factory=list)
    n: Annotated[int, _said(minimum=1, maximum=16)] = 1  # answers to each prompt
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Only the value that asks for nothing is accepted:
    presence_penalty: Annotated[float, _said(const=0)] = 0.0
    frequency_penalty: Annotated[float, _said(const=0)] = 0.0
    # The caller's own bookkeeping; it has no bearing on the answer.
    user: Text | None = None

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], _said(minItems=1)]
    # Extensions: what to answer from, and how
    documents: list[AnyDocument] | None = None  # these chunks
    # the nearest chunks of this knowledge base; its chunk KV is reused
    kb: Annotated[Text | None, _said(pattern=NAME_PATTERN)] = None
    k: Annotated[int | None, _said(minimum=1, maximum=1000)] = None  # so many of them
    conversation_id: Text | None = None  # chunks of earlier turns stay in front, each once
    order: Literal["keep", "free"] | None = None  # may reuse "auto" move chunks?
    reuse: AnyReuse | None = None
    explain: bool = False  # say in the reply what was done

    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[int | None, _said(minimum=0, maximum=20)] = None
    store: Annotated[bool, _said(const=False)] = False
    metadata: dict[str, str] | None = None  # the caller's own


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


class ErrorDetail(Outgoing):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Outgoing):
    """The body of every refusal and failure."""

    error: ErrorDetail


class ReplyMessage(Outgoing):
    role: Literal["assistant"] = "assistant"
    content: str


class ReplyChoice(Outgoing):
    index: int = 0
    message: ReplyMessage
    logprobs: Logprobs | None = None
    finish_reason: str
