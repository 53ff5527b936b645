"""POST /v1/completions: from the request to what is asked of kvweave, and back."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvweave.app.weave import Answer, TokenLogprob
from kvweave.serve.context import Context
from kvweave.serve.errors import ApiError
from kvweave.serve.routes.reply import Event, batches, interleave, usage_of
from kvweave.serve.routes.sampling import check_model, check_neutral, samplings
from kvweave.serve.wire.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
)
from kvweave.serve.workers.answer_pool import AnswerJob, Start

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it for plain completions


def read_completion(request: CompletionRequest, context: Context) -> list[Start]:
    """What to start on workers, the answers to a prompt side by side."""
    weave, limits = context.weave, context.limits
    check_model(request, weave)
    check_neutral(request, {"echo": False, "best_of": 1, "suffix": ""})
    if len(request.prompt) > limits.choices:
        message = f"'prompt' must be at most {limits.choices} prompts, got {len(request.prompt)}"
        raise ApiError(400, message, param="prompt")
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    drawn = samplings(request, max_tokens, request.logprobs, limits, len(request.prompt))
    return [
        partial(weave.complete, prompt, sampling=sampling)
        for prompt in request.prompt
        for sampling in drawn
    ]


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Puts the answers to one request into the wire format."""

    model: str
    request: CompletionRequest
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=answer.text,
                logprobs=self._logprobs(answer.logprobs, 0),
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return CompletionReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(answers[:: self.request.n], answers),
        )

    async def chunks(self, jobs: Sequence[AnswerJob]) -> AsyncIterator[Event]:
        """The answers' chunks as they come. Raises what a worker failed with."""
        answers: dict[int, Answer] = {}
        streams = [self._choice(index, job, answers) for index, job in enumerate(jobs)]
        async for chunk in interleave(streams):
            yield chunk
        if self.request.with_usage:
            done = [answers[index] for index in range(len(jobs))]
            counted = usage_of(done[:: self.request.n], done).model_dump()
            yield {**self._chunk(0, ""), "choices": [], "usage": counted}

    async def _choice(
        self, index: int, job: AnswerJob, answers: dict[int, Answer]
    ) -> AsyncIterator[Event]:
        offset = 0
        async for text, seen in batches(job):
            yield self._chunk(index, text, logprobs=self._logprobs(seen, offset))
            offset += sum(len(token.token) for token in seen)
        answers[index] = await job.mailbox.finish()
        yield self._chunk(index, "", finish_reason=answers[index].finish_reason)

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        lengths = [len(t.token) for t in tokens]
        return CompletionLogprobs(
            tokens=[t.token for t in tokens],
            token_logprobs=[t.logprob for t in tokens],
            # of parts of characters, which look the same as text, the likeliest counts
            top_logprobs=[dict(reversed(t.alternatives)) for t in tokens],
            text_offset=[offset + sum(lengths[:place]) for place in range(len(tokens))],
        )

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> Event:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.model_dump(),
            "finish_reason": finish_reason,
        }
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            **({"usage": None} if self.request.with_usage else {}),
        }
