"""POST /v1/completions: from the request to what is asked of kvweave, and back."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

from kvweave.app.weave import Answer, TokenLogprob
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context
from kvweave.serve.routes.reply import Event, ReplyHead, batches, usage_of
from kvweave.serve.routes.sampling import (
    check_neutral,
    samplings,
    transfer_of,
    transfer_out,
)
from kvweave.serve.wire.base import KVTransferOut
from kvweave.serve.wire.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
)
from kvweave.serve.workers.answer_pool import AnswerJob, Start

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it for plain completions


def read_completion(request: CompletionRequest, context: Context, tenant: str) -> list[Start]:
    """What to start on workers, the answers to a prompt side by side."""
    weave, limits = context.weave, context.limits
    check_neutral(request)
    if len(request.prompt) > limits.choices:
        message = f"'prompt' must be at most {limits.choices} prompts, got {len(request.prompt)}"
        raise ApiError(400, message, param="prompt")
    usual = context.usual.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    max_tokens = usual if request.max_tokens is None else request.max_tokens
    drawn = samplings(request, max_tokens, request.logprobs, context, len(request.prompt))
    transfer = transfer_of(request, context)
    tenant = tenant if transfer is None else transfer.tenant_of(tenant)
    return [
        partial(
            weave.complete,
            prompt,
            sampling=sampling,
            tenant=tenant,
            transfer=transfer,
            model=request.model,
        )
        for prompt in request.prompt
        for sampling in drawn
    ]


class CompletionFormat:
    """Puts the answers to one request into the wire format."""

    def __init__(self, model: str, request: CompletionRequest) -> None:
        self.head = ReplyHead("text_completion", "cmpl", model, with_usage=request.with_usage)
        self._request = request

    def whole(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=answer.text,
                logprobs=self._logprobs(answer.logprobs, 0),
                finish_reason=answer.finish_reason,
                stopped_because=answer.stopped_because,
            )
            for index, answer in enumerate(answers)
        ]
        return CompletionReply(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=choices,
            usage=usage_of(answers[:: self._request.n], answers),
            kv_transfer_params=self._transfer(answers),
        )

    def end_fields(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> Event:
        more: Event = {}
        if self._request.with_usage:
            more["usage"] = usage_of(answers[:: self._request.n], answers).model_dump()
        if (told := self._transfer(answers)) is not None:
            more["kv_transfer_params"] = told.model_dump()
        return more

    async def choice(
        self, index: int, job: AnswerJob, answers: dict[int, Answer]
    ) -> AsyncIterator[Event]:
        offset = 0
        async for text, seen, _ in batches(job):
            logprobs = self._logprobs(seen, offset)
            shown = None if logprobs is None else logprobs.model_dump()
            yield self.head.chunk(index, {"text": text}, logprobs=shown)
            offset += sum(len(token.token) for token in seen)
        answers[index] = await job.mailbox.finish()
        yield self.head.end(index, {"text": ""}, answers[index])

    def _transfer(self, answers: Sequence[Answer]) -> KVTransferOut | None:
        """What was done for the first prompt, where a gateway sent it."""
        sent = self._request.kv_transfer_params
        return None if sent is None else transfer_out(answers[0], len(sent.kvweave.forget))

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        lengths = [len(t.token) for t in tokens]
        return CompletionLogprobs(
            tokens=[t.token for t in tokens],
            token_logprobs=[t.logprob for t in tokens],
            # of parts of characters, which look the same as text, the likeliest counts
            top_logprobs=[dict(reversed(t.alternatives)) for t in tokens],
            text_offset=[offset + sum(lengths[:place]) for place in range(len(tokens))],
        )
