"""One line per request, with an id that the client sees too, as text or as JSON."""

import json
import logging
import math
import re
import secrets
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.access.errors import as_api_error, error_response
from kvweave.serve.wire.explain import strategy_of

log = logging.getLogger("kvweave.requests")

Format = Literal["human", "json"]
Level = Literal["debug", "info", "warning", "error"]
# asked every few seconds: written at debug alone, unless the answer is another than before
PROBES = ("/healthz", "/readyz", "/metrics")

HEADER = b"x-request-id"
SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="")


class RequestLog:
    """ASGI middleware, the outermost: gives each request an id, logs it and counts it.

    A client's own x-request-id is kept if it is sane, and sent back either way.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[str, int], None], slow_s: float | None = None
    ) -> None:
        """`count` hears route and status of every request. One that takes longer than `slow_s` is a
        warning, which is written whether requests are logged or not; None: none is."""
        self._app = app
        self._count = count
        self._probed = dict.fromkeys(PROBES, 200)  # the last status of each
        self._slow_ms = math.inf if slow_s is None else slow_s * 1e3

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"")
        name = given.decode() if SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        token = request_id.set(name)
        started_s, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:  # a bug: told here, where the log still knows the request
            if status:
                raise  # half a reply is out; the server cuts the connection
            await error_response(as_api_error(error))(scope, receive, sending)
        finally:
            self._say(scope, status, (time.perf_counter() - started_s) * 1e3)
            request_id.reset(token)

    def _say(self, scope: Scope, status: int, ms: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")  # not the path: that is unbounded
        self._count(route, status)
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(ms, 1),
            "tenant": tenant_of(scope),
            **_of_answer(scope),
        }
        is_known = self._probed.get(scope["path"]) == status
        if scope["path"] in PROBES:
            self._probed[scope["path"]] = status
        usual = logging.DEBUG if is_known else logging.INFO
        level, words = (usual, "") if ms <= self._slow_ms else (logging.WARNING, "slow: ")
        log.log(level, "%s%s %s", words, scope["method"], scope["path"], extra={"fields": fields})


def _of_answer(scope: Scope) -> dict[str, Any]:
    """What is known of the first answer to a request, where there was one."""
    answer = next((job.answer for job in scope.get("state", {}).get("jobs", ())), None)
    if answer is None:
        return {}
    return {
        "ttft_ms": round(answer.ttft_ms, 1),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "strategy": strategy_of(answer),
    }


class JsonLines(logging.Formatter):
    """A record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class HumanLines(logging.Formatter):
    """Time, level, words; of a request also status, milliseconds and id."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} "
        line += record.getMessage().encode("unicode_escape").decode()
        fields = getattr(record, "fields", None)
        if fields:
            line += f" {fields['status']} {fields['ms']:.0f} ms"
        if fields and "ttft_ms" in fields:
            tokens = f"{fields['prompt_tokens']}+{fields['completion_tokens']} tokens"
            line += f", first {fields['ttft_ms']:.0f} ms, {tokens}, {fields['strategy']}"
        if request_id.get():
            line += f" [{request_id.get()}]"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure_logs(form: Format | None, level: Level | None = None) -> None:
    """Write logs to stderr. A `level` says from which on; None: warnings, and with a `form`
    requests as well. Without a form lines are for people."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else HumanLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    usual = "warning" if form is None else "info"
    logging.getLogger("kvweave").setLevel((level or usual).upper())
