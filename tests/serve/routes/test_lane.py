"""Two roads, one reply: past FastAPI and through it."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.serve.access.limits import Limits
from kvweave.serve.http import build_http
from kvweave.serve.routes.context import make_context
from kvweave.serve.routes.lane import Lane, is_json
from worlds.serving import user

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
HELLO: dict[str, Any] = {"messages": user("hello"), "max_tokens": 1, "temperature": 0}
PLAIN: dict[str, Any] = {"prompt": "hello", "max_tokens": 1, "temperature": 0}
# of each reply: who it is, and what was there already
OWN = re.compile(rb'"(?:id|created|cached_tokens|fate|tier)":\s*(?:"[^"]*"|\d+|null)')


class Road:
    """What comes back on one of them."""

    def __init__(self, weave: Weave, *, with_lane: bool) -> None:
        self._weave = weave
        self._with_lane = with_lane

    def ask(self, method: str, path: str, **how: Any) -> tuple[int, dict[str, str], bytes]:
        return asyncio.run(self._ask(method, path, how))

    async def _ask(
        self, method: str, path: str, how: dict[str, Any]
    ) -> tuple[int, dict[str, str], bytes]:
        context = make_context(self._weave, Limits(body_bytes=10_000))
        http = build_http(context)
        if not self._with_lane:
            http.user_middleware = [each for each in http.user_middleware if each.cls is not Lane]
        transport = httpx.ASGITransport(http, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.request(method, path, timeout=60, **how)
        await context.close()
        headers = dict(reply.headers)
        del headers["x-request-id"]
        assert int(headers.pop("content-length", len(reply.content))) == len(reply.content)
        counted = context.metrics.page().decode().splitlines()
        headers["counted as"] = next(line for line in counted if "requests_total{" in line)
        return reply.status_code, headers, OWN.sub(b"", reply.content)


def sent(document: Any, **headers: str) -> dict[str, Any]:
    return {"content": json.dumps(document), "headers": {**JSON, **headers}}


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("POST", CHAT, sent(HELLO)),
        ("POST", CHAT, sent(HELLO | {"n": 2})),
        ("POST", CHAT, sent(HELLO | {"stream": True, "stream_options": {"include_usage": True}})),
        ("POST", CHAT, sent(HELLO | {"documents": ["A note."], "explain": False})),
        ("POST", COMPLETIONS, sent(PLAIN)),
        ("POST", COMPLETIONS, sent(PLAIN | {"stream": True})),
        ("POST", CHAT, sent(HELLO, **{"Content-Type": "application/problem+json; charset=utf-8"})),
        ("POST", CHAT, sent(HELLO, **{"Content-Type": "text/plain"})),
        ("POST", CHAT, sent(HELLO, **{"Content-Type": "application"})),
        ("POST", CHAT, {"content": json.dumps(HELLO)}),
        ("POST", CHAT, {"headers": JSON}),
        ("POST", CHAT, {}),
        ("POST", CHAT, sent([HELLO])),
        ("POST", CHAT, sent(None)),
        ("POST", CHAT, sent("hello")),
        ("POST", CHAT, sent({})),
        ("POST", CHAT, sent(HELLO | {"no_such": 1, "max_tokens": "5"})),
        ("POST", CHAT, sent(HELLO | {"messages": [{"role": "robot", "content": 5}]})),
        ("POST", CHAT, sent(HELLO | {"messages": user("word " * 1500)})),
        ("POST", CHAT, sent(HELLO | {"kb": "nowhere"})),
        ("POST", CHAT, sent(HELLO | {"model": "other"})),
        ("POST", CHAT, sent({str(n): n for n in range(100)})),
        ("POST", CHAT, {"content": b'{"messages": [', "headers": JSON}),
        ("POST", CHAT, {"content": b"\xff\xfe{", "headers": JSON}),
        ("POST", CHAT, {"content": b'"\xff"', "headers": JSON}),
        ("POST", CHAT, {"content": b'{"max_tokens": NaN}', "headers": JSON}),
        ("POST", CHAT, {"content": b"[" * 5_000, "headers": JSON}),
        ("POST", CHAT, {"content": b" " * 20_000, "headers": JSON}),
        ("POST", f"{CHAT}?pretty=1", sent(HELLO)),
        ("POST", f"{CHAT}/", sent(HELLO)),
        ("GET", CHAT, {}),
        ("PUT", COMPLETIONS, sent(PLAIN)),
        ("OPTIONS", CHAT, {}),
    ],
)
def test_the_lane_replies_as_the_framework_does(
    weave: Weave, method: str, path: str, how: dict[str, Any]
) -> None:
    roads = [Road(weave, with_lane=with_lane) for with_lane in (True, False)]
    ours, theirs = (road.ask(method, path, **how) for road in roads)
    assert ours == theirs


def test_a_bug_is_a_500_in_the_usual_shape(weave: Weave, monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(type(weave), "chat", chat)
    roads = [Road(weave, with_lane=with_lane) for with_lane in (True, False)]
    ours, theirs = (road.ask("POST", CHAT, **sent(HELLO)) for road in roads)
    assert ours == theirs
    assert ours[0] == 500
    assert b"secret" not in ours[2]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("application/jsonx", False),
        ("text/json", False),
        ("", False),
        ("json", False),
    ],
)
def test_what_is_json_says_so(header: str, expected: bool) -> None:
    assert is_json(header) is expected
