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
    if drawn.top_p != 1.0:
        body["top_p"] = drawn.top_p
    if drawn.top_k:
        body["top_k"] = drawn.top_k
    if drawn.min_p:
        body["min_p"] = drawn.min_p
    if drawn.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in drawn.logit_bias}
    if drawn.repetition_penalty != 1.0:
        body["repetition_penalty"] = drawn.repetition_penalty
    for name in ANSWER_PENALTIES:
        if (penalty := getattr(drawn, name)) != 0.0:
            body[name] = penalty
    if drawn.seed is not None:
        body["seed"] = drawn.seed
    if drawn.json_schema is not None:
        made = {"name": "answer", "schema": json.loads(drawn.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": made}
    if drawn.stop:
        body["stop"] = list(drawn.stop)
    if (use := request.tool_use) is not None:
        body["tools"] = list(use.tools)
        named = {"type": "function", "function": {"name": use.named}}
        body["tool_choice"] = use.choice if use.named is None else named
        if not use.parallel:
            body["parallel_tool_calls"] = False
    if drawn.logprobs is not None:
        is_chat = prompt.path == CHAT
        body |= (
            {"logprobs": True, "top_logprobs": drawn.logprobs}
            if is_chat
            else {"logprobs": drawn.logprobs}
        )
    if card.kind is UpstreamKind.KVWEAVE:
        body["top_k"], body["repetition_penalty"] = drawn.top_k, drawn.repetition_penalty
        body["top_p"], body["stop_loops"] = drawn.top_p, drawn.stop_loops
        body |= {
            name: getattr(drawn, name) for name in ANSWER_PENALTIES
        }  # 0 too: its own may not be
    elif card.kind is UpstreamKind.VLLM and request.tenant:
        body["cache_salt"] = hashlib.sha256(request.tenant.encode()).hexdigest()
    if card.fuses and (transfer := _transfer(request, card)) is not None:
        body["kv_transfer_params"] = {"kvweave": transfer}
    return body


def _transfer(request: UpstreamRequest, card: UpstreamCard) -> dict[str, Any] | None:
    """What `kv_transfer_params` say; None: there is nothing to say."""
    prompt, is_ours = request.prompt, card.kind is UpstreamKind.KVWEAVE
    transfer: dict[str, Any] = {}
    # "full" computes everything: an engine without a word on chunks does
    if prompt.spans and request.reuse != "full":
        transfer["chunks"] = [list(span) for span in prompt.spans]
        transfer["preamble"] = prompt.preamble
        if request.reuse is not None:
            transfer["reuse"] = request.reuse
        if request.ratio is not None:
            transfer["ratio"] = request.ratio
        if request.bound is not None and request.reuse is None and is_ours:
            transfer["bound"] = request.bound
        if prompt.asked is not None:
            transfer["asked"] = list(prompt.asked)
    if request.tenant and (transfer or is_ours):
        transfer["tenant"] = request.tenant
    says_more = is_ours and prompt.path != CHAT  # its reply tells what it computed
    return transfer if transfer or says_more else None
