"""From starts to a reply: admit, wait or stream, and stop the work when its client is gone."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from kvweave.app.weave import Answer, TokenLogprob, ToolCall
from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.access.disconnects import ClientGone, while_connected
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context
from kvweave.serve.wire.base import CompletionTokensDetails, PromptTokensDetails, Usage
from kvweave.serve.wire.sse import HEARTBEAT_S, EventStream, as_events
from kvweave.serve.workers.answer_pool import AnswerJob, Start

T = TypeVar("T")
Event = dict[str, Any]  # one chunk of a streamed reply

CLIENT_CLOSED = 499  # its client is gone; it shows in logs


class ReplyFormat(Protocol):
    """Puts the answers to one request into a wire format. On the event loop."""

    @property
    def head(self) -> "ReplyHead": ...
    def whole(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> BaseModel: ...

    def choice(
        self, index: int, job: AnswerJob, answers: dict[int, Answer]
    ) -> AsyncIterator[Event]:
        """The chunks of one choice, whose answer is in `answers` at their end."""
        ...

    def end_fields(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> Event:
        """What stands behind all choices of a stream; nothing: no chunk is sent for it."""
        ...


class ReplyHead:
    """What the chunks of one streamed reply have in common, and its whole form too."""

    def __init__(self, kind: str, prefix: str, model: str, *, with_usage: bool) -> None:
        """`kind` is the `object` of its chunks; `prefix` begins its id. A stream that ends with its
        usage has a null for it until then."""
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self._kind = kind
        self._usage: Event = {"usage": None} if with_usage else {}

    def resume(self, stream: tuple[str, int] | None) -> None:
        """Go on with a stream that another process began, if one did: by its id and its time."""
        if stream is not None:
            self.id, self.created = stream

    def chunk(
        self,
        index: int,
        content: Event,
        *,
        logprobs: Event | None = None,
        finish_reason: str | None = None,
    ) -> Event:
        """A chunk of the choice `index`."""
        rest = {"logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk([{"index": index, **content, **rest}])

    def end(self, index: int, content: Event, answer: Answer) -> Event:
        """The last chunk of the choice `index`: how its answer ended."""
        chunk = self.chunk(index, content, finish_reason=answer.finish_reason)
        if answer.stopped_because is not None:
            chunk["choices"][0]["stopped_because"] = answer.stopped_because
        return chunk

    def last(self, more: Event) -> Event:
        """The chunk that ends a stream: no choice, and what is known by then."""
        return {**self._chunk([]), **more}

    def _chunk(self, choices: list[Event]) -> Event:
        head = {"id": self.id, "object": self._kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **self._usage}


async def reply(
    request: Request,
    context: Context,
    starts: Sequence[Start],
    form: ReplyFormat,
    *,
    stream: bool,
) -> Response | BaseModel:
    """The reply to a request. What ends it early ends the work too: a client that leaves, a
    failure, too long a time, a server that stops. A failure is judged before a client hears of it:
    the request may be given to another process instead."""
    on_failure, within_s = context.trial.judge, context.limits.request_s
    jobs = context.answers.submit(starts, tenant_of(request.scope), piecewise=stream)
    state = request.scope.setdefault("state", {})
    state["jobs"] = jobs  # for the line in the log
    form.head.resume(state.get("stream"))
    within_s -= state.get("spent_s", 0.0)  # in a process that is gone
    alarm = asyncio.get_running_loop().call_later(within_s, give_up, jobs, within_s)
    handed_over = False

    def close() -> None:
        alarm.cancel()
        for job in jobs:
            job.abandon()

    try:
        if not stream:
            with while_connected(request.receive):
                answers = await _all([job.mailbox.finish() for job in jobs])
            return form.whole(answers, jobs)
        with while_connected(request.receive):  # until here an unsound prompt can still be a 400
            await _all([job.mailbox.wait_until_open() for job in jobs])
        state["stream"] = (form.head.id, form.head.created)  # for whoever goes on with it
        chunks = _note_first(chunks_of(form, jobs), state, on_failure)
        events = EventStream(as_events(chunks, HEARTBEAT_S, jobs[0].current_wait), close)
        handed_over = True
        return events
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    except Exception as error:
        try:
            with while_connected(request.receive):
                await on_failure(error)
        except ClientGone:  # or another process has it
            return Response(status_code=CLIENT_CLOSED)
        raise
    finally:
        if not handed_over:
            close()


async def chunks_of(form: ReplyFormat, jobs: Sequence[AnswerJob]) -> AsyncIterator[Event]:
    """The answers' chunks as they come. Raises what a worker failed with."""
    answers: dict[int, Answer] = {}
    choices = [form.choice(index, job, answers) for index, job in enumerate(jobs)]
    async for chunk in _interleave(choices):
        yield chunk
    if more := form.end_fields([answers[index] for index in range(len(jobs))], jobs):
        yield form.head.last(more)


async def _note_first(
    chunks: AsyncIterator[Event],
    state: dict[str, Any],
    on_failure: Callable[[Exception], Awaitable[None]],
) -> AsyncIterator[Event]:
    """Pass chunks on and note in `state` when the first word of an answer goes out: from then on no
    other process can begin it again."""
    try:
        async for chunk in chunks:
            if any("role" not in choice.get("delta", {}) for choice in chunk["choices"]):
                state["has_begun"] = True
            yield chunk
    except Exception as error:
        await on_failure(error)
        raise


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure at once."""
    if len(works) == 1:  # as almost always: without tasks
        return [await works[0]]
    return list(await asyncio.gather(*works))


def give_up(jobs: Sequence[AnswerJob], within_s: float) -> None:
    """The time of a request is over."""
    message = f"the answer was not finished within {within_s:g} s; ask for fewer tokens"
    for job in jobs:
        job.abandon(ApiError(504, message, code="timeout"))


class PieceBatch(NamedTuple):
    """All that came of an answer since the last one; never all empty."""

    text: str
    logprobs: list[TokenLogprob]
    calls: list[ToolCall]  # behind the text


async def batches(job: AnswerJob) -> AsyncIterator[PieceBatch]:
    while pieces := await job.mailbox.take():
        batch = PieceBatch(
            "".join(piece.text for piece in pieces),
            [p.logprob for p in pieces if p.logprob is not None],
            [p.call for p in pieces if p.call is not None],
        )
        if any(batch):
            yield batch


async def _interleave(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """All items of all streams; within a stream in order. The first failure ends it."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    # One place in the queue: a slow reader holds the streams back, and they merge meanwhile.
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(1)

    async def drain(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                await queue.put((item,))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            got = await queue.get()
            if got is None:
                num_open -= 1
            elif isinstance(got, Exception):
                raise got
            else:
                yield got[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_of(prompts: Sequence[Answer], answers: Sequence[Answer]) -> Usage:
    """`prompts`: one answer to each prompt. A prompt counts once, however many answers it has."""
    read = sum(answer.prompt_tokens for answer in prompts)
    made = sum(answer.completion_tokens for answer in answers)
    cached = [answer.cached_tokens for answer in prompts]
    known = [count for count in cached if count is not None]
    details = PromptTokensDetails(cached_tokens=sum(known)) if len(known) == len(cached) else None
    copies = [answer.copies for answer in answers if answer.copies is not None]
    right = sum(each.copied for each in copies)
    guessed = CompletionTokensDetails(
        accepted_prediction_tokens=right,
        rejected_prediction_tokens=sum(each.drafted for each in copies) - right,
    )
    return Usage(
        prompt_tokens=read,
        completion_tokens=made,
        total_tokens=read + made,
        prompt_tokens_details=details,
        completion_tokens_details=guessed if len(copies) == len(answers) else None,
    )
