"""One request over HTTP, streamed, and what the client saw of it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

Event = Mapping[str, Any]
SOURCES = ("exact", "fused", "computed")  # where the KV of a prompt's tokens is from


class Reply(NamedTuple):
    """An answer as its client saw it."""

    ttft_ms: float  # from sending the request to the first text
    total_ms: float
    text: str
    prompt_tokens: int
    explain: Event | None = None  # kvweave's own record, where it was asked for
    answer_tokens: int = 0

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by where their KV is from; those of fused spans, recomputed or not, are
        fused."""
        if self.explain is None:
            return {}
        counts = self.explain["tokens"]
        fused = counts["reused"] + counts["recomputed"]
        return {"exact": counts["exact"], "fused": fused, "computed": counts["computed"]}

    @property
    def decoded_per_s(self) -> float:
        """Tokens behind the first one, a second."""
        return (self.answer_tokens - 1) / max(1e-9, self.total_ms - self.ttft_ms) * 1e3


class Refused(Exception):
    """A server said no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def ask_chat(http: httpx.Client, body: Mapping[str, Any]) -> Reply:
    """POST /v1/chat/completions, with an explain block. Raises Refused."""
    return _stream(http, "/v1/chat/completions", {**body, "explain": True}, _chat_text)


def ask_ids(
    http: httpx.Client, ids: Sequence[int], max_tokens: int, more: Mapping[str, Any]
) -> Reply:
    """POST /v1/completions of a prompt that is tokens already. Raises Refused."""
    body = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, **more}
    return _stream(http, "/v1/completions", body, _completion_text)


def _stream(
    http: httpx.Client, path: str, body: Mapping[str, Any], text_of: Callable[[Event], str]
) -> Reply:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(asked).encode()  # not timed
    headers = {"Content-Type": "application/json"}
    texts: list[str] = []
    first_s: float | None = None
    usage, explain, is_done = {"prompt_tokens": 0}, None, False
    began_s = time.perf_counter()
    with http.stream("POST", path, content=content, headers=headers) as reply:
        if reply.status_code != 200:
            reply.read()
            raise Refused(reply.status_code, reply.text[:400])
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise Refused(500, json.dumps(event["error"])[:400])
            text = text_of(event)
            if text and first_s is None:
                first_s = time.perf_counter()
            texts.append(text)
            usage = event.get("usage") or usage
            explain = event.get("explain") or explain
    ended_s = time.perf_counter()
    if not is_done:
        raise Refused(500, "the stream broke off")
    ttft_s = (ended_s if first_s is None else first_s) - began_s  # an answer may be empty
    total_ms = (ended_s - began_s) * 1e3
    counts = usage["prompt_tokens"], explain, usage.get("completion_tokens", 0)
    return Reply(ttft_s * 1e3, total_ms, "".join(texts), *counts)


def _chat_text(event: Event) -> str:
    return "".join(c["delta"].get("content") or "" for c in event["choices"])


def _completion_text(event: Event) -> str:
    return "".join(c["text"] or "" for c in event["choices"])
