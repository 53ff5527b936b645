"""POST /v1/compare: one question in two or three ways, one after another, and how far each is from
full prefill.

    {way, delta} …  {way, done} …     the answers, each way when the one before it is over
    {way, quality} …                  measured on the spot, once all are answered
    [DONE]

Full prefill is computed once: it is one of the ways, or is asked for behind them. A strategy that
is named is shown by itself: it reads nothing of the knowledge tree, which may hold the very path
from an earlier question, and leaves nothing there. "auto" and "prefix" are as for any request.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request, Response

from kvweave.app.answer.answer_stream import WatchedTokens
from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.answer.question import PLAIN_REUSES
from kvweave.app.libraries.quality_view import WATCHED, is_comparable, measure_quality
from kvweave.app.weave import Answer
from kvweave.errors import ConfigError, RequestError
from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.access.disconnects import ClientGone, while_connected
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.chat import AnswerMeasure, over_kb, read_chat
from kvweave.serve.routes.context import Context
from kvweave.serve.routes.reply import (
    CLIENT_CLOSED,
    Event,
    ReplyHead,
    batches,
    give_up,
)
from kvweave.serve.wire.chat import (
    FEWEST_WAYS,
    MOST_TOKENS,
    MOST_WAYS,
    ChatRequest,
    CompareRequest,
    ReuseIn,
    WayIn,
)
from kvweave.serve.wire.explain import explain_of, sources_out
from kvweave.serve.wire.schema import ANSWER_ERRORS, or_events
from kvweave.serve.wire.sse import HEARTBEAT_S, EventStream, as_events
from kvweave.serve.workers.answer_pool import AnswerJob, Start

FULL = "full"


def compare_routes(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["looking closer"])

    @routes.post(
        "/compare",
        responses={**ANSWER_ERRORS, 200: or_events("Answers and figures as events")},
    )
    async def compare(body: CompareRequest, request: Request) -> Response:
        comparison = Comparison(context, body, tenant_of(request.scope))
        try:
            with while_connected(request.receive):
                await comparison.begin()  # until here it can still be a 400
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        events = as_events(comparison.events(), HEARTBEAT_S, comparison.current_wait)
        return EventStream(events, on_close=comparison.close)

    return routes


class Comparison:
    """One request. On the event loop; `close` it, whatever happened."""

    def __init__(self, context: Context, body: CompareRequest, tenant: str) -> None:
        """Raises ApiError or RequestError if the request is unsound."""
        self._context = context
        self._tenant = tenant
        self._asked = context.models.read(body.model)
        self._body = body = over_kb(body, self._asked)
        self._jobs: list[AnswerJob] = []
        within_s = context.limits.request_s
        loop = asyncio.get_running_loop()
        self._ways = self._read_ways()
        self._alarm = loop.call_later(within_s, give_up, self._jobs, within_s)

    async def begin(self) -> None:
        """Start with the first way. Raises what is wrong with its question."""
        try:
            await self._start(self._ways[0]).mailbox.wait_until_open()
        except BaseException:
            self.close()
            raise

    def current_wait(self) -> Event | None:
        """What the way that is being answered waits for, see `AnswerJob`."""
        return self._jobs[-1].current_wait()

    def close(self) -> None:
        self._alarm.cancel()
        for job in self._jobs:
            job.abandon()

    async def events(self) -> AsyncIterator[Event]:
        """Answers, then figures. Raises what a worker failed with."""
        answers: list[Answer] = []
        for way in range(len(self._ways)):
            job = self._jobs[0] if way == 0 else self._start(self._ways[way])
            async for text, _, _ in batches(job):
                yield {"way": way, "delta": text}
            answers.append(await job.mailbox.finish())
            yield {"way": way, "done": self._done(answers[way], job)}
        full = await self._full(answers)
        for way, answer in enumerate(answers):
            yield {"way": way, "quality": await self._quality(full, way, answer)}

    def _read_ways(self) -> list[ReuseIn]:
        body, weave = self._body, self._context.weave
        if not FEWEST_WAYS <= len(body.ways) <= MOST_WAYS:
            message = f"'ways' must be {FEWEST_WAYS} to {MOST_WAYS}, got {len(body.ways)}"
            raise ApiError(400, message, param="ways")
        if body.kb is None and body.documents is None:
            raise ApiError(400, "'kb' or 'documents' is missing: there is nothing to compare")
        if not 1 <= body.max_tokens <= MOST_TOKENS:
            message = f"'max_tokens' must be between 1 and {MOST_TOKENS}, got {body.max_tokens}"
            raise ApiError(400, message, param="max_tokens")
        ways = [_reuse(way) for way in body.ways]
        for way in ways:
            try:
                weave.check_strategy(way.strategy, way.ratio, body.model)
            except ConfigError as error:
                raise RequestError(str(error)) from error
            self._read(way, _measure(way))  # what is wrong with it is told now
        return ways

    def _start(self, way: ReuseIn, measure: AnswerMeasure | None = None) -> AnswerJob:
        """One more answer, greedy and watched."""
        starts = self._read(way, measure or _measure(way))
        (job,) = self._context.answers.submit(starts, self._tenant)
        self._jobs.append(job)
        return job

    def _read(self, way: ReuseIn, measure: AnswerMeasure) -> list[Start]:
        body = self._body
        request = ChatRequest.model_construct(
            messages=body.messages,
            model=body.model,
            documents=body.documents,
            kb=body.kb,
            k=body.k,
            recognise=False,  # all ways of the same prompt
            reuse=way,
            max_tokens=len(measure.forced) or body.max_tokens,
            temperature=0.0,
            _fields_set={"temperature", "max_tokens", "reuse"},
        )
        return read_chat(request, self._context, self._tenant, measure)

    def _done(self, answer: Answer, job: AnswerJob) -> Event:
        head = ReplyHead("compare", "chatcmpl", self._asked.name, with_usage=False)
        kept = KeptAnswer(head.id, self._asked.model, self._body.kb, answer, job.queue_s)
        self._context.kept.add(self._tenant, kept)
        return {
            "id": head.id,
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            "ttft_ms": round(answer.ttft_ms, 3),
            "total_ms": round(answer.total_ms, 3),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "sources": [source.model_dump() for source in sources_out(answer.sources)],
            "explain": explain_of(answer, job.queue_s).model_dump(),
        }

    async def _full(self, answers: Sequence[Answer]) -> WatchedTokens:
        """Full prefill's first tokens: of the way that is full prefill, or computed now."""
        for way, answer in zip(self._ways, answers, strict=True):
            if way.strategy == FULL and answer.watched is not None:
                return answer.watched
        answer = await self._start(ReuseIn(strategy=FULL)).mailbox.finish()
        assert answer.watched is not None, "it is watched"
        return answer.watched

    async def _quality(self, full: WatchedTokens, way: int, answer: Answer) -> Event:
        """Figures of one way. One that gave other tokens than full prefill is asked again with
        those of full prefill."""
        watched = answer.watched
        assert watched is not None, "every way is watched"
        if not is_comparable(full, watched):
            measure = _measure(self._ways[way])._replace(forced=full.token_ids)
            again = await self._start(_as_done(answer), measure).mailbox.finish()
            watched = again.watched
            assert watched is not None, "it is watched"
        measured = await asyncio.to_thread(measure_quality, full, watched)
        return {
            "kl_nats": float(f"{measured.kl:.6g}"),
            "same_first_token": measured.same_first,
            "positions": measured.positions,
        }


def _measure(way: ReuseIn) -> AnswerMeasure:
    """How a way is watched."""
    return AnswerMeasure(WATCHED, alone=way.strategy not in PLAIN_REUSES)


def _reuse(way: WayIn) -> ReuseIn:
    if way.ratio is None:
        return way.reuse
    return way.reuse.model_copy(update={"ratio": way.ratio})


def _as_done(answer: Answer) -> ReuseIn:
    """The way that was really taken: what "auto" chose is asked for by name."""
    record = answer.explain
    if record is None:
        return ReuseIn(strategy=FULL)
    is_fused = record.trace is not None and record.strategy != "reuse"
    return ReuseIn(strategy=record.strategy, ratio=record.ratio if is_fused else None)
