"""What a request asks of the connector: `kv_transfer_params.kvweave`, checked in one place.

    preamble ‖ (gap) ‖ chunk ‖ (gap) ‖ chunk ‖ … ‖ question

Spans are half-open and count tokens of the prompt. What lies between chunks and is none of them is
a gap: computed, as the question is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvweave.errors import RequestError
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy, chosen_ratio
from kvweave.kv.format.keys import make_tag

NAME = "kvweave"  # the one key of kv_transfer_params that is ours
KEYS = ("chunks", "preamble", "reuse", "ratio", "bound", "asked", "tenant", "missing", "forget")
AUTO = "auto"  # the strategy and ratio that calibration lets through
WITH_RATIO = "weave"  # what a ratio alone means, as in kvweave's own server
MISSING = ("later", "encode")
MOST_CHUNKS = 4096  # of a prompt, and to be forgotten at once


class Part(NamedTuple):
    """A run of tokens between preamble and question."""

    start: int
    end: int
    is_chunk: bool


class Defaults(NamedTuple):
    """What holds where a request says nothing."""

    reuse: str
    ratio: float | None
    bound: float  # nats per token, of `auto`


@dataclass(frozen=True, slots=True)
class ReuseRequest:
    """A request's spans and how they shall be reused. `auto` is replaced by a strategy before
    anything is ordered."""

    preamble: int  # tokens in front, which chunk KV is computed behind
    chunks: tuple[tuple[int, int], ...]  # [start, end), ascending
    reuse: str
    ratio: float
    asked: tuple[int, int] | None = None  # the user's own words, behind the chunks
    tenant: str = ""  # chunk KV is shared with those alone who say the same
    is_encoded_first: bool = False  # what is not stored is encoded before this request is fused
    bound: float | None = None  # nats per token, as long as `reuse` is auto
    close_call: float = 0.0  # nats; a first token that leads by less is computed exactly

    @property
    def question_start(self) -> int:
        return self.chunks[-1][1]

    def parts(self) -> list[Part]:
        """Chunks and gaps from the preamble to the question, without a hole."""
        parts, at = [], self.preamble
        for start, end in self.chunks:
            if start > at:
                parts.append(Part(at, start, False))
            parts.append(Part(start, end, True))
            at = end
        return parts

    def stands_in_front(self, part: Part) -> bool:
        """Whether nothing is between the preamble and a chunk: there its isolated KV is exact."""
        return part.is_chunk and part.start == self.preamble

    def strategy(self, num_layers: int) -> Strategy:
        return open_strategy(self.reuse, ModelFacts(num_layers))


def parse_reuse_request(
    params: Mapping[str, Any], num_tokens: int, defaults: Defaults, num_layers: int
) -> ReuseRequest | None:
    """Parse a request's parameters. None: nothing is asked of us. Raises RequestError, or
    ConfigError where a strategy wants what this model has not."""
    given = params.get(NAME)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"{NAME} must be an object with chunks, got {type(given).__name__}")
    if unknown := [name for name in given if name not in KEYS]:
        raise RequestError(f"{NAME} has no {unknown[0]!r}; known: {', '.join(KEYS)}")
    chunks = _chunk_spans(given.get("chunks"))
    preamble = _number(given.get("preamble", chunks[0][0]), "preamble")
    if preamble > chunks[0][0]:
        raise RequestError(f"preamble {preamble} reaches into the first chunk at {chunks[0][0]}")
    if chunks[-1][1] >= num_tokens:
        raise RequestError(
            f"chunks end at {chunks[-1][1]} of {num_tokens} tokens; a question stands behind them"
        )
    reuse, ratio = _reuse(given, defaults)
    bound = _bound(given, defaults) if reuse == AUTO else None
    tenant, missing = given.get("tenant", ""), given.get("missing", "later")
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a text, got {tenant!r}")
    if missing not in MISSING:
        raise RequestError(f"missing must be one of {', '.join(MISSING)}; got {missing!r}")
    return ReuseRequest(
        preamble,
        chunks,
        reuse,
        0.0 if reuse == AUTO else _checked_ratio(reuse, ratio, num_layers),
        _asked_span(given.get("asked"), chunks[-1][1], num_tokens),
        tenant,
        missing == "encode",
        bound,
    )


def parse_forget(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids of chunks that are no more, if a request names some. Raises RequestError."""
    given = params.get(NAME)
    if not isinstance(given, Mapping) or "forget" not in given:
        return ()
    ids = given["forget"]
    if others := [name for name in given if name not in ("forget", "tenant")]:
        raise RequestError(f"forget stands alone; send {others[0]!r} with another request")
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not 0 < len(ids) <= MOST_CHUNKS:
        raise RequestError(f"forget must be a list of 1 to {MOST_CHUNKS} chunk ids")
    if unfit := [each for each in ids if not isinstance(each, str) or make_tag(each) is None]:
        raise RequestError(f"forget: {str(unfit[0])[:80]!r} is no id of a chunk")
    return tuple(ids)


def _reuse(given: Mapping[str, Any], defaults: Defaults) -> tuple[str, float | None]:
    """The strategy by name, and its ratio; None: the strategy's own."""
    reuse, ratio = given.get("reuse", defaults.reuse), given.get("ratio")
    if not isinstance(reuse, str):
        raise RequestError(f"reuse must be the name of a strategy, got {reuse!r}")
    if ratio is None:
        return reuse, defaults.ratio if reuse == defaults.reuse else None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise RequestError(f"ratio must be a number from 0 to 1, got {ratio!r}")
    if given.get("reuse") == AUTO:
        raise RequestError("reuse 'auto' chooses the ratio itself; leave it out")
    return WITH_RATIO if reuse == AUTO else reuse, ratio


def _checked_ratio(reuse: str, ratio: float | None, num_layers: int) -> float:
    """The ratio of a strategy that can be had here."""
    strategy = open_strategy(reuse, ModelFacts(num_layers))
    if strategy.needs(num_layers).extras:
        raise RequestError(
            f"reuse {reuse!r} needs more beside chunk KV than vLLM makes; take weave"
        )
    return chosen_ratio(strategy, ratio)


def _bound(given: Mapping[str, Any], defaults: Defaults) -> float:
    bound = given.get("bound", defaults.bound)
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not is_number or not 0.0 <= bound < math.inf:
        raise RequestError(f"bound must be a number of nats per token from 0 on, got {bound!r}")
    return float(bound)


def _chunk_spans(given: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise RequestError("chunks must be a list of [start, end) token spans")
    if len(given) > MOST_CHUNKS:
        raise RequestError(f"{len(given)} chunks are more than {MOST_CHUNKS}; send fewer")
    spans, at = [], 0
    for span in given:
        if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
            raise RequestError(f"a chunk is a [start, end) pair of token places, got {span!r}")
        start, end = (_number(place, "chunks") for place in span)
        if start < at or end <= start:
            raise RequestError(f"chunk [{start}, {end}) is empty, or does not stand behind {at}")
        spans.append((start, end))
        at = end
    return tuple(spans)


def _asked_span(given: Any, question_start: int, num_tokens: int) -> tuple[int, int] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise RequestError(f"asked must be a [start, end) pair of token places, got {given!r}")
    start, end = (_number(place, "asked") for place in given)
    if not question_start <= start < end <= num_tokens:
        raise RequestError(f"asked [{start}, {end}) is not behind the chunks and in the prompt")
    return start, end


def _number(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"{name}: {value!r} is no place in a prompt")
    return value
