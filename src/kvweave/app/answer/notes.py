"""What is known of an answer: the chunks it was given to answer from and what became of each, and
what was done for its prompt, on its way from those who prefill it to its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from kvweave.app.answer.guessing import SpeculationLog, SpeculationRecord
from kvweave.app.audit.audit_log import AuditNote
from kvweave.corpus.chunker import make_chunk_id, section_title
from kvweave.engine.request import RequestTimeline, Ticket
from kvweave.fuse.record import FuseRecord
from kvweave.plan.plan import Decision
from kvweave.text.prompt import Document, Prompt, chunk_text
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId, DocumentId, Hit

SEARCH, GUESS = "search", "guess"  # lanes of a timeline
COMPUTED = "computed"


class RetrievedChunk(NamedTuple):
    """A chunk that was found for a question, or that its caller brought."""

    token_ids: tuple[int, ...]
    title: str
    text: str  # as it stands in the prompt
    id: ChunkId | None = None  # where it is known; `make_chunk_id` names any
    score: float | None = None  # of the search; None: brought
    document: DocumentId | None = None  # of the knowledge base; None: brought

    @classmethod
    def from_hit(cls, hit: Hit) -> "RetrievedChunk":
        chunk = hit.chunk
        title = section_title(chunk)
        return cls(chunk.token_ids, title, chunk.text, chunk.id, hit.score, hit.document)

    @classmethod
    def from_document(cls, document: Document, tokenizer: Tokenizer) -> "RetrievedChunk":
        text = chunk_text(document)
        return cls(tuple(tokenizer.encode_text(text)), document.title.strip(), text)


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """One of the chunks that an answer was made from."""

    cited_as: int  # from 1, in the order that the search gave, or the caller
    document: DocumentId | None  # None: the caller brought it
    title: str
    chunk: ChunkId
    score: float | None  # of the search; None: the caller brought it
    # its tokens in the prompt, [start, end); None: the prompt was tokenised elsewhere
    span: tuple[int, int] | None
    tier: str | None  # where its KV came from; None: it was computed, or elsewhere
    # exact, reused (some of it may be recomputed) or computed; None: an upstream knows
    fate: str | None

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        score = None if self.score is None else round(self.score, 6)
        span = None if self.span is None else list(self.span)
        return {**asdict(self), "span": span, "score": score}


def sources_of(
    retrieved: Sequence[RetrievedChunk], prompt: Prompt, record: FuseRecord | None
) -> tuple[AnswerSource, ...]:
    """Where the chunks of a question stand in its prompt, those that the history holds too, and how
    `record` says they were prefilled (None: computed)."""
    parts = (*prompt.history, *prompt.chunks)
    starts = accumulate((len(ids) for ids in parts), initial=len(prompt.preamble))
    places: dict[tuple[int, ...], list[int]] = {}
    for ids, start in zip(parts, starts, strict=False):  # one start more: where the question begins
        places.setdefault(ids, []).append(start)
    records = {} if record is None else {chunk.start: chunk for chunk in record.chunks}
    sources = []
    for number, chunk in enumerate(retrieved, 1):
        free = places.get(chunk.token_ids, [])
        assert free, "every chunk that was retrieved is in the prompt"
        start = free.pop(0) if len(free) > 1 else free[0]  # brought twice, it stands there twice
        chunk_record = records.get(start)
        tier = None if chunk_record is None else chunk_record.tier
        fate = COMPUTED if chunk_record is None else str(chunk_record.state)
        span = start, start + len(chunk.token_ids)
        sources.append(_make_source(number, chunk, span, tier, fate))
    return tuple(sources)


def routed_sources(
    retrieved: Sequence[RetrievedChunk], spans: Mapping[ChunkId, tuple[int, int]]
) -> tuple[AnswerSource, ...]:
    """Sources of an answer that is computed elsewhere, given where its chunks stand, as far as that
    is known. What becomes of each is not known."""
    ids = [chunk.id or make_chunk_id(chunk.token_ids) for chunk in retrieved]
    return tuple(
        _make_source(number, chunk, spans.get(name), None, None)
        for number, (chunk, name) in enumerate(zip(retrieved, ids, strict=True), 1)
    )


def _make_source(
    number: int,
    chunk: RetrievedChunk,
    span: tuple[int, int] | None,
    tier: str | None,
    fate: str | None,
) -> AnswerSource:
    return AnswerSource(
        cited_as=number,
        document=chunk.document,
        title=chunk.title,
        chunk=chunk.id or make_chunk_id(chunk.token_ids),
        score=chunk.score,
        span=span,
        tier=tier,
        fate=fate,
    )


class AnswerEvent(NamedTuple):
    """Something that took time. By time.perf_counter."""

    name: str
    lane: str  # side by side with what it happened: search, guess, plan
    start_s: float
    end_s: float
    detail: str = ""


class AnswerWait(NamedTuple):
    """What an answer waits for that has no token yet."""

    # others come first; its stored KV is on its way; its prompt is being computed
    name: Literal["waiting", "loading", "reading"]
    others: int = 0  # answers that come first


class AnswerTimes(NamedTuple):
    """Where the time of an answer went, in seconds. The parts do not overlap, and they add up to
    the whole."""

    waiting_s: float  # for others: their turns, and their rows in the steps of this one
    searching_s: float  # for its chunks
    loading_s: float  # its stored KV
    computing_s: float
    answering_s: float  # from the first token on

    @classmethod
    def split(cls, notes: "AnswerNotes", first_s: float, ended_s: float) -> "AnswerTimes":
        """The times of an answer that was called at `notes.called_s`, whose first token came at
        `first_s` and last at `ended_s`. What was computed beside the search counts as computing,
        and what nothing else took as waiting."""
        line, searching_s = notes.timeline, notes.retrieve_ms / 1e3
        loading_s = computing_s = 0.0
        if line is not None:
            computing_s = max(0.0, line.computing_s - line.beside_s)
            if notes.record is not None:  # of what its own steps took
                loading_s = min(computing_s, notes.record.stages.load / 1e3)
        left_s, parts = max(0.0, first_s - notes.called_s), []
        wait_s = 0.0 if line is None else line.loading_s
        for part_s in (computing_s - loading_s, loading_s + wait_s, searching_s):
            parts.append(min(part_s, left_s))
            left_s -= parts[-1]
        computing_s, loading_s, searching_s = parts
        return cls(left_s, searching_s, loading_s, computing_s, max(0.0, ended_s - first_s))


def _unknown(_num_tokens: int) -> None:
    return None


@dataclass(slots=True, eq=False)
class AnswerNotes:
    """Written before the answer's first token is handed out, read when it is finished."""

    called_s: float = 0.0  # when the caller asked, by time.perf_counter
    record: FuseRecord | None = None  # how the prompt was prefilled
    decision: Decision | None = None  # why so; None unless the planner chose
    speculation: SpeculationRecord | None = None  # what was guessed while searching
    guesses: SpeculationLog[Any] | None = None  # what `speculation` is made of at the first token
    not_guessed: str | None = None  # why nothing was to be guessed
    order: str | None = None  # whether chunks may move, and who says so
    audit: AuditNote | None = None  # of a fused one that may be audited
    retrieve_ms: float = 0.0
    left_out: int = 0  # chunks that were found and not sent: the history holds them
    ordered_by: str = "given"  # what a gateway moved the chunks for
    why: str | None = None  # no more is reused, and what to do about it
    question: str = ""  # what was asked
    query: str | None = None  # what was searched for, where that is not the question itself
    prompt: Prompt | None = None  # as the engine was given it
    retrieved: tuple[RetrievedChunk, ...] = ()  # for the question: found, or brought
    # seconds that a full prefill of so many tokens is expected to take; None: not known
    full_s: Callable[[int], float | None] = _unknown
    timeline: RequestTimeline | None = None  # of the engine
    watched: Ticket | None = None  # what the model thought is wanted
    events: list[AnswerEvent] = field(default_factory=list)  # before the engine had it

    def keep(self, record: FuseRecord) -> None:
        """The prompt is prefilled, and this is how. Heard once, before the first token."""
        stages = replace(record.stages, retrieve=self.retrieve_ms)
        self.record = replace(record, stages=stages, why=self.why, left_out=self.left_out)

    def keep_guesses(self) -> None:
        """Keep what was guessed while searching, if anything was. Heard with the first token: wrong
        guesses are over by then."""
        if self.guesses is not None:
            self.speculation = self.guesses.record()
            self.events += _guess_events(self.guesses)


def _guess_events(said: SpeculationLog[Any]) -> list[AnswerEvent]:
    """The stages of a search, and what was guessed meanwhile."""
    events, start_s = [], said.ended_s - said.search_s
    for number, end_s in enumerate(said.stages_s, 1):
        events.append(AnswerEvent(f"stage {number}", SEARCH, start_s, end_s))
        start_s = end_s
    for wrong in said.wrong:
        figures = wrong.generation.figures
        end_s = said.ended_s if figures.finished_s is None else figures.finished_s
        detail = f"wrong: {figures.wasted_tokens} tokens wasted"
        events.append(AnswerEvent("guess", GUESS, wrong.started_s, end_s, detail))
    if said.right is not None:
        detail = f"right, made at stage {said.right.stage}"
        events.append(AnswerEvent("guess", GUESS, said.right.started_s, said.ended_s, detail))
    return events


@dataclass(frozen=True, slots=True)
class AnswerTrace:
    """What is kept of an answer for those who look closer later, see `answer_details.py`. Times are
    by time.perf_counter."""

    question: str
    prompt: Prompt
    called_s: float
    first_s: float  # its first token was handed out
    ended_s: float
    timeline: RequestTimeline | None  # of the engine
    events: tuple[AnswerEvent, ...]  # before the engine had it


@dataclass(frozen=True, slots=True)
class UpstreamNote:
    """What a gateway knows of an answer that another server computed."""

    upstream: str  # which one
    attempts: int  # upstreams that were tried, this one included
    matched_tokens: int  # of the prompt, that it was believed to hold already
    cached_tokens: int | None  # that it says it held; None: it does not say
    chunks: tuple[tuple[int, int], ...] = ()  # half-open spans of the prompt; empty: not known
    left_out: int = 0  # chunks that were found and not sent: the history holds them
    retrieve_ms: float = 0.0
    ordered_by: str = "given"  # what the chunks were moved for
    # what the upstream says it did: way, strategy, exact, reused, recomputed, computed, why, …
    told: Mapping[str, Any] = field(default_factory=dict)
    may_be_fused: bool = False  # of what it held some may be chunk KV, not exact: it fuses

    def tokens(self, num_tokens: int) -> dict[str, int]:
        """Count the tokens of the prompt by what became of them; empty: not known."""
        states = ("exact", "reused", "recomputed", "computed")
        told = {each: self.told[each] for each in states if isinstance(self.told.get(each), int)}
        if told or self.cached_tokens is None or self.may_be_fused:
            return told
        return {"exact": self.cached_tokens, "computed": num_tokens - self.cached_tokens}

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "upstream": self.upstream,
            "attempts": self.attempts,
            "matched_tokens": self.matched_tokens,
            "cached_tokens": self.cached_tokens,
            "ordered_by": self.ordered_by,
            "told": dict(self.told),
        }
