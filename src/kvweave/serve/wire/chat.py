"""POST /v1/chat/completions: request and reply, as OpenAI's API has them. Extensions are marked."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from kvweave.app.answer.question import ANY_OBJECT, MOST_TOOLS, question_options
from kvweave.serve.wire.base import (
    MOST_CHUNKS,
    MOST_DOCUMENTS,
    MOST_MESSAGES,
    MOST_PARTS,
    NAME_PATTERN,
    Incoming,
    Outgoing,
    SamplingFields,
    Text,
    Usage,
    at_most,
    neutral,
    schema_only,
)
from kvweave.serve.wire.explain import Explain, SourceOut
from kvweave.serve.wire.tools import ToolCallOut, ToolCalls, ToolChoice, Tools


class TextPart(Incoming):
    type: Literal["text"]
    text: Text


def _parts(content: Any) -> Any:
    """A string is one text part. Not a union type: those report each fault once per member."""
    if not isinstance(content, str | list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ChatMessage(Incoming):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    # an assistant that calls need not say anything
    content: Annotated[
        list[TextPart] | None, BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
    ] = None
    tool_calls: ToolCalls = Field(default_factory=list)  # of an assistant, as a reply had them
    tool_call_id: Text | None = None  # of a tool: which call this is the result of
    name: Text | None = None  # of a tool: the function; the call's id counts
    # What clients send back of an assistant's message, with the value that says nothing:
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    refusal: Annotated[str, Field(max_length=0)] = ""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())

    def as_message(self) -> dict[str, Any]:
        """Return the message as Python callers send it."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name of it
        said: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            said["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        if self.tool_call_id is not None:
            said["tool_call_id"] = self.tool_call_id
        return said


def _few(messages: Any) -> Any:
    """Counted before any of them is read: see `at_most`."""
    at_most(MOST_MESSAGES, "messages")(messages)
    if isinstance(messages, list):
        contents = [each.get("content") for each in messages if isinstance(each, dict)]
        if sum(len(each) for each in contents if isinstance(each, list)) > MOST_PARTS:
            raise PydanticCustomError("too_many", f"must be at most {MOST_PARTS} parts of text")
    return messages


Messages = Annotated[list[ChatMessage], BeforeValidator(_few)]


class DocumentIn(Incoming):
    text: Text
    title: Text = ""


def _wrap_document(document: Any) -> Any:
    """A plain string is a document without a title."""
    if not isinstance(document, str | dict):
        raise PydanticCustomError("document", "must be a string or an object with text and title")
    return {"text": document} if isinstance(document, str) else document


AnyDocument = Annotated[
    DocumentIn, BeforeValidator(_wrap_document, json_schema_input_type=str | DocumentIn)
]


class ReuseIn(Incoming):
    strategy: Text = "auto"  # "full", "auto" or a strategy by name
    ratio: float | None = None  # share of chunk rows recomputed; None: the strategy's own
    bound: float | None = None  # nats per token that "auto" may cost


def _wrap_strategy(reuse: Any) -> Any:
    if not isinstance(reuse, str | dict):
        raise PydanticCustomError("reuse", "must be a string or an object with a strategy")
    return {"strategy": reuse} if isinstance(reuse, str) else reuse


AnyReuse = Annotated[ReuseIn, BeforeValidator(_wrap_strategy, json_schema_input_type=str | ReuseIn)]


class JsonSchemaIn(Incoming):
    """What an answer in JSON has to be."""

    name: Text = ""  # the caller's own, as the next
    description: Text = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True  # it is always held to


class ResponseFormatIn(Incoming):
    """JSON mode, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaIn | None = None  # with its type alone

    @property
    def schema_text(self) -> str | None:
        """The schema that the answer is held to; None: it is text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return ANY_OBJECT if self.type == "json_object" else None


def describe_options(schema: dict[str, Any]) -> None:
    """Put the help texts of a question's options into the schema of a request that has them."""
    for name, each in question_options().items():
        if name in schema["properties"]:
            schema["properties"][name]["description"] = f"{each.key.help}."


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=describe_options)

    messages: Annotated[Messages, schema_only(minItems=1, maxItems=MOST_MESSAGES)]
    # Extensions: what to answer from, and how
    documents: Annotated[
        list[AnyDocument] | None, BeforeValidator(at_most(MOST_DOCUMENTS, "documents"))
    ] = None  # these chunks
    # the nearest chunks of this knowledge base; its chunk KV is reused
    kb: Annotated[Text | None, schema_only(pattern=NAME_PATTERN)] = None
    k: Annotated[int | None, schema_only(minimum=1, maximum=MOST_CHUNKS)] = None  # so many of them
    conversation_id: Text | None = None  # chunks of earlier turns stay in front, each once
    recognise: bool | None = None  # without an id, by what was said before
    order: Literal["as_found", "free", "auto"] | None = None  # may chunks move?
    reuse: AnyReuse | None = None
    speculate: Literal["auto", "on", "off"] | None = None  # compute while a search goes on?
    retrieval: Literal["vector", "words", "hybrid"] | None = None  # how chunks are found
    min_score: float | None = None  # of a chunk that counts
    filter: dict[str, Any] = Field(default_factory=dict)  # what metadata its document has
    rewrite: bool | None = None  # a follow-up is searched for as the model puts it
    nothing_found: Literal["say", "answer"] | None = None  # where no chunk is
    cite: bool = False  # put the numbers of sources behind sentences
    explain: bool = False  # say in the reply what was done

    max_completion_tokens: int | None = None  # the newer name of max_tokens
    response_format: ResponseFormatIn | None = None  # left out: text
    tools: Annotated[Tools, schema_only(maxItems=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = None  # left out: as the model likes
    parallel_tool_calls: bool = True  # false: one call in an answer at most
    logprobs: bool = False
    top_logprobs: Annotated[int | None, schema_only(minimum=0, maximum=20)] = None
    # Only the values that ask for nothing are accepted
    store: Annotated[Any, neutral(False)] = None
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none", "auto")] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    service_tier: Annotated[Any, neutral("auto", "default")] = None
    reasoning_effort: Annotated[Any, neutral("none")] = None
    verbosity: Annotated[Any, neutral("medium")] = None
    # The caller's own bookkeeping
    metadata: dict[str, str] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None


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
    content: str | None  # None: it calls, and says nothing
    tool_calls: list[ToolCallOut] | None = None  # left out where there are none

    @model_serializer(mode="wrap")
    def _without_none(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        if written["tool_calls"] is None:
            del written["tool_calls"]
        return written


class ReplyChoice(Outgoing):
    index: int = 0
    message: ReplyMessage
    logprobs: Logprobs | None = None
    finish_reason: str
    stopped_because: str | None = None  # extension; "repetition": it was ended in a loop


ABOUT_CHUNKS = ("sources", "nothing_found", "query")  # fields of a reply


class ChatReply(Outgoing):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since 1970
    model: str
    choices: list[ReplyChoice]
    usage: Usage
    # extension; the chunks of `kb` or `documents`, best first; left out, with the next two, where
    # neither was: what a client adds to a reply by itself may have the same name
    sources: list[SourceOut] | None = None
    nothing_found: bool = False  # extension; no chunk was, and the reply says so
    query: str | None = None  # extension; what was searched for, where a follow-up was rewritten
    explain: Explain | None = None  # extension; where it was asked for

    @model_serializer(mode="wrap")
    def _without_chunks(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        if written["sources"] is None:
            for name in ABOUT_CHUNKS:
                del written[name]
        return written


FEWEST_WAYS, MOST_WAYS = 2, 3
MAX_TOKENS = 256  # unless it is said
MOST_TOKENS = 2048


class WayIn(Incoming):
    """One way to answer."""

    reuse: AnyReuse
    ratio: float | None = None  # in place of the one in `reuse`


class CompareRequest(Incoming):
    """The body of POST /v1/compare."""

    messages: Annotated[list[ChatMessage], schema_only(minItems=1)]
    model: Text | None = None  # as in a chat request; of all ways
    ways: Annotated[list[WayIn], schema_only(minItems=FEWEST_WAYS, maxItems=MOST_WAYS)]
    kb: Annotated[Text | None, schema_only(pattern=NAME_PATTERN)] = None
    documents: list[AnyDocument] | None = None
    k: Annotated[int | None, schema_only(minimum=1, maximum=MOST_CHUNKS)] = None
    max_tokens: Annotated[int, schema_only(minimum=1, maximum=MOST_TOKENS)] = MAX_TOKENS
