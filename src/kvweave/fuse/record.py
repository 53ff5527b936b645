"""What was done for one prompt: the fusion part of an explain record."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvweave.fuse.request import FuseRequest, Span, State
from kvweave.kv.keys import ChunkKey
from kvweave.kv.residency import Miss

TREE = "tree"  # where exact KV of the knowledge tree comes from


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
    states: tuple[State, ...]  # one per token
    chunks: tuple[ChunkRecord, ...]
    work: float  # rows computed ÷ rows of a full prefill, over all layers
    loaded_bytes: dict[str, int]  # by tier
    stages: Stages
    arrived_s: dict[str, float] = field(default_factory=dict)  # by tier: first read to last byte
    why: str | None = None  # why nothing was reused, where the caller left that open
    way: str | None = None  # how an engine computed a fused prompt; see engine/loading.py

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by state."""
        found = Counter(self.states)
        return {str(state): found.get(state, 0) for state in State}

    def runs(self) -> list[tuple[State, int, int]]:
        """Neighbouring tokens of one state: (state, start, end)."""
        runs, at = [], 0
        for state, group in groupby(self.states):
            count = len(list(group))
            runs.append((state, at, at + count))
            at += count
        return runs

    def summary(self) -> str:
        """One line for people."""
        counts, total = self.counts, len(self.states)
        parts = [f"{counts[s]:,} {s}" for s in map(str, State) if counts[s]]
        return f"{self.strategy} {self.ratio:g}: {total:,} tokens = {' + '.join(parts)}"


def exact_chunk_records(lengths: Sequence[int], end: int) -> list[ChunkRecord]:
    """Chunks that came with an exact prefix, the last of them ending at position `end`."""
    start, records = end - sum(lengths), []
    for length in lengths:
        records.append(ChunkRecord(start, length, State.EXACT, 0, TREE, None))
        start += length
    return records


def token_states(request: FuseRequest, recomputed: Sequence[int]) -> tuple[State, ...]:
    """The state of every token of a prompt."""
    states = [State.EXACT] * request.preamble_len
    for span in request.spans:
        states += [span.state] * span.num_tokens
    states += [State.COMPUTED] * (len(request.prompt_ids) - request.question_start)
    for position in recomputed:
        states[position] = State.RECOMPUTED
    return tuple(states)


def chunk_records(
    request: FuseRequest,
    recomputed: Sequence[int],
    tiers: Mapping[ChunkKey, str],
    missing: Mapping[ChunkKey, Miss],
    computed: Mapping[int, str],
) -> tuple[ChunkRecord, ...]:
    """One record per chunk, in prompt order. `recomputed` ascends; `computed`: why, by place."""
    return tuple(
        ChunkRecord(
            span.start,
            span.num_tokens,
            span.state,
            bisect_left(recomputed, span.end) - bisect_left(recomputed, span.start),
            tiers.get(span.key) if span.state is not State.COMPUTED else None,
            _why(span, missing, computed.get(place)),
        )
        for place, span in enumerate(request.spans)
    )


def _why(span: Span, missing: Mapping[ChunkKey, Miss], told: str | None) -> str | None:
    if span.state is not State.COMPUTED:
        return None
    return str(missing[span.key]) if span.key in missing else told or "not asked for"
