"""POST /v1/chat/completions in words of kvweave, and the way back."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvweave.app import Answer, Document, Sampling, TokenLogprob, Weave
from kvweave.serve.bridge import Start
from kvweave.serve.errors import ApiError
from kvweave.serve.mailbox import Mailbox
from kvweave.serve.wire import (
    ChatReply,
    ChatRequest,
    ContentLogprob,
    Logprobs,
    ReplyChoice,
    ReplyMessage,
    TopLogprob,
    Usage,
)

DEFAULT_MAX_TOKENS = 1024  # for callers who name no limit
MOST_STOPS = 4
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a token that is part of a character decodes to


def read_request(request: ChatRequest, weave: Weave) -> Start:
    """What to start on a worker. Raises ApiError or RequestError if the request is unsound."""
    _check_model(request, weave)
    _check_messages(request)
    sampling = _sampling(request)
    if request.documents is not None:
        return _over_documents(request, weave, sampling)
    messages = [{"role": _role(m.role), "content": m.text} for m in request.messages]
    return lambda: weave.chat(messages, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Reply:
    """Puts one answer into the wire format, whole or in chunks."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer, *, with_logprobs: bool) -> ChatReply:
        choice = ReplyChoice(
            message=ReplyMessage(content=answer.text),
            logprobs=_logprobs(answer.logprobs) if with_logprobs else None,
            finish_reason=answer.finish_reason,
        )
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice],
            usage=_usage(answer),
        )

    async def chunks(
        self, mailbox: Mailbox, *, with_usage: bool, with_logprobs: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """The answer's chunks as they come. Raises what the worker failed with."""
        null: dict[str, Any] = {"usage": None} if with_usage else {}
        yield self._chunk({"role": "assistant", "content": ""}, **null)
        while pieces := await mailbox.take():
            text = "".join(piece.text for piece in pieces)
            seen = [p.logprob for p in pieces if p.logprob is not None]
            if text or seen:
                logprobs = _logprobs(seen).model_dump() if with_logprobs else None
                yield self._chunk({"content": text}, logprobs=logprobs, **null)
        answer = await mailbox.finish()
        yield self._chunk({}, finish_reason=answer.finish_reason, **null)
        if with_usage:
            yield {**self._chunk({}), "choices": [], "usage": _usage(answer).model_dump()}

    def _chunk(
        self,
        delta: dict[str, str],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            **more,
        }


def _check_model(request: ChatRequest, weave: Weave) -> None:
    if request.model not in (None, weave.model_name):
        raise ApiError(
            404,
            f"no model {request.model!r} here; this server has {weave.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _check_messages(request: ChatRequest) -> None:
    if not request.messages:
        raise ApiError(400, "'messages' is empty; send at least one", param="messages")
    if not request.messages[-1].text.strip():
        last = f"messages.{len(request.messages) - 1}.content"
        raise ApiError(400, f"'{last}' is empty; say something", param=last)


def _sampling(request: ChatRequest) -> Sampling:
    _refuse_unless_neutral(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            "'max_tokens' and 'max_completion_tokens' differ; send one of them",
            param="max_tokens",
        )
    if len(request.stop) > MOST_STOPS:
        message = f"'stop' must be at most {MOST_STOPS} strings, got {len(request.stop)}"
        raise ApiError(400, message, param="stop")
    if request.top_logprobs is not None and not request.logprobs:
        message = "'top_logprobs' needs 'logprobs': true"
        raise ApiError(400, message, param="top_logprobs")
    return Sampling(
        max_tokens=next((n for n in limits if n is not None), DEFAULT_MAX_TOKENS),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        stop=tuple(request.stop),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _refuse_unless_neutral(request: ChatRequest) -> None:
    """Fields that clients send with the value that asks for nothing."""
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "store": False}
    for name, value in neutral.items():
        if (got := getattr(request, name)) != value:
            wants = str(value).lower()
            message = f"'{name}' is not supported other than {wants}, got {got!r}"
            raise ApiError(400, message, param=name)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "'stream_options' needs 'stream': true", param="stream_options")


def _over_documents(request: ChatRequest, weave: Weave, sampling: Sampling) -> Start:
    """The documents stand in front of the question, in the layout that reuse needs."""
    roles = [_role(message.role) for message in request.messages]
    if roles not in (["user"], ["system", "user"]):
        raise ApiError(
            400,
            "'documents' goes with one user message, behind at most one system message; "
            f"got {', '.join(roles[:6])}{', …' if len(roles) > 6 else ''}",
            param="documents",
        )
    documents = [Document(d.text, d.title) for d in request.documents or []]
    for i, document in enumerate(documents):
        if not document.text.strip():
            raise ApiError(400, f"'documents.{i}' is empty; leave it out", param=f"documents.{i}")
    question = request.messages[-1].text
    system = request.messages[0].text if len(roles) == 2 else None
    return lambda: weave.stream(question, documents=documents, sampling=sampling, system=system)


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # OpenAI's newer name of the same


def _usage(answer: Answer) -> Usage:
    return Usage(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        total_tokens=answer.prompt_tokens + answer.completion_tokens,
    )


def _logprobs(tokens: Sequence[TokenLogprob]) -> Logprobs:
    return Logprobs(
        content=[
            ContentLogprob(
                token=t.token,
                logprob=t.logprob,
                bytes=_bytes(t.token),
                top_logprobs=[
                    TopLogprob(token=text, logprob=logprob, bytes=_bytes(text))
                    for text, logprob in t.alternatives
                ],
            )
            for t in tokens
        ]
    )


def _bytes(token: str) -> list[int] | None:
    return None if UNFINISHED in token else list(token.encode())
