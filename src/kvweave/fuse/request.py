"""One prompt, cut into what is exact, what is reused and what must be computed.

    preamble ‖ chunk ‖ chunk ‖ … ‖ question

Positions count tokens of the whole prompt. Pure data: no tensors, no model.
"""

import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from kvweave.errors import RequestError
from kvweave.kv.format.keys import ChunkKey

MANY = 8  # packing all token ids takes about as long as looking up one of so many


class State(StrEnum):
    """Where the KV of a token came from. What an explain record says of every token."""

    EXACT = "exact"  # what full prefill gives: reused where it was computed, no bit changed
    REUSED = "reused"  # chunk KV as stored, turned to its place or rounded by its codec
    RECOMPUTED = "recomputed"  # stored, but computed again because it matters here
    COMPUTED = "computed"  # question and missing chunks


class PromptChunk(NamedTuple):
    """A chunk of a prompt and the names of its stored KV."""

    token_ids: tuple[int, ...]
    key: ChunkKey  # behind its encoding context
    exact_key: ChunkKey  # isolated; the same as `key` if that is the encoding context


class ChunkSpan(NamedTuple):
    """A chunk in its place."""

    key: ChunkKey
    start: int  # position of its first token
    end: int
    # EXACT (right behind the preamble, as when it was computed: no row of it is chosen, rounded by
    # a codec or not), REUSED (fused) or COMPUTED (missing)
    state: State

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class FuseRequest:
    """A prompt with its chunks classified. `asked` are the positions of the user's own words."""

    prompt_ids: tuple[int, ...]
    preamble_len: int
    spans: tuple[ChunkSpan, ...]
    question_start: int
    asked: range

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Token ids [n] of some positions [n], int64."""
        if MANY * len(positions) < len(self.prompt_ids):
            return np.array([self.prompt_ids[i] for i in positions.tolist()], np.int64)
        return self.ids.take(positions)

    @cached_property
    def ids(self) -> np.ndarray:
        """All token ids [T], int64. Not to be written to."""
        return np.frombuffer(struct.pack(f"={len(self.prompt_ids)}q", *self.prompt_ids), np.int64)

    @cached_property
    def placed(self) -> tuple[ChunkSpan, ...]:
        """Chunks whose KV comes from the store, in prompt order."""
        return tuple(span for span in self.spans if span.state is not State.COMPUTED)

    def as_reused(self, keys: Collection[ChunkKey]) -> "FuseRequest":
        """Return the request as a record tells it: exact chunks that have these keys count as
        reused."""
        spans = (
            span._replace(state=State.REUSED)
            if span.state is State.EXACT and span.key in keys
            else span
            for span in self.spans
        )
        return replace(self, spans=tuple(spans))

    def runs(self, *states: State) -> list[range]:
        """Positions of the chunks of these states, neighbours put together, ascending."""
        found: list[range] = []
        for span in self.spans:
            if span.state in states:
                start = found.pop().start if found and found[-1].stop == span.start else span.start
                found.append(range(start, span.end))
        return found

    @property
    def to_compute(self) -> list[range]:
        """Positions without KV, as runs: missing chunks and the question."""
        question = range(self.question_start, len(self.prompt_ids))
        return [*self.runs(State.COMPUTED), question]

    @property
    def hits(self) -> list[int]:
        """Positions that may be chosen for recomputation: reused and not exact."""
        return [position for run in self.runs(State.REUSED) for position in run]

    @property
    def must_compute(self) -> list[int]:
        """Positions without KV: missing chunks and the question."""
        return [position for run in self.to_compute for position in run]


def classify(
    preamble_ids: Sequence[int],
    chunks: Sequence[tuple[ChunkKey, Sequence[int]]],
    question_ids: Sequence[int],
    *,
    present: Collection[ChunkKey],
    first_is_exact: bool,
    asked: tuple[int, int] | None = None,
) -> FuseRequest:
    """Lay chunks out behind the preamble. `present` are the keys whose KV will come.

    `first_is_exact` says that the KV of the first chunk was computed right behind the preamble,
    where it stands now; behind any other encoding context it is reused like the rest. `asked` is
    the part [start, end) of the question that the user wrote; all of it by default.
    """
    assert all(tokens for _, tokens in chunks), "a chunk has tokens"
    ids = list(preamble_ids)
    spans = []
    for key, tokens in chunks:
        start = len(ids)
        ids += tokens
        if key not in present:
            state = State.COMPUTED
        elif start == len(preamble_ids) and first_is_exact:
            state = State.EXACT
        else:
            state = State.REUSED
        spans.append(ChunkSpan(key, start, len(ids), state))
    question_start = len(ids)
    ids += question_ids
    first, last = asked or (0, len(question_ids))
    assert 0 <= first < last <= len(question_ids), "the user's words lie inside the question"
    words = range(question_start + first, question_start + last)
    return FuseRequest(tuple(ids), len(preamble_ids), tuple(spans), question_start, words)


def bounds_of(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """[start, end) of parts of these lengths, one behind the other."""
    return list(pairwise(accumulate(lengths, initial=0)))


def check_ratio(ratio: float) -> None:
    """Raise RequestError unless it is a share."""
    if not 0.0 <= ratio <= 1.0:
        raise RequestError(f"ratio {ratio:g} is no share; give one from 0 to 1, such as 0.15")


def budget(num_hits: int, ratio: float) -> int:
    """Rows that a ratio of `num_hits` allows: none at 0, at least one above it."""
    if num_hits == 0 or ratio <= 0.0:
        return 0
    return min(num_hits, max(1, math.floor(ratio * num_hits + 1e-9)))
