"""A chat request in words of kvweave: what to answer from, with what, how often."""

from collections.abc import Sequence
from functools import partial

from kvweave.app.libraries.libraries import Libraries, check_name
from kvweave.app.weave import BOUND, TOP_K, AnswerStream, Document, Sampling, Weave
from kvweave.errors import ConfigError, RequestError
from kvweave.serve.errors import ApiError
from kvweave.serve.limits import Limits
from kvweave.serve.routes.sampling import check_model, check_neutral, samplings
from kvweave.serve.wire.chat import ChatMessage, ChatRequest
from kvweave.serve.workers.answer_pool import Start

DEFAULT_MAX_TOKENS = 1024  # for callers who name no limit
MOST_CHUNKS = 1000  # that `k` may ask for
LONGEST_CONVERSATION_ID = 256
OVER = "'documents' and 'kb' go with user and assistant messages in turn, a user's first and last"


def read_chat(
    request: ChatRequest, weave: Weave, libraries: Libraries, tenant: str, limits: Limits
) -> list[Start]:
    """What to start on workers. Raises ApiError or RequestError if the request is unsound."""
    check_model(request, weave)
    check_neutral(request, {"store": False})
    _check_messages(request)
    drawn = samplings(request, _max_tokens(request), _logprobs(request), limits)
    if request.documents is None and request.kb is None:
        _refuse_without_chunks(request)
        messages = [{"role": _role(m.role), "content": m.text} for m in request.messages]
        return [partial(weave.chat, messages, sampling=sampling) for sampling in drawn]
    if request.kb is None:
        return _over(request, drawn, weave, None, tenant)
    check_name(request.kb)
    return _over(request, drawn, weave, libraries, tenant)


def _check_messages(request: ChatRequest) -> None:
    if not request.messages:
        raise ApiError(400, "'messages' is empty; send at least one", param="messages")
    if not request.messages[-1].text.strip():
        last = f"messages.{len(request.messages) - 1}.content"
        raise ApiError(400, f"'{last}' is empty; say something", param=last)


def _max_tokens(request: ChatRequest) -> int:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            "'max_tokens' and 'max_completion_tokens' differ; send one of them",
            param="max_tokens",
        )
    return next((n for n in limits if n is not None), DEFAULT_MAX_TOKENS)


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        message = "'top_logprobs' needs 'logprobs': true"
        raise ApiError(400, message, param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _refuse_without_chunks(request: ChatRequest) -> None:
    for name in ("k", "conversation_id", "order", "reuse"):
        if getattr(request, name) is not None:
            raise ApiError(400, f"'{name}' needs 'kb' or 'documents'", param=name)


def _over(
    request: ChatRequest,
    drawn: Sequence[Sampling],
    weave: Weave,
    libraries: Libraries | None,
    tenant: str,
) -> list[Start]:
    """Chunks stand in front of the conversation, in the layout that reuse needs."""
    system, turns = _turns(request.messages)
    documents = _documents(request)
    strategy, ratio, bound = _reuse(request, system)
    k, conversation = _retrieval(request)
    name = request.kb

    def start(sampling: Sampling) -> AnswerStream:
        if libraries is None or name is None:
            return stream(weave, sampling)
        loan = libraries.lend(tenant, name)  # it stays open until the answer is closed
        try:
            answering = stream(loan.thing, sampling)
        except BaseException:
            loan.give_back()
            raise
        answering.when_closed(loan.give_back)
        return answering

    def stream(over: Weave, sampling: Sampling) -> AnswerStream:
        try:
            return over.stream(
                turns[-1]["content"],
                documents=documents,
                sampling=sampling,
                system=system,
                reuse=strategy,
                ratio=ratio,
                order=request.order or "keep",
                history=turns[:-1],
                conversation_id=conversation,
                tenant=tenant,
                k=TOP_K if k is None else k,
                bound=BOUND if bound is None else bound,
            )
        except ConfigError as error:  # a strategy that this model is not ready for
            raise RequestError(str(error)) from error

    return [partial(start, sampling) for sampling in drawn]


def _turns(messages: Sequence[ChatMessage]) -> tuple[str | None, list[dict[str, str]]]:
    """The system message, if there is one, and the rest."""
    roles = [_role(message.role) for message in messages]
    behind = 1 if roles[0] == "system" else 0
    wanted = ["user", "assistant"] * len(roles)
    if not roles[behind:] or roles[behind:] != wanted[: len(roles) - behind] or roles[-1] != "user":
        shown = f"{', '.join(roles[:6])}{', …' if len(roles) > 6 else ''}"
        message = f"{OVER}, behind at most one system message; got {shown}"
        raise ApiError(400, message, param="messages")
    system = messages[0].text if behind else None
    turns = [{"role": _role(m.role), "content": m.text} for m in messages[behind:]]
    return system, turns


def _documents(request: ChatRequest) -> list[Document] | None:
    if request.documents is None:
        return None
    documents = [Document(d.text, d.title) for d in request.documents]
    for i, document in enumerate(documents):
        if not document.text.strip():
            raise ApiError(400, f"'documents.{i}' is empty; leave it out", param=f"documents.{i}")
    return documents


def _reuse(request: ChatRequest, system: str | None) -> tuple[str, float | None, float | None]:
    """Strategy, ratio, bound. Named by no one: "auto" where stored chunk KV can fit."""
    if request.reuse is None:
        return ("auto" if request.kb is not None and system is None else "full"), None, None
    reuse = request.reuse
    if request.kb is None and reuse.strategy != "full":
        message = "'reuse' needs 'kb', the knowledge base whose chunk KV is reused"
        raise ApiError(400, message, param="reuse")
    return reuse.strategy, reuse.ratio, reuse.bound


def _retrieval(request: ChatRequest) -> tuple[int | None, str | None]:
    k, conversation = request.k, request.conversation_id
    if k is not None and request.documents is not None:
        raise ApiError(400, "'k' chooses among a knowledge base; send no 'documents'", param="k")
    if k is not None and not 1 <= k <= MOST_CHUNKS:
        raise ApiError(400, f"'k' must be between 1 and {MOST_CHUNKS}, got {k}", param="k")
    if conversation is not None and request.kb is None:
        raise ApiError(400, "'conversation_id' needs 'kb'", param="conversation_id")
    if conversation is not None and not 1 <= len(conversation) <= LONGEST_CONVERSATION_ID:
        message = f"'conversation_id' must have 1 to {LONGEST_CONVERSATION_ID} characters"
        raise ApiError(400, message, param="conversation_id")
    return k, conversation


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # OpenAI's newer name of the same
