"""Every "no" the server says, in OpenAI's JSON shape:

    {"error": {"message": …, "type": …, "param": …, "code": …}}

The caller's faults are 4xx with one line that names the thing. A 500 is our own bug: the traceback
goes to the log, never to the client.
"""

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

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
    CorpusError,
    CorpusFull,
    CorpusMismatch,
    CorpusReadOnly,
    EngineClosed,
    KVWeaveError,
    NoDeviceMemory,
    PromptTooLong,
    RequestError,
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


# What a client is told of a knowledge base that cannot be used now: status, words, code, seconds
OF_DISKS: dict[type[CorpusError], tuple[int, str, str, int | None]] = {
    CorpusBusy: (
        409,
        "another process is writing this knowledge base; nothing was changed, try again",
        "knowledge_base_busy",
        5,
    ),
    CorpusFull: (
        507,
        "the server's disk is full; documents that are complete stay, send the others again when "
        "there is room",
        "no_room",
        60,
    ),
    CorpusReadOnly: (
        503,
        "this knowledge base cannot be written now; nothing was changed",
        "read_only",
        60,
    ),
    CorpusMismatch: (
        409,
        "this knowledge base was made with an embedder or a model that this server does not have; "
        "the server's log says which",
        "knowledge_base_mismatch",
        None,
    ),
    CorpusDamaged: (
        500,
        "this knowledge base is damaged; its administrator can look with kvweave kb check",
        "knowledge_base_damaged",
        None,
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
    if isinstance(error, NoSuchAnswer | NoSuchNode | NoSuchConversation):
        return ApiError(404, str(error), code="not_found")
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, NoSuchKnowledgeBase | NotInLibrary):
        return ApiError(404, str(error), code="not_found")
    if isinstance(error, InUse):
        return ApiError(409, str(error), code="in_use", headers={"Retry-After": "5"})
    if isinstance(error, AllInUse):
        return busy(str(error))
    if isinstance(error, EngineClosed):  # nothing is wrong with the request: another server may
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, NoDeviceMemory):
        log.warning("%s (%s)", error, error.__cause__)
        return ApiError(503, str(error), code="no_device_memory", headers={"Retry-After": "5"})
    for kind, (status, words, code, wait_s) in OF_DISKS.items():
        if isinstance(error, kind):
            log.warning("%s", error)  # with the path, which is no business of the client's
            wait = {} if wait_s is None else {"Retry-After": str(wait_s)}
            return ApiError(status, words, code=code, headers=wait)
    if isinstance(error, UpstreamError):  # likewise
        return ApiError(503, str(error), headers={"Retry-After": "1"})
    if isinstance(error, UpstreamRefusal):
        return ApiError(error.status, str(error), param=error.param, code=error.code)
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
