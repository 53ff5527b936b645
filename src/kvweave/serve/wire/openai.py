"""The smaller routes: GET /v1/models, POST /v1/embeddings, /healthz and /readyz."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvweave.serve.wire.base import Incoming, Outgoing, Text, at_most


class ModelCard(Outgoing):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvweave"
    # extension; alias: another name of the model, kb: it answers from a knowledge base
    kind: Literal["model", "alias", "kb", "embedder"] = "model"
    # tokens of prompt and answer together, by the name other servers use; null: not known
    max_model_len: int | None
    kv_transfer: bool = False  # extension; takes `kv_transfer_params`
    note: str | None = None  # extension; what who asks it must know: that its weights are random
    # extension; tiers that keep chunk KV of such prompts; empty: none is kept
    kv_tiers: list[str] = Field(default_factory=list)


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
    pinned: int  # chunk KV that some lease holds


class Ready(Outgoing):
    status: Literal["ready"] = "ready"
    model: str


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
