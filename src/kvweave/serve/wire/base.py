"""What bodies share: how they are read, the fields of sampling, usage, refusals.

Requests are read strictly: a number in quotes is a wrong type, and a field that is not here is
refused by name. A null means the same as leaving the field out.
"""

from collections.abc import Callable, Sized
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvweave.app.libraries.library_folders import NAME

NAME_PATTERN = f"^{NAME.pattern}$"  # of a knowledge base
MOST_FORGOTTEN = 4096  # chunks in one request
MOST_CHUNKS = 1000  # that `k` may ask for
MOST_STOPS = 4
MOST_BIASED = 1024  # tokens of one request
MOST_MESSAGES = 2048  # of one chat
MOST_PARTS = 4096  # of all its messages together
MOST_DOCUMENTS = 1000  # that one question brings
MOST_FIELDS = 64  # of one object: more are not read, nor named one by one in a refusal


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
            if len(value) > MOST_FIELDS:
                raise PydanticCustomError("too_many", f"must have at most {MOST_FIELDS} fields")
            return {name: part for name, part in value.items() if part is not None}
        return value


def at_most(most: int, what: str, *kinds: type[Sized]) -> Callable[[Any], Any]:
    """Refuses a longer list or object, or what else is of `kinds`, before its parts are looked at:
    on the event loop, where a hundred thousand of them would hold up every other request."""

    def check(value: Any) -> Any:
        if isinstance(value, kinds or (list, dict)) and len(value) > most:
            raise PydanticCustomError("too_many", f"must be at most {most} {what}")
        return value

    return check


def schema_only(**bounds: Any) -> Any:
    """Bounds for the schema alone: they are checked where the words for it are better."""
    return Field(json_schema_extra=bounds)


def neutral(*values: Any) -> Any:
    """A field that clients send where they ask for nothing; no other value is accepted."""
    return schema_only(enum=list(values))


def _as_list(stop: Any) -> Any:
    if not isinstance(stop, str | list):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stop) > MOST_STOPS and isinstance(stop, list):
        raise PydanticCustomError("too_many", f"must be at most {MOST_STOPS} strings")
    return [stop] if isinstance(stop, str) else stop


Stops = Annotated[list[Text], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


TokenSpan = Annotated[list[int], Field(min_length=2, max_length=2)]  # [start, end)


class SpansIn(Incoming):
    """What a kvweave gateway says of a prompt; docs/gateway.md."""

    chunks: list[TokenSpan] = Field(default_factory=list)  # half-open, in order
    preamble: int | None = None  # tokens in front of everything else; left out: of the chunks
    reuse: Text | None = None  # as in chats, and the next two
    ratio: float | None = None
    bound: float | None = None
    asked: TokenSpan | None = None  # what the user wrote; left out: all behind the chunks
    tenant: Text = ""  # of the gateway: tenants share no KV
    # ids of chunks that are no more: KV that was kept of them is deleted
    forget: Annotated[list[Text], BeforeValidator(at_most(MOST_FORGOTTEN, "ids"))] = Field(
        default_factory=list
    )


class KVTransferIn(Incoming):
    """Other connectors' parts are refused by name, as every field that has no effect here."""

    kvweave: SpansIn


class StreamOptions(Incoming):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers; none is made here


class SamplingFields(Incoming):
    """How answers are drawn, and how many: what chat and plain completions share. What is left out
    is as the server is configured, then as the model's generation_config.json has it."""

    model: Text | None = None  # left out: the one that is served
    max_tokens: Annotated[int | None, schema_only(minimum=1)] = None
    temperature: Annotated[float, schema_only(minimum=0, maximum=100)] = 1.0
    top_p: Annotated[float, schema_only(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, schema_only(minimum=0)] = 0  # extension; 0 keeps all tokens
    # extension; tokens below this part of the likeliest one's probability are not drawn
    min_p: Annotated[float, schema_only(minimum=0, maximum=1)] = 0.0
    repetition_penalty: Annotated[float, schema_only(minimum=0.01, maximum=100)] = 1.0  # extension
    stop_loops: bool = True  # extension; end an answer that only repeats itself
    seed: Annotated[int | None, schema_only(minimum=0, maximum=2**63 - 1)] = None
    stop: Annotated[Stops, schema_only(maxItems=MOST_STOPS)] = Field(default_factory=list)
    n: Annotated[int, schema_only(minimum=1, maximum=16)] = 1  # answers to each prompt
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, schema_only(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[float, schema_only(minimum=-2, maximum=2)] = 0.0
    # token ids, and what is added to their logits
    logit_bias: Annotated[
        dict[str, float],
        BeforeValidator(at_most(MOST_BIASED, "token ids")),
        schema_only(additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
    ] = Field(default_factory=dict)
    kv_transfer_params: KVTransferIn | None = None  # extension; of a gateway
    # The caller's own bookkeeping; it has no bearing on the answer.
    user: Text | None = None

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Outgoing(BaseModel):
    """Part of a reply. `model_validate` makes it of an object of `app`: each field is the attribute
    of its name, or the one that `attribute` names."""

    model_config = ConfigDict(
        frozen=True, from_attributes=True, validate_by_name=True, validate_by_alias=True
    )


def attribute(*path: str) -> Any:
    """Names the attribute that a field of a reply is made of, by the way to it."""
    return Field(validation_alias=AliasPath(*path))


Rounded = Annotated[float, AfterValidator(partial(round, ndigits=3))]


class TransferOut(Outgoing):
    """Tokens of a prompt by fate, for the gateway that sent it."""

    way: str  # fused, or exact: nothing is approximated
    strategy: str
    ratio: float
    exact: int
    reused: int
    recomputed: int
    computed: int
    why: str | None = None
    forgotten: int = 0  # chunks whose KV was deleted as it was asked
    # first tokens of chunks whose KV came from a tier
    loaded: list[int] = Field(default_factory=list)


class KVTransferOut(Outgoing):
    kvweave: TransferOut


class PromptTokensDetails(Outgoing):
    cached_tokens: int  # whose KV was there: exact, or reused


class CompletionTokensDetails(Outgoing):
    """Tokens that were guessed from what the request has read, and computed several at a time."""

    accepted_prediction_tokens: int  # that were right
    rejected_prediction_tokens: int


class Usage(Outgoing):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None  # null: an upstream does not say
    completion_tokens_details: CompletionTokensDetails | None = None  # likewise


class ErrorDetail(Outgoing):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Outgoing):
    """The body of every refusal and failure."""

    error: ErrorDetail
