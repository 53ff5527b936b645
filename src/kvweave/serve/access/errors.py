"""Every "no" the server says, in OpenAI's JSON shape:

    {"error": {"message": …, "type": …, "param": …, "code": …}}

The caller's faults are 4xx with one line that names the thing. A 500 is our own bug: the traceback
goes to the log, never to the client.
"""

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvweave.app.answer.kept_answers import NoSuchAnswer
from kvweave.app.libraries.cache_view import NoSuchNode
from kvweave.app.libraries.libraries import (
    AllInUse,
    InUse,
    NoSuchKnowledgeBase,
    NotInLibrary,
)
from kvweave.app.libraries.saved_conversations import NoSuchConversation
from kvweave.errors import (
    CorpusBusy,
    CorpusDamaged,
    CorpusFull,
    CorpusMismatch,
    CorpusReadOnly,
    EngineClosed,
    KVWeaveError,
    NoDeviceMemory,
    PromptTooLong,
    RequestError,
    TierError,
    UpstreamError,
    UpstreamRefusal,
)

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 600  # characters; a message may quote what the caller sent
LONGEST_QUOTE = 60
MOST_FAULTS = 4  # named in one message

# As `repr`, of no more than is shown: a body may be megabytes of small things
QUOTE = reprlib.Repr()
QUOTE.maxstring = QUOTE.maxother = QUOTE.maxlong = 4 * LONGEST_QUOTE


class Refusal(NamedTuple):
    """What a client is told of an error that `app` raises."""

    status: int
    code: str | None = None
    wait_s: int | None = None  # for Retry-After
    words: str | None = None  # in place of its own, which go to the log: they name a path


# The first kind that fits counts.
REFUSALS: dict[type[Exception], Refusal] = {
    NoSuchAnswer: Refusal(404, "not_found"),
    NoSuchNode: Refusal(404, "not_found"),
    NoSuchConversation: Refusal(404, "not_found"),
    NoSuchKnowledgeBase: Refusal(404, "not_found"),
    NotInLibrary: Refusal(404, "not_found"),
    PromptTooLong: Refusal(400, "context_length_exceeded"),
    RequestError: Refusal(400),
    InUse: Refusal(409, "in_use", 5),
    EngineClosed: Refusal(503, wait_s=5),  # nothing is wrong with the request: another server may
    NoDeviceMemory: Refusal(503, "no_device_memory", 5),
    UpstreamError: Refusal(503, wait_s=1),
    TierError: Refusal(
        503,
        "shared_tier_failed",
        5,
        "a tier that servers share may still have chunk KV of what was deleted; send it again",
    ),
    CorpusBusy: Refusal(
        409,
        "knowledge_base_busy",
        5,
        "another process is writing this knowledge base; nothing was changed, try again",
    ),
    CorpusFull: Refusal(
        507,
        "no_room",
        60,
        "the server's disk is full; documents that are complete stay, send the others again when "
        "there is room",
    ),
    CorpusReadOnly: Refusal(
        503,
        "read_only",
        60,
        "this knowledge base cannot be written now; nothing was changed",
    ),
    CorpusMismatch: Refusal(
        409,
        "knowledge_base_mismatch",
        words="this knowledge base was made with an embedder or a model that this server does not "
        "have; the server's log says which",
    ),
    CorpusDamaged: Refusal(
        500,
        "knowledge_base_damaged",
        words="this knowledge base is damaged; its administrator can look with kvweave kb check",
    ),
}
PATH = re.compile(r"(?<![\w/.:~])~?/(?:[^\s/:,;'\"()]+/)*([^\s/:,;'\"()]+)")


def without_paths(text: str) -> str:
    """Cut absolute paths to their last part: where things lie is no business of the client's."""
    return PATH.sub(r"\1", text)


class ApiError(HTTPException):
    """A refusal with a status of its own.

    An HTTPException, because FastAPI lets nothing else through while it reads a body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param  # the request field at fault
        self.code = code  # for programs, where OpenAI has one


def busy(what: str) -> ApiError:
    """A 429 that says when to try again."""
    return ApiError(
        429,
        f"{what}; try again in a moment",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def install_error_handlers(http: FastAPI) -> None:
    """Make `http` answer every failure in the shape above, but bugs: `RequestLog` does those."""
    http.add_exception_handler(RequestValidationError, _on_validation)
    http.add_exception_handler(HTTPException, _on_http)
    http.add_exception_handler(KVWeaveError, _on_kvweave)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about `error`; what is not the client's fault is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UpstreamRefusal):
        return ApiError(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, AllInUse):
        return busy(str(error))
    for kind, (status, code, wait_s, words) in REFUSALS.items():
        if isinstance(error, kind):
            if words is not None:
                log.warning("%s", error)
            elif kind is NoDeviceMemory:
                log.warning("%s (%s)", error, error.__cause__)
            headers = {} if wait_s is None else {"Retry-After": str(wait_s)}
            return ApiError(status, words or str(error), code=code, headers=headers)
    log.error("a request failed", exc_info=error)
    if isinstance(error, KVWeaveError):
        return ApiError(500, without_paths(str(error)))
    return ApiError(500, "internal error; the server's log says more")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON document of `error`."""
    message = " ".join(str(error.detail)[: 4 * LONGEST_MESSAGE].split())  # it may quote megabytes
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "…"
    body = {
        "message": message.encode(errors="replace").decode(),  # half a surrogate pair is no JSON
        "type": _type_of(error.status_code),
        "param": error.param,
        "code": error.code,
    }
    return {"error": body}


def describe(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """One line about what pydantic found wrong with a body."""
    lines = dict.fromkeys(_line(fault) for fault in faults)  # in order, each once
    shown = list(lines)[:MOST_FAULTS]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    first = _place(faults[0]) if faults else ""
    return ApiError(400, "; ".join(shown), param=first.encode(errors="replace").decode() or None)


def _line(fault: Mapping[str, Any]) -> str:
    place, kind = _place(fault), fault["type"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {fault['ctx']['error']} at {fault['loc'][-1]}"
    if kind == "extra_forbidden":
        return f"'{place}' is not supported"
    if kind == "too_many":
        named = f"'{place}'" if place else "the body"
        return f"{named} {fault['msg']}, got {len(fault['input'])}"
    if not place:
        return "the body must be a JSON object, sent with Content-Type: application/json"
    if kind == "missing":
        return f"'{place}' is missing"
    wants = fault["msg"].removeprefix("Input ").replace("should be", "must be")
    return f"'{place}' {wants}, got {quote(fault['input'])}"


def quote(value: object) -> str:
    """What a caller sent, as far as a line has room for it."""
    text = QUOTE.repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"


def _place(fault: Mapping[str, Any]) -> str:
    """Where in the body: messages.0.content."""
    if fault["type"] == "json_invalid":
        return ""
    return ".".join(str(part)[:LONGEST_QUOTE] for part in fault["loc"][1:])  # the first is "body"


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status_code, headers=error.headers)


async def _on_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "installed for another exception"
    return error_response(describe(error.errors()))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    """ApiError, and what the framework itself refuses: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException), "installed for another exception"
    if isinstance(error, ApiError):
        return error_response(error)
    detail = str(error.detail)
    if error.status_code in (404, 405):
        detail = f"{request.method} {request.url.path} is not served here"
    return error_response(ApiError(error.status_code, detail, headers=error.headers))


async def _on_kvweave(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KVWeaveError), "installed for another exception"
    return error_response(as_api_error(error))
