"""POST /v1/completions: request and reply, as OpenAI's API has them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvweave.serve.wire.base import (
    KVTransferOut,
    Outgoing,
    SamplingFields,
    Text,
    Usage,
    at_most,
    neutral,
)

Ids = list[int]
MOST_PROMPTS = 16  # of one request; `Limits.choices` may allow fewer


def _prompts(prompt: Any) -> Any:
    """One prompt or several; each is text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(part) is int for part in prompt):
            return [prompt]
        at_most(MOST_PROMPTS, "prompts")(prompt)
        if all(isinstance(part, str) for part in prompt):
            return prompt
        if all(isinstance(p, list) and p and all(type(i) is int for i in p) for p in prompt):
            return prompt
    raise PydanticCustomError(
        "prompt", "must be a string, a list of token ids, or a list of one or the other"
    )


Prompts = Annotated[
    list[Text] | list[Ids],
    BeforeValidator(_prompts, json_schema_input_type=str | Ids | list[str] | list[Ids]),
]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    logprobs: int | None = None  # alternatives per token
    # Only the value that asks for nothing is accepted
    echo: Annotated[Any, neutral(False)] = None
    best_of: Annotated[Any, neutral(1)] = None
    suffix: Annotated[Any, neutral("")] = None


class CompletionLogprobs(Outgoing):
    """Four lists of one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters of the answer in front of it


class CompletionChoice(Outgoing):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stopped_because: str | None = None  # extension; "repetition": it was ended in a loop


class CompletionReply(Outgoing):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: KVTransferOut | None = None  # extension; where the request had them
