"""All there is to tell of one answer: its prompt token by token, layer by layer, and the time line.

Made of what an answer's trace refers to, when somebody asks: copies, texts and sums are made here
and nowhere before.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.app.answer.answer_stream import Answer
from kvweave.app.answer.notes import AnswerTrace
from kvweave.corpus.chunker import make_chunk_id, summary_of
from kvweave.errors import RequestError
from kvweave.fuse.record import FuseRecord, PassTrace
from kvweave.fuse.request import State
from kvweave.text.detokenizer import texts_of
from kvweave.text.prompt import Prompt
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId

LETTERS = {State.EXACT: "e", State.REUSED: "r", State.RECOMPUTED: "n", State.COMPUTED: "c"}
DIGITS = 6  # of a score: more tells nothing


class PartSpan(NamedTuple):
    """A run of the prompt's tokens, [start, end)."""

    name: str  # preamble, history, chunk or question
    start: int
    end: int
    chunk: ChunkId | None = None  # of a chunk, and of the history where it is a source
    summary: str = ""  # of a chunk: its first sentences


class LayerDetail(NamedTuple):
    """One layer of a fused pass. Times are milliseconds since the request arrived; None where they
    are not measured: on a GPU, and where rows were computed beside other requests'."""

    layer: int
    started_ms: float | None  # the pass got there
    loaded_ms: float | None  # its stored KV was in place
    ended_ms: float | None  # its rows were computed
    rows: int  # that ran through it
    left_rows: int  # of them, those that went no further


class SelectionDetail(NamedTuple):
    """How rows to recompute were chosen."""

    selector: str  # the strategy's name
    ratio: float
    layers: tuple[int, ...]  # whose stored keys or values were looked at


class TimelineEntry(NamedTuple):
    """Something that took time, in milliseconds since the request arrived."""

    name: str
    lane: str  # queue, search, guess, plan, load, probe, recompute, compute or decode
    start_ms: float
    end_ms: float
    detail: str


@dataclass(frozen=True, slots=True)
class AnswerDetails:
    """All there is to tell of one kept answer."""

    texts: list[str]  # what each token of the prompt adds; control tokens by their names
    states: str  # a letter for each token, see LETTERS
    scores: list[float | None]  # of each token that was up for recomputation; None: it was not
    parts: list[PartSpan]
    layers: list[LayerDetail]  # of a fused pass; else none
    selection: SelectionDetail | None  # None: nothing was to choose
    timeline: list[TimelineEntry]  # by start


def details_of(answer: Answer, tokenizer: Tokenizer, queue_s: float = 0.0) -> AnswerDetails:
    """All of one answer that waited `queue_s` before it was begun. Raises RequestError for one that
    was not made by a Weave. May take a tenth of a second for a long prompt."""
    trace, record = answer.trace, answer.explain
    if trace is None:
        raise RequestError("nothing is known of how this answer was made")
    ids = trace.prompt.token_ids
    arrived_s = trace.called_s - queue_s
    fused = None if record is None else record.trace
    states = LETTERS[State.COMPUTED] * len(ids)
    if record is not None:
        states = "".join(LETTERS[state] for state in record.states)
    selection = None
    if record is not None and fused is not None and fused.scored:
        selection = SelectionDetail(record.strategy, record.ratio, fused.scored_layers)
    texts = _texts(tokenizer, ids)
    return AnswerDetails(
        texts=texts,
        states=states,
        scores=_scores(len(ids), fused),
        parts=list(_parts(trace.prompt, {source.chunk for source in answer.sources}, texts)),
        layers=[] if fused is None else list(_layers(fused, arrived_s)),
        selection=selection,
        timeline=sorted(_timeline(answer, trace, queue_s), key=lambda entry: entry.start_ms),
    )


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    special = tokenizer.special_ids
    return [
        tokenizer.decode([token_id]) if token_id in special else text
        for token_id, text in zip(ids, texts_of(tokenizer, ids), strict=True)
    ]


def _scores(num_tokens: int, fused: PassTrace | None) -> list[float | None]:
    scores: list[float | None] = [None] * num_tokens
    for scored in () if fused is None else fused.scored:
        found = scored.scores.float().cpu().tolist()
        for position, score in zip(scored.positions.tolist(), found, strict=True):
            scores[position] = float(f"{score:.{DIGITS}g}") if math.isfinite(score) else None
    return scores


def _parts(prompt: Prompt, sources: set[ChunkId], texts: Sequence[str]) -> Iterator[PartSpan]:
    at = len(prompt.preamble)
    if at:
        yield PartSpan("preamble", 0, at)
    for ids in prompt.history:
        chunk = make_chunk_id(ids)
        yield PartSpan("history", at, at + len(ids), chunk if chunk in sources else None)
        at += len(ids)
    for ids in prompt.chunks:
        end = at + len(ids)
        summary = summary_of("".join(texts[at:end]))
        yield PartSpan("chunk", at, end, make_chunk_id(ids), summary)
        at = end
    yield PartSpan("question", at, at + len(prompt.question))


def _layers(fused: PassTrace, arrived_s: float) -> Iterator[LayerDetail]:
    counts = fused.rows_per_layer
    for layer, rows in enumerate(counts):
        left = rows - counts[layer + 1] if layer + 1 < len(counts) else 0
        times: tuple[float | None, float | None, float | None] = (None, None, None)
        if fused.layers:
            started_s, laid_s, ended_s = fused.layers[layer]
            times = (
                _ms(started_s, arrived_s),
                _ms(laid_s, arrived_s),
                _ms(ended_s, arrived_s),
            )
        yield LayerDetail(layer, *times, rows, left)


def _timeline(answer: Answer, trace: AnswerTrace, queue_s: float) -> Iterator[TimelineEntry]:
    arrived_s, line = trace.called_s - queue_s, trace.timeline

    def entry(
        name: str, lane: str, start_s: float, end_s: float, detail: str = ""
    ) -> TimelineEntry:
        return TimelineEntry(name, lane, _ms(start_s, arrived_s), _ms(end_s, arrived_s), detail)

    yield entry("queue", "queue", arrived_s, trace.called_s)
    for event in trace.events:
        yield entry(event.name, event.lane, event.start_s, event.end_s, event.detail)
    computing_s = trace.called_s
    if line is not None:
        computing_s = line.submitted_s if line.admitted_s is None else line.admitted_s
        yield entry("wait for the engine", "queue", line.submitted_s, computing_s)
    record = answer.explain
    beside = "" if line is None or not line.beside_s else f", {line.beside_s:.2f} s for others"
    if record is None or record.trace is None:
        computed = answer.prompt_tokens if record is None else record.counts["computed"]
        detail = f"{computed} tokens computed{beside}"
        yield entry("prefill", "compute", computing_s, trace.first_s, detail)
    else:
        for name, lane, start_s, end_s, detail in _list_fused_steps(
            record, record.trace, trace.first_s
        ):
            yield entry(name, lane, start_s, end_s, detail + beside * (name == "recompute"))
    made = f"{answer.completion_tokens} tokens"
    if answer.copies is not None and answer.copies.copied:
        made += f", {answer.copies.copied} copied from what was read"
    yield entry("first token", "decode", trace.first_s, trace.first_s)
    yield entry("decode", "decode", trace.first_s, trace.ended_s, made)


def _list_fused_steps(
    record: FuseRecord, fused: PassTrace, first_s: float
) -> Iterator[tuple[str, str, float, float, str]]:
    """Name, lane, start, end and detail of what a fused prefill did."""
    since_s = fused.started_s if record.loading_since_s is None else record.loading_since_s
    for tier, num_bytes in record.loaded_bytes.items():
        end_s = since_s + record.arrived_s.get(tier, 0.0)
        yield tier, "load", since_s, end_s, f"{num_bytes} bytes"
    if fused.scored:
        layers = ", ".join(map(str, fused.scored_layers)) or "none"
        yield "probe", "probe", fused.started_s, fused.chosen_s, f"looks at layers {layers}"
    rows = f"{record.counts['recomputed']} recomputed, {record.counts['computed']} computed"
    if fused.layers or record.way != "joined":
        yield "recompute", "recompute", fused.chosen_s, fused.ended_s, rows
    else:  # its layers were laid first, its rows ran in the steps of others
        yield "lay", "load", fused.chosen_s, fused.ended_s, ""
        yield "recompute", "recompute", fused.ended_s, first_s, rows


def _ms(at_s: float, arrived_s: float) -> float:
    return round((at_s - arrived_s) * 1e3, 3)
