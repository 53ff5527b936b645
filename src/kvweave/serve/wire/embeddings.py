"""POST /v1/embeddings: request and reply, as OpenAI's API has them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvweave.serve.wire.base import Incoming, Outgoing, Text, at_most

MOST_TEXTS = 2048  # as OpenAI has it
MOST_CHARS = 1 << 20  # of all of them


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    at_most(MOST_TEXTS, "texts")(value)
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    raise PydanticCustomError("input", "must be a string or a list of strings, not token ids")


Texts = Annotated[list[Text], BeforeValidator(_texts, json_schema_input_type=str | list[str])]


class EmbeddingRequest(Incoming):
    """The body of POST /v1/embeddings."""

    input: Texts
    model: Text | None = None  # left out: the one that is served
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None  # only what the model has
    input_type: Literal["passage", "query"] = "passage"  # extension, for models that tell apart
    user: Text | None = None


class EmbeddingOut(Outgoing):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # str: base64 of little-endian float32


class EmbeddingUsage(Outgoing):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(Outgoing):
    object: Literal["list"] = "list"
    data: list[EmbeddingOut]
    model: str
    usage: EmbeddingUsage
