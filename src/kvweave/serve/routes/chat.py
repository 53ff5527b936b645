"""POST /v1/chat/completions: from the request to what is asked of kvweave, and back.

Which fields go with which is checked here, in words of the wire format. What a field may hold where
Python callers have it too, and what it means if it is left out, is decided in `app`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.answer.question import PLAIN_REUSES, ChatOptions, Question
from kvweave.app.hosts import PieceStream
from kvweave.app.libraries.libraries import LibraryKey, check_name
from kvweave.app.weave import Answer, Document, Sampling, TokenLogprob
from kvweave.errors import ConfigError, RequestError
from kvweave.serve.access.errors import ApiError
from kvweave.serve.routes.context import Context
from kvweave.serve.routes.model_names import ModelRef
from kvweave.serve.routes.reply import Event, ReplyHead, batches, usage_of
from kvweave.serve.routes.sampling import check_neutral, samplings, transfer_of
from kvweave.serve.wire.base import MOST_CHUNKS
from kvweave.serve.wire.chat import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    CompareRequest,
    ContentLogprob,
    Logprobs,
    ReplyChoice,
    ReplyMessage,
    TopLogprob,
)
from kvweave.serve.wire.explain import explain_of, sources_out, streamed_sources
from kvweave.serve.wire.tools import call_out
from kvweave.serve.workers.answer_pool import AnswerJob, Start

DEFAULT_MAX_TOKENS = 1024  # for callers who name no limit
LONGEST_CONVERSATION_ID = 256
# options of a question that a request has under the same name
OPTIONS = tuple(each.name for each in fields(Question) if each.name in ChatRequest.model_fields)
# fields about how chunks of a knowledge base are found
SEARCHING = ("retrieval", "min_score", "filter", "rewrite", "nothing_found", "recognise")
OVER = "'documents' and 'kb' go with user and assistant messages in turn, a user's first and last"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a token that is part of a character decodes to


Named = TypeVar("Named", ChatRequest, CompareRequest)  # may name a model, a knowledge base


class AnswerMeasure(NamedTuple):
    """An answer that is measured; see the fields of `Question`."""

    watched: int
    forced: tuple[int, ...] = ()
    alone: bool = False


def read_chat(
    request: ChatRequest, context: Context, tenant: str, measure: AnswerMeasure | None = None
) -> list[Start]:
    """What to start on workers. Raises ApiError or RequestError if the request is unsound."""
    weave = context.weave
    check_neutral(request)
    _check_messages(request)
    transfer = transfer_of(request, context)
    if transfer is not None:
        if transfer.chunks:
            message = "'kv_transfer_params' names chunks of token ids; send them to /v1/completions"
            raise ApiError(400, message, param="kv_transfer_params")
        tenant = transfer.tenant_of(tenant)
    drawn = samplings(request, _max_tokens(request, context), _logprobs_wanted(request), context)
    if (schema := _schema(request)) is not None:
        drawn = [replace(each, json_schema=schema) for each in drawn]
    if request.documents is None and request.kb is None:
        _refuse_without_chunks(request)
        messages = [message.as_message() for message in request.messages]
        reuse = None if request.reuse is None else request.reuse.strategy
        options: ChatOptions = {
            "reuse": reuse,
            "tenant": tenant,
            "model": request.model,
            "tools": _tools(request),
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
        }
        return [
            partial(weave.chat, messages, **ChatOptions(**options, sampling=sampling))
            for sampling in drawn
        ]
    if request.kb is not None:
        check_name(request.kb)
        if transfer is not None:
            message = "'kb' is looked up by tenant here; a gateway has its own"
            raise ApiError(400, message, param="kb")
    return _over_chunks(request, drawn, context, tenant, measure)


def over_kb(request: Named, asked: ModelRef) -> Named:
    """The request with what its model's name means: a model that is served, and perhaps a knowledge
    base."""
    kb = request.kb if asked.kb is None else asked.kb
    if request.kb not in (None, kb):
        message = f"'model' {asked.name!r} and 'kb' {request.kb!r} differ; send one of them"
        raise ApiError(400, message, param="kb")
    return request.model_copy(update={"kb": kb, "model": asked.model})


def _check_messages(request: ChatRequest) -> None:
    """Not left to `app`: a plain chat has no question there, and here the field has its name."""
    if not request.messages:
        raise ApiError(400, "'messages' is empty; send at least one", param="messages")
    for place, message in enumerate(request.messages):
        _check_calls(message, f"messages.{place}")
    last = request.messages[-1]
    if last.role == "assistant" and last.tool_calls:
        name = f"messages.{len(request.messages) - 1}"
        words = "calls tools; send their results behind it, as messages of role 'tool'"
        raise ApiError(400, f"'{name}' {words}", param=name)
    if last.role != "tool" and not last.text.strip():
        name = f"messages.{len(request.messages) - 1}.content"
        raise ApiError(400, f"'{name}' is empty; say something", param=name)


def _check_calls(message: ChatMessage, place: str) -> None:
    """Which fields go with which role."""
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, f"'{place}.tool_calls' are an assistant's", param=f"{place}.tool_calls")
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"'{place}.content' is missing", param=f"{place}.content")
    if message.name is not None and message.role != "tool":
        raise ApiError(400, f"'{place}.name' is not supported", param=f"{place}.name")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        words = "goes with the role 'tool', and only with it"
        raise ApiError(400, f"'{place}.tool_call_id' {words}", param=f"{place}.tool_call_id")


def _max_tokens(request: ChatRequest, context: Context) -> int:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            "'max_tokens' and 'max_completion_tokens' differ; send one of them",
            param="max_tokens",
        )
    usual = context.usual.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    return next((n for n in limits if n is not None), usual)


def _logprobs_wanted(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        message = "'top_logprobs' needs 'logprobs': true"
        raise ApiError(400, message, param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def _schema(request: ChatRequest) -> str | None:
    """The JSON schema that answers are held to; None: they are text."""
    form = request.response_format
    may_call = bool(request.tools) and request.tool_choice != "none"
    if form is not None and form.type != "text" and may_call:
        message = "'response_format' holds the whole answer to JSON, so it goes with no 'tools'"
        raise ApiError(400, message, param="response_format")
    if form is None:
        return None
    if (form.type == "json_schema") != (form.json_schema is not None):
        message = "'response_format.json_schema' goes with type 'json_schema', and only with it"
        raise ApiError(400, message, param="response_format")
    return form.schema_text


def _refuse_without_chunks(request: ChatRequest) -> None:
    for name in ("k", "conversation_id", "order", "speculate", "cite"):
        if name in request.model_fields_set:
            raise ApiError(400, f"'{name}' needs 'kb' or 'documents'", param=name)
    for name in SEARCHING:
        if name in request.model_fields_set:
            raise ApiError(400, f"'{name}' needs 'kb'", param=name)
    if request.reuse is not None and request.reuse.strategy not in PLAIN_REUSES:
        known = ", ".join(PLAIN_REUSES)
        message = f"'reuse' {request.reuse.strategy!r} needs 'kb' or 'documents'; else: {known}"
        raise ApiError(400, message, param="reuse")


def _over_chunks(
    request: ChatRequest,
    drawn: Sequence[Sampling],
    context: Context,
    tenant: str,
    measure: AnswerMeasure | None,
) -> list[Start]:
    """Chunks stand in front of the conversation, in the layout that reuse needs."""
    system, turns, since = _read_turns(request.messages)
    options: dict[str, Any] = {name: getattr(request, name) for name in OPTIONS}
    options |= {
        "tools": _tools(request),
        "since": since,
        "documents": _documents(request),
        "system": system,
        "history": turns[:-1],
        "tenant": tenant,
        "reuse": None,
    }
    if (reuse := request.reuse) is not None:
        options |= {"reuse": reuse.strategy, "ratio": reuse.ratio, "bound": reuse.bound}
    _check_retrieval(request)
    if measure is not None:
        options["watched"], options["forced"], options["alone"] = measure

    def start(sampling: Sampling) -> PieceStream:
        question, asked = str(turns[-1]["content"]), {**options, "sampling": sampling}
        if request.kb is None:
            reuse, ratio, model = asked.get("reuse"), asked.get("ratio"), asked.get("model")
            try:
                context.weave.check_strategy(reuse, ratio, model)
            except ConfigError as error:
                raise RequestError(str(error)) from error
            return context.weave.stream(question, **asked)
        return context.libraries.stream(LibraryKey(tenant, request.kb), question, **asked)

    return [partial(start, sampling) for sampling in drawn]


class ChatTurns(NamedTuple):
    """A conversation in front of which chunks stand."""

    system: str | None
    turns: list[dict[str, Any]]  # a user's last
    since: list[dict[str, Any]]  # calls and their results behind that


def _read_turns(messages: Sequence[ChatMessage]) -> ChatTurns:
    said = _join_questions([message.as_message() for message in messages])
    first = 1 if said[0]["role"] == "system" else 0
    last = max((i for i, m in enumerate(said) if m["role"] == "user"), default=-1)
    turns, since = said[first : last + 1], said[last + 1 :]
    if not _take_turns(turns) or (since and since[-1]["role"] != "tool"):
        roles = [m["role"] for m in said]
        shown = f"{', '.join(roles[:6])}{', …' if len(roles) > 6 else ''}"
        message = f"{OVER}, behind at most one system message; got {shown}"
        raise ApiError(400, message, param="messages")
    return ChatTurns(said[0]["content"] if first else None, turns, since)


def _take_turns(turns: Sequence[dict[str, Any]]) -> bool:
    """Whether user and assistant take turns. What calls and their results are between, is one turn
    of the assistant."""
    roles = [m["role"] for m in turns if m["role"] != "tool" and not m.get("tool_calls")]
    is_begun = bool(turns) and turns[0]["role"] == "user"
    return is_begun and roles == (["user", "assistant"] * len(turns))[: len(roles)]


def _join_questions(said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join questions that were not answered with the next: clients leave an answer out that
    failed, or was stopped before its first word."""
    joined: list[dict[str, Any]] = []
    for message in said:
        if joined and message["role"] == joined[-1]["role"] == "user":
            content = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**message, "content": content}
        else:
            joined.append(message)
    return joined


def _documents(request: ChatRequest) -> list[Document] | None:
    if request.documents is None:
        return None
    documents = [Document(d.text, d.title) for d in request.documents]
    for i, document in enumerate(documents):
        if not document.text.strip():
            raise ApiError(400, f"'documents.{i}' is empty; leave it out", param=f"documents.{i}")
    return documents


def _check_retrieval(request: ChatRequest) -> None:
    k, conversation = request.k, request.conversation_id
    for name in SEARCHING:
        is_searched = request.kb is not None and request.documents is None
        if name in request.model_fields_set and not is_searched:
            message = f"'{name}' is about a search of 'kb'; send no 'documents'"
            raise ApiError(400, message, param=name)
    if k is not None and request.documents is not None:
        raise ApiError(400, "'k' chooses among a knowledge base; send no 'documents'", param="k")
    if k is not None and not 1 <= k <= MOST_CHUNKS:
        raise ApiError(400, f"'k' must be between 1 and {MOST_CHUNKS}, got {k}", param="k")
    if conversation is not None and request.kb is None:
        raise ApiError(400, "'conversation_id' needs 'kb'", param="conversation_id")
    if conversation is not None and not 1 <= len(conversation) <= LONGEST_CONVERSATION_ID:
        message = f"'conversation_id' must have 1 to {LONGEST_CONVERSATION_ID} characters"
        raise ApiError(400, message, param="conversation_id")


class ChatFormat:
    """Puts the answers to one request into the wire format."""

    def __init__(
        self, model: ModelRef, request: ChatRequest, keep: Callable[[KeptAnswer], None]
    ) -> None:
        """`keep` hears of the first choice once it is finished."""
        self.head = ReplyHead(
            "chat.completion.chunk", "chatcmpl", model.name, with_usage=request.with_usage
        )
        self._model = model.model
        self._request = request
        self._is_over_chunks = request.kb is not None or request.documents is not None
        self._keep = keep

    def whole(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> ChatReply:
        choices = [
            ReplyChoice(
                index=index,
                message=_message(answer),
                logprobs=_logprobs(answer.logprobs) if self._request.logprobs else None,
                finish_reason=answer.finish_reason,
                stopped_because=answer.stopped_because,
            )
            for index, answer in enumerate(answers)
        ]
        self._keep_answer(answers[0], jobs[0])
        wanted = self._request.explain
        return ChatReply(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=choices,
            usage=usage_of(answers[:1], answers),
            sources=sources_out(answers[0].sources) if self._is_over_chunks else None,
            nothing_found=answers[0].nothing_found,
            query=answers[0].query,
            explain=explain_of(answers[0], jobs[0].queue_s) if wanted else None,
        )

    def end_fields(self, answers: Sequence[Answer], jobs: Sequence[AnswerJob]) -> Event:
        more: Event = {}
        if self._request.explain:
            more["explain"] = explain_of(answers[0], jobs[0].queue_s).model_dump()
        if self._request.with_usage:
            more["usage"] = usage_of(answers[:1], answers).model_dump()
        return more

    async def choice(
        self, index: int, job: AnswerJob, answers: dict[int, Answer]
    ) -> AsyncIterator[Event]:
        chunk, num_calls = self.head.chunk, 0
        yield chunk(index, {"delta": {"role": "assistant", "content": ""}})
        async for text, seen, calls in batches(job):
            if text or seen:
                logprobs = _logprobs(seen).model_dump() if self._request.logprobs else None
                yield chunk(index, {"delta": {"content": text}}, logprobs=logprobs)
            for call in calls:
                called = {"index": num_calls, **call_out(call).model_dump()}
                yield chunk(index, {"delta": {"tool_calls": [called]}})
                num_calls += 1
        answers[index] = await job.mailbox.finish()
        if index == 0:
            self._keep_answer(answers[index], job)
        end = self.head.end(index, {"delta": {}}, answers[index])
        if index == 0 and self._is_over_chunks:
            end["sources"] = streamed_sources(answers[0].sources)
            end["nothing_found"] = answers[0].nothing_found
            end["query"] = answers[0].query
        yield end

    def _keep_answer(self, answer: Answer, job: AnswerJob) -> None:
        kb = self._request.kb
        self._keep(KeptAnswer(self.head.id, self._model, kb, answer, job.queue_s))


def _message(answer: Answer) -> ReplyMessage:
    if not answer.tool_calls:
        return ReplyMessage(content=answer.text)
    calls = [call_out(call) for call in answer.tool_calls]
    return ReplyMessage(content=answer.text or None, tool_calls=calls)


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
