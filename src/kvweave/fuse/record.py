"""What was done for one prompt: the fusion part of an explain record, and a trace of its pass."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, overload

from torch import Tensor

from kvweave.fuse.request import FuseRequest, State
from kvweave.kv.format.keys import ChunkKey
from kvweave.reasons import Reason


class ScoredHits(NamedTuple):
    """Scores that rows were chosen by."""

    positions: Tensor  # [n] on the host, ascending
    scores: Tensor  # [n] wherever they were computed


class LayerTimes(NamedTuple):
    """One layer of a pass, by time.perf_counter."""

    started_s: float  # the pass got there
    laid_s: float  # its stored KV was in place
    ended_s: float  # its rows were computed


@dataclass(frozen=True, slots=True, eq=False)
class PassTrace:
    """One fused prefill."""

    started_s: float  # choosing rows began; by time.perf_counter, as the others
    chosen_s: float  # it was over
    ended_s: float  # rows were computed; of a prepared prompt: its layers were laid
    rows_per_layer: tuple[int, ...]
    layers: tuple[LayerTimes, ...]  # none on a GPU, nor where rows are computed in slices
    scored: tuple[ScoredHits, ...]  # the last word on a token is the last one; none: no scores
    scored_layers: tuple[int, ...]  # whose stored keys or values were looked at


TREE = "tree"  # where exact KV of the knowledge tree comes from
# How an engine computed a fused prompt: its rows in the steps of all requests, in a step of its own
# into which layers stream, or in one that also chooses the rows.
JOINED, STREAMED, WHOLE = WAYS = ("joined", "streamed", "whole")


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One chunk of the prompt."""

    start: int  # position of its first token
    num_tokens: int
    state: State  # EXACT, REUSED (some of it may be recomputed) or COMPUTED
    recomputed: int  # tokens of it that were
    tier: str | None  # where its KV came from
    why: str | None  # why it was computed


@dataclass(frozen=True, slots=True)
class Stages:
    """Where the time to the first token went, in milliseconds. They do not overlap."""

    retrieve: float = 0.0
    load: float = 0.0  # waiting for bytes and decoding them; of what is joined, laying them too
    select: float = 0.0  # probe and scores, without the loading they waited for
    compute: float = 0.0  # the pass, without the loading it waited for


@dataclass(frozen=True, slots=True)
class FuseRecord:
    """How a prompt was prefilled."""

    strategy: str
    ratio: float
    encoding: str
    token_ids: tuple[int, ...]  # of the prompt
    states: Sequence[State]  # one per token; equal to any sequence of the same ones
    chunks: tuple[ChunkRecord, ...]
    work: float  # rows computed ÷ rows of a full prefill, over all layers
    loaded_bytes: dict[str, int]  # by tier
    stages: Stages
    arrived_s: dict[str, float] = field(default_factory=dict)  # by tier: first read to last byte
    why: str | None = None  # why no more was reused, and what to do about it
    left_out: int = 0  # chunks that were found and not sent: the history holds them
    way: str | None = None  # one of WAYS; None: nothing was fused, or by no engine
    loading_since_s: float | None = None  # by time.perf_counter; None: nothing was loaded
    # what was seen on the way; None: nothing was fused
    trace: PassTrace | None = field(default=None, repr=False, compare=False)

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by state."""
        return {str(state): self.states.count(state) for state in State}

    @property
    def loaded_starts(self) -> list[int]:
        """First tokens of the chunks whose stored KV was loaded from a tier."""
        return [each.start for each in self.chunks if each.tier not in (None, TREE)]

    def runs(self) -> list[tuple[State, int, int]]:
        """Neighbouring tokens of one state: (state, start, end)."""
        runs, at = [], 0
        for state, group in groupby(self.states):
            count = len(list(group))
            runs.append((state, at, at + count))
            at += count
        return runs


def exact_chunk_records(lengths: Sequence[int], end: int) -> list[ChunkRecord]:
    """Chunks that came with an exact prefix, the last of them ending at position `end`."""
    start, records = end - sum(lengths), []
    for length in lengths:
        records.append(ChunkRecord(start, length, State.EXACT, 0, TREE, None))
        start += length
    return records


class TokenStates(Sequence[State]):
    """The state of every token of a prompt, spelled out when one is looked at: of a long prompt
    that takes time, and most records are only counted."""

    def __init__(self, request: FuseRequest, recomputed: Sequence[int]) -> None:
        """`recomputed` are positions of reused chunks."""
        self._request = request
        self._recomputed = recomputed

    @cached_property
    def _spelled(self) -> tuple[State, ...]:
        request = self._request
        states = [State.EXACT] * request.preamble_len
        for span in request.spans:
            states += [span.state] * span.num_tokens
        states += [State.COMPUTED] * (len(request.prompt_ids) - request.question_start)
        for position in self._recomputed:
            states[position] = State.RECOMPUTED
        return tuple(states)

    def count(self, state: object) -> int:
        """Tokens of one state. Spells nothing out."""
        request = self._request
        of_chunks = sum(span.num_tokens for span in request.spans if span.state == state)
        others = {
            State.EXACT: request.preamble_len,
            State.REUSED: -len(self._recomputed),
            State.RECOMPUTED: len(self._recomputed),
            State.COMPUTED: len(request.prompt_ids) - request.question_start,
        }
        return of_chunks + sum(number for each, number in others.items() if each == state)

    def __len__(self) -> int:
        return len(self._request.prompt_ids)

    @overload
    def __getitem__(self, at: int) -> State: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[State, ...]: ...
    def __getitem__(self, at: int | slice) -> State | tuple[State, ...]:
        return self._spelled[at]

    def __iter__(self) -> Iterator[State]:
        return iter(self._spelled)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._spelled == tuple(other)

    def __hash__(self) -> int:
        return hash(self._spelled)

    def __repr__(self) -> str:
        return repr(self._spelled)


def chunk_records(
    request: FuseRequest,
    recomputed: Sequence[int],
    tiers: Mapping[ChunkKey, str],
    missing: Mapping[ChunkKey, Reason],
    computed: Mapping[int, str],
) -> tuple[ChunkRecord, ...]:
    """One record per chunk, in prompt order. `recomputed` ascends, in reused chunks alone;
    `computed`: why, by place."""
    records, first = [], 0
    for place, (key, start, end, state) in enumerate(request.spans):
        last = bisect_left(recomputed, end, first)
        is_computed = state is State.COMPUTED
        tier = None if is_computed else tiers.get(key)
        why = _why(key, missing, computed.get(place)) if is_computed else None
        records.append(ChunkRecord(start, end - start, state, last - first, tier, why))
        first = last
    return tuple(records)


def _why(key: ChunkKey, missing: Mapping[ChunkKey, Reason], told: str | None) -> str:
    return str(missing[key]) if key in missing else told or Reason.NOT_ASKED_FOR
