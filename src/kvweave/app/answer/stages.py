"""A question on its way to its answer, as values.

    Question ─► Asked ─► Found ─► LaidOut ─► Planned ─► Submitted ─► pieces of text
           take_in   Searcher    lay_out      plan   Target.submit

Nearly every arrow is one function; a search may go round several times. No value is changed once it
is made; only its `notes` are written until the first token is there. Searching in stages is a loop
around the middle: `Found` comes several times, all but the last one as a guess. A `Target` is the
one place where a model of this process and engines elsewhere differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.conversations import ChunkIds, IsGone, Talk
from kvweave.app.answer.guessing import Generation, GuessFigures, PrefillPace, TopK
from kvweave.app.answer.notes import AnswerEvent, AnswerNotes, RetrievedChunk
from kvweave.app.answer.question import Question
from kvweave.app.answer.settings import SamplingDefaults
from kvweave.engine.sampling import Sampling
from kvweave.text.prompt import PastMessage
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Hit

# Hears of the first token of an answer, on the thread that reads it: a ticket of the engine here, a
# lease of a replica in a gateway.
Listener = Callable[[Any], None]
Recall = Callable[[IsGone], Talk]  # the history with its chunks, less those that are gone


class LaidPrompt(Protocol):
    """A prompt, as far as all targets know it."""

    @property
    def chunks(self) -> Sequence[ChunkIds]:
        """Chunks in front of the question, in the order they are sent in."""
        ...


P = TypeVar("P", bound=LaidPrompt)  # a prompt as its target wants it
R = TypeVar("R")  # what the target is asked for


class TurnOpening(NamedTuple):
    """What a target knows at the start of a turn."""

    talk: Talk
    as_of: int = 0  # on its clock of deletions, before anything is searched for
    texts: Mapping[ChunkIds, str] = {}  # of chunks in the history, where prompts are text


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in which nothing is left open, and the conversation it is asked in."""

    question: Question
    called_s: float  # when the caller asked, by time.perf_counter
    turn: TurnOpening
    is_searched: bool  # its chunks come from the knowledge base
    is_usual: bool  # it names no strategy and no ratio: those are the configuration's
    order: str | None = None  # whether chunks may move, and who says so

    @property
    def says_nothing(self) -> bool:
        """Whether a fixed text answers this question if the search finds nothing. It does if the
        question wants that and its history holds no chunks of earlier turns."""
        is_said = self.question.nothing_found == "say"
        return self.is_searched and is_said and not self.turn.talk.holds_chunks


@dataclass(frozen=True, slots=True)
class Found:
    """Chunks for a question: the nearest so far, or those that its caller brought."""

    chunks: tuple[RetrievedChunk, ...]
    events: tuple[AnswerEvent, ...] = ()  # what it took
    not_guessed: str | None = None  # why nothing is guessed while searching

    @classmethod
    def from_hits(cls, hits: Sequence[Hit]) -> "Found":
        return cls(tuple(map(RetrievedChunk.from_hit, hits)))

    @property
    def ids(self) -> TopK:
        """The names of chunks that a search found."""
        return tuple(chunk.id for chunk in self.chunks if chunk.id is not None)


@dataclass(frozen=True, slots=True)
class PromptWords:
    """What a prompt is made of."""

    asked: Asked
    found: Found
    history: tuple[PastMessage, ...]
    chunks: tuple[ChunkIds, ...]  # in front of the question: those that the history does not hold
    left_out: tuple[ChunkIds, ...]  # that were found and stand in the history


@dataclass(frozen=True, slots=True)
class LaidOut(Generic[P]):
    """A prompt in the order that its chunks were found in."""

    words: PromptWords
    talk: Talk  # with or without chunks in its history, as it was laid out
    prompt: P
    began_s: float  # when laying it out began, by time.perf_counter


@dataclass(frozen=True, slots=True)
class Planned(Generic[P, R]):
    """A prompt, and how it is to be computed. Nothing was computed yet, and nothing is remembered
    of it before its first token: it may be a guess."""

    prompt: P  # its chunks in the order that they are sent in
    request: R
    notes: AnswerNotes
    listeners: tuple[Listener, ...] = ()  # called in this order

    def heard_by(self, *listeners: Listener) -> "Planned[P, R]":
        """Return this plan with more listeners, called after those it has."""
        return replace(self, listeners=(*self.listeners, *listeners))


@dataclass(frozen=True, slots=True)
class Submitted:
    """A prompt that its target has. A guess is computed and held back."""

    answer: PieceStream  # begins the work when the first piece is read, if it was not held
    notes: AnswerNotes
    work: Generation | None = None  # None: there is nothing to compute

    @property
    def is_done(self) -> bool:
        return self.work is not None and self.work.is_done

    def cancel(self) -> None:
        if self.work is not None:
            self.work.cancel()

    def release(self) -> None:
        if self.work is not None:
            self.work.release()

    @property
    def figures(self) -> GuessFigures:
        return GuessFigures() if self.work is None else self.work.figures


class Target(Protocol[P, R]):
    """Takes a prompt and gives its tokens: the engine of this process, or replicas elsewhere. Any
    thread."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_context(self) -> int | None:
        """Tokens that prompt and answer may have together; None: not known."""

    @property
    def sampling(self) -> SamplingDefaults: ...

    def check(self, question: Question) -> None:
        """Raise RequestError or ConfigError for a question that cannot be answered here."""

    def open_turn(self, question: Question, recall: Recall) -> TurnOpening:
        """Recall what was said before, as far as it is not deleted by now."""
        ...

    def say(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, tenant: str) -> str:
        """Answer messages without chunks, and wait for the whole text."""
        ...

    def make_prompt(self, words: PromptWords) -> P:
        """Make the prompt of these words, with its chunks in the order found."""
        ...

    def has_room(self, prompt: P, max_tokens: int) -> bool:
        """Whether the context holds a prompt and its answer."""
        ...

    def plan(self, laid: LaidOut[P], notes: AnswerNotes) -> Planned[P, R]:
        """Decide how a prompt is computed. Raises RequestError if it cannot be."""
        ...

    def submit(self, planned: Planned[P, R], *, is_held: bool = False) -> Submitted:
        """Hand over a planned prompt. If `is_held`, begin it at once and hold its answer back until
        it is released; else begin it when its reader asks for the first piece."""
        ...

    def may_guess(self, asked: Asked) -> bool:
        """Whether planning a prompt of this question is quick: guesses are planned on the few
        threads that search."""
        ...

    def get_ready(self, asked: Asked) -> None:
        """Do ahead what the first prompt would otherwise wait for; called before a search in
        stages."""

    @property
    def max_guesses(self) -> int:
        """No guess begins while so many prompts are to be computed."""
        ...

    def pending_prefills(self) -> int:
        """Prompts that are to be computed."""
        ...

    def boundary_s(self, pace: PrefillPace) -> float | None:
        """How long a wrong guess holds others up, by this pace; None: not known."""
