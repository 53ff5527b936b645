"""What comes back from an upstream: events of a stream, read into pieces."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvweave.app.answer.answer_stream import Piece, TokenLogprob
from kvweave.errors import UpstreamRefusal
from kvweave.gateway.connections import Exchange, ToldError, UpstreamFailed, error_of, failure_of
from kvweave.text.tool_calls import ToolCall

DATA, DONE = b"data:", b"[DONE]"
MALFORMED = 502  # what a reply that cannot be read is, to those who wait for it
# another replica may do better: it is busy, stopping or broken
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class UpstreamEnd(NamedTuple):
    """How an answer ended, as far as its upstream says."""

    finish_reason: str | None = None
    stopped_because: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    told: Mapping[str, Any] = {}  # what it did for the prompt, see docs/gateway.md


class ReplyReader:
    """Reads one streamed reply: iterate for pieces, then look at `end`."""

    def __init__(self, exchange: Exchange, upstream: str) -> None:
        self._exchange = exchange
        self._upstream = upstream
        self._calls: dict[int, ToolCall] = {}  # as far as they have come, by place
        self.end = UpstreamEnd()

    def __iter__(self) -> Iterator[Piece]:
        """Raises UpstreamFailed; a stream without its end is one that failed."""
        is_done = False
        for event in self._events():
            if event is None:
                is_done = True
                break
            if "error" in event:
                raise self._failure(event["error"])
            try:
                pieces = list(self._pieces(event))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise self._bad_event("an event of another shape than OpenAI's") from error
            if event.get("choices"):
                self._exchange.break_silence()  # comments do not, nor events about nothing
            yield from pieces
        if not is_done:
            raise UpstreamFailed(f"{self._upstream} broke off in the middle of an answer")
        self._exchange.drain()

    def _events(self) -> Iterator[dict[str, Any] | None]:
        """JSON documents; None for the end."""
        for line in self._exchange.lines():
            if not line.startswith(DATA):
                continue  # comments and blank lines
            data = line[len(DATA) :].strip()
            if data == DONE:
                yield None
                return
            try:
                event = json.loads(data)
            except (ValueError, RecursionError):
                event = None
            if not isinstance(event, dict):
                raise self._bad_event("an event that is no JSON object")
            yield event

    def _pieces(self, event: dict[str, Any]) -> Iterator[Piece]:
        self._read_figures(event)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text")
            if text is None:
                text = delta.get("content") or ""
            seen = _logprobs(choice.get("logprobs"))
            if text or seen:
                yield from _as_pieces(str(text), seen)
            for part in delta.get("tool_calls") or ():
                self._add_call(part)
            if (reason := choice.get("finish_reason")) is not None:
                stopped = choice.get("stopped_because")
                self.end = self.end._replace(finish_reason=str(reason), stopped_because=stopped)
                calls, self._calls = self._calls, {}
                yield from (Piece("", call=calls[place]) for place in sorted(calls))

    def _read_figures(self, event: dict[str, Any]) -> None:
        if isinstance(usage := event.get("usage"), dict):
            details = usage.get("prompt_tokens_details") or {}
            self.end = self.end._replace(
                prompt_tokens=_count(usage.get("prompt_tokens")),
                completion_tokens=_count(usage.get("completion_tokens")),
                cached_tokens=_count(details.get("cached_tokens")),
            )
        if isinstance(told := (event.get("kv_transfer_params") or {}).get("kvweave"), dict):
            self.end = self.end._replace(told=told)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        """Calls come in parts: a name, then the text of its arguments bit by bit."""
        place, function = int(part.get("index") or 0), part.get("function") or {}
        known = self._calls.get(place) or ToolCall("", "", "")
        self._calls[place] = ToolCall(
            str(part.get("id") or known.id),
            known.name + str(function.get("name") or ""),
            known.arguments + str(function.get("arguments") or ""),
        )

    def _bad_event(self, what: str) -> UpstreamFailed:
        return UpstreamFailed(f"{self._upstream} sent {what}", MALFORMED)

    def _failure(self, error: Any) -> Exception:
        words = error.get("message", error) if isinstance(error, Mapping) else error
        return UpstreamFailed(f"{self._upstream} failed: {words}")


def check_status(exchange: Exchange, status: int, upstream: str) -> None:
    """Raise UpstreamFailed where another replica may do better, UpstreamRefusal where none will."""
    if status == 200:
        return
    try:
        document = json.loads(exchange.read())
    except (ValueError, RecursionError):
        document = None
    failure = failure_of(upstream, status, document)
    if status in PASSING or status in (401, 403):  # of the gateway, not of this request
        raise failure
    told = error_of(document) or ToldError(str(failure))
    raise UpstreamRefusal(status if 400 <= status < 500 else MALFORMED, *told)


def _as_pieces(text: str, seen: Sequence[TokenLogprob]) -> Iterator[Piece]:
    """One piece; where several tokens came together, one for each with the text at the first."""
    if not seen:
        yield Piece(text)
        return
    for place, token in enumerate(seen):
        yield Piece(text if place == 0 else "", token)


def _logprobs(found: Any) -> list[TokenLogprob]:
    """Read logprobs of chat completions (`content`) or of plain ones (four lists)."""
    if not isinstance(found, dict):
        return []
    if isinstance(content := found.get("content"), list):
        return [
            TokenLogprob(
                str(token["token"]),
                float(token["logprob"]),
                tuple(
                    (str(other["token"]), float(other["logprob"]))
                    for other in token.get("top_logprobs") or ()
                ),
            )
            for token in content
        ]
    tokens, logprobs = found.get("tokens") or [], found.get("token_logprobs") or []
    tops = found.get("top_logprobs") or [{}] * len(tokens)
    return [
        TokenLogprob(
            str(token),
            0.0 if logprob is None else float(logprob),
            tuple(sorted(((str(t), float(lp)) for t, lp in (top or {}).items()), key=_likely)),
        )
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
    ]


def _likely(item: tuple[str, float]) -> float:
    return -item[1]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
