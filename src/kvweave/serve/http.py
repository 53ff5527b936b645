"""The routes. Each reads a request, hands it on and puts the result into the wire format."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from kvweave import __version__
from kvweave.app import Weave
from kvweave.serve.body_limit import BodyLimit
from kvweave.serve.bridge import Bridge, Limits
from kvweave.serve.chat import Reply, read_request
from kvweave.serve.errors import ApiError, install_error_handlers
from kvweave.serve.sse import EventStream, as_events
from kvweave.serve.wire import ChatReply, ChatRequest, Health, ModelCard, ModelList

T = TypeVar("T")

CLIENT_CLOSED = 499  # no one reads it; it shows in logs


class ClientGone(Exception):
    """The client closed the connection before it had its reply."""


def build_http(weave: Weave, limits: Limits | None = None) -> FastAPI:
    """An ASGI application that serves `weave`. Several may live side by side."""
    limits = limits or Limits()
    bridge = Bridge(limits)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(http: FastAPI) -> AsyncIterator[None]:
        yield
        await bridge.close()

    http = FastAPI(title="kvweave", version=__version__, lifespan=lifespan)
    http.state.bridge = bridge  # for whoever stops the server
    http.add_middleware(BodyLimit, limit_bytes=limits.body_bytes)
    install_error_handlers(http)

    def card() -> ModelCard:
        return ModelCard(id=weave.model_name, created=started, max_model_len=weave.max_context)

    @http.get("/healthz")
    async def healthz() -> Health:
        return Health(model=weave.model_name, **bridge.counts()._asdict())

    @http.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card()])

    @http.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        if name != weave.model_name:
            message = f"no model {name!r} here; this server has {weave.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return card()

    @http.post("/v1/chat/completions", response_model=ChatReply)
    async def chat_completions(body: ChatRequest, request: Request) -> Response | ChatReply:
        job = bridge.submit(read_request(body, weave))
        reply = Reply(weave.model_name)
        handed_over = False
        try:
            if not body.stream:
                answer = await unless_gone(request, job.mailbox.finish())
                return reply.whole(answer, with_logprobs=body.logprobs)
            await unless_gone(request, job.mailbox.opened())  # unsound prompts are a 400 yet
            chunks = reply.chunks(
                job.mailbox,
                with_usage=body.stream_options is not None and body.stream_options.include_usage,
                with_logprobs=body.logprobs,
            )
            stream = EventStream(as_events(chunks), on_close=job.abandon)
            handed_over = True
            return stream
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        finally:
            if not handed_over:
                job.abandon()

    return http


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone as soon as the client hangs up."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client hangs up. The body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
