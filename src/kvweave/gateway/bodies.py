"""What is asked of an upstream, in the words it knows."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from kvweave.engine.sampling import ANSWER_PENALTIES, Sampling
from kvweave.gateway.cards import UpstreamCard, UpstreamKind
from kvweave.gateway.prompts import CHAT, UpstreamPrompt
from kvweave.text.tool_calls import ToolUse


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A prompt, and how it is to be answered, whichever replica does."""

    prompt: UpstreamPrompt
    sampling: Sampling
    tenant: str = ""
    reuse: str | None = None  # a strategy; None and "auto": the upstream's own choice
    ratio: float | None = None
    bound: float | None = None
    tool_use: ToolUse | None = None  # what the model may call; in chats alone

    def prefill_only(self) -> "UpstreamRequest":
        """Return this request for one token: its prompt is computed, and no more."""
        return replace(self, sampling=replace(self.sampling, max_tokens=1, logprobs=None))


# fields of `Sampling` that go under their own names, and the value that asks for nothing
DRAWN = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    **dict.fromkeys(ANSWER_PENALTIES, 0.0),
}
# those that go to a kvweave whatever they are: its own usual value may be another
ALWAYS = ("top_p", "top_k", "repetition_penalty", "stop_loops", *ANSWER_PENALTIES)


def body_of(request: UpstreamRequest, card: UpstreamCard) -> dict[str, Any]:
    """The JSON document for an upstream. What is left out asks for nothing: strict servers refuse
    fields they do not know."""
    prompt, drawn = request.prompt, request.sampling
    body: dict[str, Any] = {
        "model": prompt.routed.model or card.model,
        **prompt.content,
        "max_tokens": drawn.max_tokens,
        "temperature": drawn.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= _drawing_fields(drawn)
    if request.tool_use is not None:
        body |= _tool_fields(request.tool_use)
    if drawn.logprobs is not None and prompt.path == CHAT:
        body |= {"logprobs": True, "top_logprobs": drawn.logprobs}
    elif drawn.logprobs is not None:
        body["logprobs"] = drawn.logprobs
    if card.kind is UpstreamKind.KVWEAVE:
        body |= {name: getattr(drawn, name) for name in ALWAYS}
    elif card.kind is UpstreamKind.VLLM and request.tenant:
        body["cache_salt"] = hashlib.sha256(request.tenant.encode()).hexdigest()
    if card.fuses and (transfer := _transfer(request, card)) is not None:
        body["kv_transfer_params"] = {"kvweave": transfer}
    return body


def _drawing_fields(drawn: Sampling) -> dict[str, Any]:
    """Fields that say how the answer is drawn and what ends it, but for those that ask for
    nothing."""
    made = {k: getattr(drawn, k) for k, usual in DRAWN.items() if getattr(drawn, k) != usual}
    if drawn.logit_bias:
        made["logit_bias"] = {str(token_id): bias for token_id, bias in drawn.logit_bias}
    if drawn.json_schema is not None:
        schema = {"name": "answer", "schema": json.loads(drawn.json_schema)}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    if drawn.stop:
        made["stop"] = list(drawn.stop)
    return made


def _tool_fields(use: ToolUse) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": use.named}}
    fields = {"tools": list(use.tools), "tool_choice": use.choice if use.named is None else named}
    return fields if use.parallel else {**fields, "parallel_tool_calls": False}


def _transfer(request: UpstreamRequest, card: UpstreamCard) -> dict[str, Any] | None:
    """What `kv_transfer_params` say; None: there is nothing to say."""
    prompt, is_ours = request.prompt, card.kind is UpstreamKind.KVWEAVE
    transfer: dict[str, Any] = {}
    # "full" computes everything: an engine without a word on chunks does
    if prompt.spans and request.reuse != "full":
        transfer = {
            "chunks": [list(span) for span in prompt.spans],
            "preamble": prompt.preamble,
            "reuse": request.reuse,
            "ratio": request.ratio,
            "bound": request.bound if request.reuse is None else None,
            "asked": None if prompt.asked is None else list(prompt.asked),
        }
        transfer = {name: value for name, value in transfer.items() if value is not None}
    if request.tenant and (transfer or is_ours):
        transfer["tenant"] = request.tenant
    says_more = is_ours and prompt.path != CHAT  # its reply tells what it computed
    return transfer if transfer or says_more else None
