"""An answer in the making: token choices of the engine in, pieces of text out."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from kvweave.app.answer.guessing import SpeculationRecord
from kvweave.app.answer.notes import (
    AnswerNotes,
    AnswerSource,
    AnswerTimes,
    AnswerTrace,
    AnswerWait,
    UpstreamNote,
    sources_of,
)
from kvweave.app.audit.audit_log import AuditNote
from kvweave.engine.request import RequestTimeline, Ticket
from kvweave.engine.sampling import Choice, Sampling
from kvweave.fuse.record import FuseRecord
from kvweave.plan.plan import Decision
from kvweave.text.detokenizer import Detokenizer, LoopWatch, StopMatcher
from kvweave.text.tokenizer import Tokenizer
from kvweave.text.tool_calls import ToolCall

REPETITION = "repetition"  # the answer only repeated itself; its finish_reason is "stop"


class TokenLogprob(NamedTuple):
    """What the model thought of a token it gave."""

    token: str
    logprob: float  # natural logarithm
    alternatives: tuple[tuple[str, float], ...]  # likeliest first


class Piece(NamedTuple):
    """A bit of an answer as it is made."""

    text: str  # may be empty: a token can end in the middle of a character
    logprob: TokenLogprob | None = None  # set when Sampling.logprobs is
    call: ToolCall | None = None  # that the model asks for; a piece of its own


class CopiedTokens(NamedTuple):
    """Tokens of an answer that were guessed from what its request has read: see engine/drafts.py.
    Perhaps a few of them stand behind its end: an engine runs ahead of its readers."""

    drafted: int
    copied: int  # of those, the ones that were right; no more than the answer has tokens

    @classmethod
    def from_timeline(cls, line: RequestTimeline, num_tokens: int) -> "CopiedTokens":
        """The counts of an answer of so many tokens, whose engine may still count."""
        copied = line.copied  # first: what is drafted never lags behind it then
        return cls(max(line.drafted, copied), min(copied, num_tokens))


class WatchedTokens(NamedTuple):
    """What the model thought at the first tokens of an answer."""

    token_ids: tuple[int, ...]  # that were given
    distributions: tuple[Tensor, ...]  # of each, [V] log probabilities on the host


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    # "stop": the model or a stop string ended it; "length": no room left; "tool_calls": it calls
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float  # from the call to the first token
    total_ms: float
    logprobs: tuple[TokenLogprob, ...] = ()
    explain: FuseRecord | None = None  # how the prompt was prefilled; None if all was computed
    decision: Decision | None = None  # why so, and what was predicted; None unless reuse="auto"
    speculation: SpeculationRecord | None = None  # what was guessed while searching, if anything
    not_guessed: str | None = None  # why nothing was to be guessed; None: it was, or nothing found
    order: str | None = None  # whether chunks may move, and who says so; None: there are none
    audit: AuditNote | None = None  # of a fused answer; None unless its strategy is audited
    stopped_because: str | None = None  # REPETITION: it was ended; None: it ended as answers do
    sources: tuple[AnswerSource, ...] = ()  # the chunks it was made from, best first
    full_ms: float | None = None  # what a full prefill would have taken, about; None: not known
    times: AnswerTimes | None = None  # where its time went; None: an upstream knows
    # guessed from what the request has read; None: an upstream knows, or no token was made
    copies: CopiedTokens | None = None
    nothing_found: bool = False  # no chunk was: the text says so, and no model was asked
    query: str | None = None  # what was searched for, where that is not the question itself
    tool_calls: tuple[ToolCall, ...] = ()  # that the model asks for
    watched: WatchedTokens | None = field(default=None, repr=False, compare=False)  # if asked for
    # what `details_of` tells more from; None: it was made without a Weave
    trace: AnswerTrace | None = field(default=None, repr=False, compare=False)
    upstream: UpstreamNote | None = None  # what a gateway knows of it; None: computed here

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt whose KV was there, exact or reused; None: an upstream knows."""
        if self.upstream is not None:
            tokens = self.upstream.tokens(self.prompt_tokens)
            if tokens:
                return tokens.get("exact", 0) + tokens.get("reused", 0)
            return self.upstream.cached_tokens
        if self.explain is None:
            return 0
        return self.explain.counts["exact"] + self.explain.counts["reused"]


class PieceStream(ABC):
    """An answer in the making: iterate for pieces, then read `answer`. For one thread at a time,
    but for `abort`. Nothing is begun before the first piece is asked for, unless a search guessed.
    """

    def __init__(self) -> None:
        self.answer: Answer | None = None  # None until it is finished
        self._on_close: Callable[[], None] | None = None
        self._pieces = self._make()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def finish(self) -> Answer:
        """Run to the end and return the whole answer."""
        self.take_whole()
        for _ in self._pieces:
            pass
        assert self.answer is not None, "an answer was closed before it was finished"
        return self.answer

    def take_whole(self) -> None:  # noqa: B027 - most streams begin only once
        """Say that nobody reads the pieces: `answer` alone counts, so that it may begin again where
        what computes it fails. Before the first piece."""

    def close(self) -> None:
        """Stop the work. `answer` stays None unless it was finished."""
        try:
            self.abort()
            self._pieces.close()  # it may wait between two pieces with all that it holds
        finally:
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                on_close()

    @abstractmethod
    def abort(self) -> None:
        """Stop the work, from any thread; the one that iterates sees the end. Never blocks."""

    def current_wait(self) -> AnswerWait | None:
        """What it waits for, from any thread; None: not known, or its first token is there."""
        return None

    def when_closed(self, call: Callable[[], None]) -> None:
        """Have `call` called once this is closed: it needs something that stays until then."""
        self._on_close = call

    @abstractmethod
    def _make(self) -> Generator[Piece, None, None]:
        """Make the pieces, and set `answer` at the end unless it was cut."""


class AnswerOver(PieceStream):
    """A `PieceStream` over another one."""

    def __init__(self, inner: PieceStream) -> None:
        self._inner = inner
        super().__init__()

    def take_whole(self) -> None:
        self._inner.take_whole()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def current_wait(self) -> AnswerWait | None:
        return self._inner.current_wait()

    def when_closed(self, call: Callable[[], None]) -> None:
        self._inner.when_closed(call)


class Tokens(Protocol):
    """Where the tokens of an answer come from."""

    def __iter__(self) -> Iterator[Choice]: ...

    def close(self) -> None:
        """Stop the work. Any thread, also while another waits for a token: that one sees the
        end."""


class AnswerStream(PieceStream):
    """Text from the tokens of a prompt."""

    def __init__(
        self,
        choices: Tokens,
        tokenizer: Tokenizer,
        sampling: Sampling,
        prompt_tokens: int,
        called_s: float,
        notes: AnswerNotes | None = None,
        current_wait: Callable[[], AnswerWait | None] = lambda: None,
    ) -> None:
        """`called_s` is when the caller asked, by time.perf_counter: retrieval counts too.
        `current_wait` says what the first of `choices` waits for."""
        self._notes = notes or AnswerNotes(called_s)
        self._current_wait = current_wait
        self.prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._made = _Made(called_s)
        self._choices = choices
        self._aborted = False
        super().__init__()

    def abort(self) -> None:
        self._aborted = True
        self._choices.close()

    def current_wait(self) -> AnswerWait | None:
        return None if self._made.first_s is not None else self._current_wait()

    def _make(self) -> Generator[Piece, None, None]:
        detokenizer, matcher = Detokenizer(self._tokenizer), StopMatcher(self._sampling.stop)
        watch = LoopWatch() if self._sampling.stop_loops else None
        made, reason, choices = self._made, "length", self._choices
        is_cut = False
        with closing(choices):
            for choice in choices:
                made.count()
                if choice.token_id in self._tokenizer.eos_ids:
                    reason = "stop"
                    break
                cut = matcher.push(detokenizer.push(choice.token_id))
                yield made.add(Piece(cut.text, self._logprob(choice)))
                if cut.stopped:
                    is_cut = True
                    break
                if watch is not None and watch.push(choice.token_id):
                    made.stopped_because, reason = REPETITION, "stop"
                    break
        if is_cut:
            self.answer = made.answer("stop", self.prompt_tokens, self._notes)
            return
        if self._aborted and reason != "stop":
            return  # not its end: `abort` cut it here
        cut = matcher.push(detokenizer.flush())
        rest = cut.text if cut.stopped else cut.text + matcher.flush()
        if rest:
            yield made.add(Piece(rest))
        self.answer = made.answer(
            "stop" if cut.stopped else reason, self.prompt_tokens, self._notes
        )

    def _logprob(self, choice: Choice) -> TokenLogprob | None:
        if choice.logprob is None:
            return None
        text = self._tokenizer.decode
        alternatives = tuple((text([i]), lp) for i, lp in choice.alternatives)
        return TokenLogprob(text([choice.token_id]), choice.logprob, alternatives)


@dataclass(slots=True)
class _Made:
    """What has been made so far, and when."""

    started_s: float
    first_s: float | None = None
    tokens: int = 0
    stopped_because: str | None = None
    pieces: list[Piece] = field(default_factory=list)

    def count(self) -> None:
        self.tokens += 1
        if self.first_s is None:
            self.first_s = time.perf_counter()

    def add(self, piece: Piece) -> Piece:
        self.pieces.append(piece)
        return piece

    def answer(self, finish_reason: str, prompt_tokens: int, notes: AnswerNotes) -> Answer:
        now = time.perf_counter()
        sources: tuple[AnswerSource, ...] = ()
        if notes.prompt is not None:
            sources = sources_of(notes.retrieved, notes.prompt, notes.record)
        full_s, line = notes.full_s(prompt_tokens), notes.timeline
        return Answer(
            text="".join(piece.text for piece in self.pieces),
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=self.tokens,
            ttft_ms=((self.first_s or now) - self.started_s) * 1e3,
            total_ms=(now - self.started_s) * 1e3,
            logprobs=tuple(p.logprob for p in self.pieces if p.logprob is not None),
            explain=notes.record,
            decision=notes.decision,
            speculation=notes.speculation,
            not_guessed=notes.not_guessed,
            order=notes.order,
            audit=notes.audit,
            stopped_because=self.stopped_because,
            sources=sources,
            full_ms=None if full_s is None else full_s * 1e3,
            times=AnswerTimes.split(notes, self.first_s or now, now),
            copies=None if line is None else CopiedTokens.from_timeline(line, self.tokens),
            query=notes.query,
            watched=_read_watched(notes.watched),
            trace=_trace(notes, self.started_s, self.first_s or now, now),
        )


def _read_watched(ticket: Ticket | None) -> WatchedTokens | None:
    if ticket is None:
        return None
    count = min(len(ticket.watched_ids), len(ticket.distributions))
    return WatchedTokens(tuple(ticket.watched_ids[:count]), tuple(ticket.distributions[:count]))


def _trace(
    notes: AnswerNotes, called_s: float, first_s: float, ended_s: float
) -> AnswerTrace | None:
    if notes.prompt is None:
        return None
    events = tuple(notes.events)
    return AnswerTrace(
        notes.question, notes.prompt, called_s, first_s, ended_s, notes.timeline, events
    )
