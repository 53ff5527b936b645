"""A lane past the framework for the routes that answer.

To find a route, read a body and write a reply takes FastAPI about as long as a gateway needs to
ask a replica. So a POST to one of these paths goes to its function at once. The functions are
routes of FastAPI's as well, for the schema and for other methods, and a test holds both roads to
the same replies.
"""

import email.message
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.errors import KVWeaveError
from kvweave.serve.access.errors import ApiError, as_api_error, describe, error_response

UNREADABLE = "There was an error parsing the body"  # FastAPI's words


class LaneRoute(NamedTuple):
    """A path that a body is posted to; `path` is also its name in logs and metrics."""

    path: str
    body: type[BaseModel]
    answer: Callable[[Any, Request], Awaitable[object]]  # gives a Response or a BaseModel


class Lane:
    """ASGI middleware, the innermost."""

    def __init__(self, app: ASGIApp, routes: Sequence[LaneRoute]) -> None:
        self._app = app
        self._routes: Mapping[str, LaneRoute] = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_posted = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_posted else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            made = await route.answer(await _read(request, route.body), request)
            reply = made if isinstance(made, Response) else _write_reply(made)
        except (HTTPException, KVWeaveError) as error:  # others are bugs: `RequestLog` has those
            reply = error_response(as_api_error(error))
        await reply(scope, receive, send)


async def _read(request: Request, kind: type[BaseModel]) -> BaseModel:
    """The body. Raises ApiError."""
    document: Any = None
    try:
        document = await request.body()
        if document and is_json(request.headers.get("content-type", "")):
            document = json.loads(document)
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise describe([fault]) from error
    except HTTPException:  # too large, too slow
        raise
    except Exception as error:  # half a character, a thousand brackets, a client that left
        raise ApiError(400, UNREADABLE) from error
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise describe([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None


def _write_reply(made: object) -> Response:
    assert isinstance(made, BaseModel), "a route gives a response or a model of one"
    return Response(made.model_dump_json(by_alias=True), media_type="application/json")


@lru_cache(maxsize=64)  # clients send one of a few
def is_json(content_type: str) -> bool:
    """Whether a Content-Type header says so; read as FastAPI reads it."""
    message = email.message.Message()
    message["content-type"] = content_type
    kind = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (kind == "json" or kind.endswith("+json"))
