"""Answers in the wire format of /v1/chat/completions, whole or in chunks."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvweave.app.weave import Answer, TokenLogprob
from kvweave.serve.interleave import interleave
from kvweave.serve.routes.explain import explain
from kvweave.serve.wire.chat import (
    ChatRequest,
    ContentLogprob,
    Logprobs,
    ReplyChoice,
    ReplyMessage,
    TopLogprob,
    Usage,
)
from kvweave.serve.wire.explain import ChatReply
from kvweave.serve.workers.answer_pool import AnswerJob

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a token that is part of a character decodes to

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Puts the answers to one request into the wire format."""

    model: str
    request: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> ChatReply:
        choices = [
            ReplyChoice(
                index=index,
                message=ReplyMessage(content=answer.text),
                logprobs=_logprobs(answer.logprobs) if self.request.logprobs else None,
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ]
        wanted = self.request.explain
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage(answers[:1], answers),
            explain=explain(answers[0], jobs[0].queue_s) if wanted else None,
        )

    async def chunks(self, jobs: Sequence[AnswerJob]) -> AsyncIterator[Event]:
        """The answers' chunks as they come. Raises what a worker failed with."""
        answers: dict[int, Answer] = {}
        streams = [self._choice(index, job, answers) for index, job in enumerate(jobs)]
        async for chunk in interleave(streams):
            yield chunk
        last: Event = {**self._chunk(0, {}), "choices": []}
        if self.request.explain:
            last["explain"] = explain(answers[0], jobs[0].queue_s).model_dump()
        if self.request.with_usage:
            done = [answers[index] for index in range(len(jobs))]
            last["usage"] = usage(done[:1], done).model_dump()
        if self.request.explain or self.request.with_usage:
            yield last

    async def _choice(
        self, index: int, job: AnswerJob, answers: dict[int, Answer]
    ) -> AsyncIterator[Event]:
        mailbox = job.mailbox
        yield self._chunk(index, {"role": "assistant", "content": ""})
        while pieces := await mailbox.take():
            text = "".join(piece.text for piece in pieces)
            seen = [p.logprob for p in pieces if p.logprob is not None]
            if text or seen:
                logprobs = _logprobs(seen).model_dump() if self.request.logprobs else None
                yield self._chunk(index, {"content": text}, logprobs=logprobs)
        answers[index] = await mailbox.finish()
        yield self._chunk(index, {}, finish_reason=answers[index].finish_reason)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        *,
        logprobs: Event | None = None,
        finish_reason: str | None = None,
    ) -> Event:
        choice = {
            "index": index,
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
            **({"usage": None} if self.request.with_usage else {}),
        }


def usage(prompts: Sequence[Answer], answers: Sequence[Answer]) -> Usage:
    """`prompts`: one answer to each prompt. A prompt counts once, however many answers it has."""
    read = sum(answer.prompt_tokens for answer in prompts)
    made = sum(answer.completion_tokens for answer in answers)
    return Usage(prompt_tokens=read, completion_tokens=made, total_tokens=read + made)


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
