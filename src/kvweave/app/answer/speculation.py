"""Answers from a knowledge base: the search and the prefill side by side where that pays.

    embed ─► search, stage by stage ─► submission of the last list ─► tokens
                  └► plan/retrieval.py guesses meanwhile, the engine computes and holds back

Any thread; each request searches on its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, get_args

import torch

from kvweave.app.answer.token_stream import OnFirst, Submission, TokenStream
from kvweave.app.notes import AnswerEvent
from kvweave.app.question import Question, SpeculationMode
from kvweave.app.runtime import EngineClient
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.request import Ticket
from kvweave.errors import ConfigError
from kvweave.plan.retrieval import (
    RetrievalResult,
    SpeculationLog,
    SpeculationRecord,
    Speculator,
    ids_of,
    retrieve,
)
from kvweave.plan.search_pace import MAX_STAGES, Paces
from kvweave.types import Hit

SEARCH, GUESS = "search", "guess"  # lanes of a timeline
GUESSES_ON_CPU = 1
GUESSES_ON_DEVICE = 4


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """When prompts are computed before the search for their chunks is over."""

    mode: SpeculationMode = (
        "auto"  # "on" guesses at every stage, "auto" where it is expected to gain time
    )
    # No guess begins while so many prompts are to be computed. None: GUESSES_ON_CPU, whose cores
    # are all busy with one; GUESSES_ON_DEVICE, which takes several at once.
    max_prefill_bs: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(SpeculationMode):
            known = ", ".join(get_args(SpeculationMode))
            raise ConfigError(f"no speculation {self.mode!r}; known: {known}")
        if self.max_prefill_bs is not None and self.max_prefill_bs < 1:
            raise ConfigError("SpeculationConfig.max_prefill_bs must be at least 1")


class Attempt(NamedTuple):
    """A submission, and the ticket it has."""

    submission: Submission
    ticket: Ticket

    @property
    def is_done(self) -> bool:
        return self.ticket.is_done

    def cancel(self) -> None:
        self.ticket.cancel()

    def release(self) -> None:
        self.ticket.release()


SubmissionOf = Callable[[Sequence[Hit]], Submission]  # raises RequestError if there is none
T = TypeVar("T")


class LookUp(Protocol):
    """Runs a search, perhaps on another thread, and waits for it."""

    def __call__(self, search: Callable[[], T], /) -> T: ...


def at_once(search: Callable[[], T], /) -> T:
    """On the thread that asks."""
    return search()


class Speculation:
    """Searches one knowledge base and answers from what it finds."""

    def __init__(
        self,
        kb: KnowledgeBase,
        client: EngineClient,
        device: torch.device,
        cfg: SpeculationConfig | None = None,
        look_up: LookUp = at_once,
        paces: Paces | None = None,
    ) -> None:
        """`look_up` runs searches, on threads of its choice; guesses are submitted there too.
        `paces` are what was learnt of this knowledge base before, and are learnt on."""
        self._kb = kb
        self._client = client
        self._look_up = look_up
        self._cfg = cfg or SpeculationConfig()
        most = self._cfg.max_prefill_bs
        self._max_prefill_bs = most or (
            GUESSES_ON_CPU if device.type == "cpu" else GUESSES_ON_DEVICE
        )
        self._paces = paces or Paces()

    def answer(
        self, asked: Question, submission_of: SubmissionOf, ready: Callable[[], None]
    ) -> tuple[Submission, TokenStream]:
        """What is submitted for the chunks nearest to a question, and its tokens. Close them, or
        read them to the end.

        `ready` does what may take long before the first submission: called on this thread where
        guesses are made, so that a thread of `look_up` does not wait for it. Whatever fails or
        interrupts the search ends what was guessed.
        """
        mode = asked.speculate or self._cfg.mode
        num_stages = self._num_stages(mode) if asked.search.is_staged else 1
        if num_stages == 1:
            events: list[AnswerEvent] = []
            made = submission_of(self._look_up(lambda: self._search(asked, events)))
            made.notes.events += events
            made.notes.not_guessed = self._why_not(mode, asked)
            return made, TokenStream(self._client, made.request, (*made.on_first, self._learn))
        ready()
        got = self._look_up(lambda: self._speculate(asked, submission_of, num_stages, mode))
        made, ticket = got.generation
        made.notes.retrieve_ms += got.said.ahead_s * 1e3  # a right guess came before the end

        def note(ticket: Ticket) -> None:
            # by now wrong guesses are over: they were ended before it was submitted
            made.notes.speculation = _record(got.said, ticket)
            made.notes.events += _events(got.said)

        on_first: tuple[OnFirst, ...] = (*made.on_first, self._learn, note)
        return made, TokenStream(self._client, made.request, on_first, ticket=ticket)

    def _num_stages(self, mode: SpeculationMode) -> int:
        if mode == "off":
            return 1
        if mode == "on":
            return MAX_STAGES
        return 1 if self._boundary_s is None else self._paces.search.num_stages()

    def _why_not(self, mode: SpeculationMode, asked: Question) -> str:
        """Why a search was not taken stage by stage."""
        if mode == "off":
            return "speculation is off"
        if not asked.search.is_staged:
            return f"a search by {asked.search.retrieval} has no stages"
        search_s = self._paces.search.search_s
        if self._boundary_s is None or search_s is None:
            return "no prompt was timed yet"
        return f"a search takes {search_s * 1e3:.1f} ms, too short to compute anything beside it"

    @property
    def _boundary_s(self) -> float | None:
        """So long a wrong guess holds others up. None: not known."""
        pace = self._paces.prefill
        if pace.row_s is None:
            return None
        return self._client.engine.guess_boundary_s(pace.row_s, pace.prefill_s)

    def _search(self, asked: Question, events: list[AnswerEvent]) -> list[Hit]:
        """The nearest chunks; what it took is added to `events`."""
        begun_s, how, query = time.perf_counter(), asked.search, asked.searched
        if not how.is_staged:
            hits = self._kb.search(query, asked.num_chunks, how)
            ended_s, words = time.perf_counter(), f"{len(hits)} chunks, by {how.retrieval}"
            events.append(AnswerEvent("search", SEARCH, begun_s, ended_s, words))
            return hits
        vector = self._kb.embedder.embed_query(query)
        self._kb.load_index()  # once, and no part of what a search takes
        started_s = time.perf_counter()
        hits = self._kb.search(vector, asked.num_chunks, how)
        ended_s = time.perf_counter()
        self._paces.search.searched(ended_s - started_s, [ids_of(hits)], 1)
        events.append(AnswerEvent("embed", SEARCH, begun_s, started_s))
        events.append(AnswerEvent("search", SEARCH, started_s, ended_s, f"{len(hits)} chunks"))
        return hits

    def _speculate(
        self, asked: Question, submission_of: SubmissionOf, most: int, mode: SpeculationMode
    ) -> RetrievalResult[Attempt]:
        vector = self._kb.embedder.embed_query(asked.searched)
        num_stages = self._kb.num_stages(asked.num_chunks, most)
        stages = self._kb.search_staged(vector, asked.num_chunks, num_stages, asked.search)
        engine, boundary_s, pace = self._client.engine, self._boundary_s, self._paces.search
        prefill_s = self._paces.prefill.prefill_s

        def start(hits: Sequence[Hit], held: bool) -> Attempt:
            made = submission_of(hits)
            return Attempt(made, engine.submit(made.request, held=held))

        def is_worth(stage: int) -> bool:
            if mode == "on" or boundary_s is None:
                return stage < num_stages  # a guess at the last stage is none
            return pace.is_worth(stage, num_stages, boundary_s, prefill_s)

        speculator = Speculator(start, engine.pending_prefills, self._max_prefill_bs, is_worth)
        got = retrieve(stages, speculator)
        guessed = got.said.started > 0
        pace.searched(got.said.search_s, got.lists, num_stages, guessed=guessed)
        return got

    def _learn(self, ticket: Ticket) -> None:
        """Learn the pace of the engine from a prompt that is through."""
        record, timeline = ticket.record, ticket.timeline
        if record is None or timeline.shared:
            return
        rows = record.counts["computed"] + record.counts["recomputed"]
        self._paces.prefill.computed(rows, timeline.computing_s)


def _events(said: SpeculationLog[Attempt]) -> list[AnswerEvent]:
    """The stages of a search, and what was guessed meanwhile. Wrong guesses are over by now."""
    events, start_s = [], said.ended_s - said.search_s
    for number, end_s in enumerate(said.stages_s, 1):
        events.append(AnswerEvent(f"stage {number}", SEARCH, start_s, end_s))
        start_s = end_s
    for wrong in said.wrong:
        line = wrong.ticket.timeline
        end_s = said.ended_s if line.finished_s is None else line.finished_s
        detail = f"wrong: {line.wasted_tokens} tokens wasted"
        events.append(AnswerEvent("guess", GUESS, line.submitted_s, end_s, detail))
    if said.right is not None:
        detail = f"right, made at stage {said.right.stage}"
        events.append(AnswerEvent("guess", GUESS, said.right.started_s, said.ended_s, detail))
    return events


def _record(said: SpeculationLog[Attempt], ticket: Ticket) -> SpeculationRecord:
    right, computed_s = said.right, ticket.timeline.prefilled_s
    hidden_s = said.ahead_s
    if right is not None and computed_s is not None:  # it was through before the search was
        hidden_s = min(hidden_s, max(0.0, computed_s - right.started_s))
    return SpeculationRecord(
        id=said.id,
        stages=said.stages,
        guesses=said.started,
        right_stage=None if right is None else right.stage,
        search_ms=said.search_s * 1e3,
        hidden_ms=hidden_s * 1e3,
        saved_tokens=ticket.timeline.saved_tokens,
        wasted_tokens=sum(wrong.ticket.timeline.wasted_tokens for wrong in said.wrong),
    )
