"""Asked ─► Found: chunks from the knowledge base, prompts computed meanwhile where that pays.

    embed ─► search, stage by stage ─► the last list ─► submitted
                  └► guessing.py begins prompts of earlier lists, which are held back

Any thread; each request searches on its own.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from kvweave.app.answer.guessing import MAX_STAGES, Speculator, retrieve
from kvweave.app.answer.notes import SEARCH, AnswerEvent
from kvweave.app.answer.question import Question, SpeculationMode
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.answer.stages import Asked, Found, Submitted, Target
from kvweave.app.answer.submitting import submit
from kvweave.corpus.index.base import Vector
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import SearchOptions
from kvweave.reasons import Reason


class Searcher:
    """Searches one knowledge base for questions, and has what it finds begun."""

    def __init__(
        self,
        kb: KnowledgeBase,
        target: Target[Any, Any],
        settings: AnswerSettings,
    ) -> None:
        """`settings.look_up` runs searches, on threads of its choice; guesses are begun there too.
        `settings.paces` are what was learnt of this knowledge base before, and are learnt on.
        """
        self._kb = kb
        self._target = target
        self._settings = settings
        self._cfg = settings.speculation
        self._paces = settings.paces

    def submit(self, asked: Asked) -> Submitted:
        """Search for the chunks of a question and submit the prompt of what was found; where that
        pays, also of what was found by then after each stage of the search. Whatever fails or
        interrupts the search ends what was guessed."""
        mode = asked.question.speculate or self._cfg.mode
        may_guess = asked.question.search.is_staged and self._target.may_guess(asked)
        num_stages = self._num_stages(mode, asked.question.search) if may_guess else 1
        if num_stages == 1:
            found = self._settings.look_up(lambda: self.search(asked))
            found = replace(found, not_guessed=self._why_not(mode, asked))
            return submit(self._target, self._settings, asked, found, False)
        self._target.get_ready(asked)  # on this thread: one that searches does not wait for it
        return self._settings.look_up(lambda: self._speculate(asked, num_stages, mode))

    def search(self, asked: Asked) -> Found:
        """Find the nearest chunks in one go. If this search could go in stages, learn how long it
        takes."""
        question, begun_s = asked.question, time.perf_counter()
        how, query = question.search, self._query(question)
        if how.is_staged and how.retrieval != "words":
            self._kb.load_index()  # once, and no part of what a search takes
        started_s = time.perf_counter()
        found = Found.from_hits(self._kb.search(query, question.num_chunks, how))
        ended_s = time.perf_counter()
        if how.is_staged:
            self._paces.search[how.kind].note_search(ended_s - started_s, [found.ids], 1)
        words = f"{len(found.chunks)} chunks"
        events = [AnswerEvent("embed", SEARCH, begun_s, started_s)]
        if how.needs_words:  # embedding, if any, is a part of the search
            words, started_s, events = f"{words}, by {how.retrieval}", begun_s, []
        event = AnswerEvent("search", SEARCH, started_s, ended_s, words)
        return replace(found, events=(*events, event))

    def _query(self, question: Question) -> str | Vector:
        """What is searched for."""
        words = question.searched
        return words if question.search.needs_words else self._kb.embedder.embed_query(words)

    def _num_stages(self, mode: SpeculationMode, how: SearchOptions) -> int:
        """Return how many stages to search in; 1 means that nothing is guessed."""
        if mode == "off":
            return 1
        if mode == "on":
            return MAX_STAGES
        return 1 if self._boundary_s is None else self._paces.search[how.kind].num_stages()

    def _why_not(self, mode: SpeculationMode, asked: Asked) -> str:
        """Why a search was not taken stage by stage."""
        if mode == "off":
            return Reason.SPECULATION_OFF
        if not asked.question.search.is_staged:
            how = asked.question.search
            return f"{Reason.NO_STAGES}: {how.retrieval}{' with a filter' * bool(how.filter)}"
        if not self._target.may_guess(asked):
            return Reason.MADE_FIRST
        search_s = self._paces.search[asked.question.search.kind].search_s
        if self._boundary_s is None or search_s is None:
            return Reason.NO_PROMPT_TIMED
        return f"{Reason.SEARCH_TOO_SHORT}: {search_s * 1e3:.1f} ms"

    @property
    def _boundary_s(self) -> float | None:
        """So long a wrong guess holds others up. None: not known."""
        return self._target.boundary_s(self._paces.prefill)

    def _speculate(self, asked: Asked, most: int, mode: SpeculationMode) -> Submitted:
        """Search in stages, submit guesses that pay, and return the prompt of the last list. Learn
        from the search and note what was guessed."""
        question, pace = asked.question, self._paces.search[asked.question.search.kind]
        k, how = question.num_chunks, question.search
        num_stages = self._kb.num_stages(k, most, how)
        boundary_s, prefill_s = self._boundary_s, self._paces.prefill.prefill_s
        if mode == "auto" and not pace.pays(num_stages, boundary_s or 0.0, prefill_s):
            found = replace(self.search(asked), not_guessed=Reason.NO_GAIN)
            return submit(self._target, self._settings, asked, found, False)
        stages = self._kb.search_staged(self._query(question), k, num_stages, how)

        def is_worth(stage: int) -> bool:
            if mode == "on" or boundary_s is None:
                return stage < num_stages  # a guess at the last stage is none
            return pace.is_worth(stage, num_stages, boundary_s, prefill_s)

        start = partial(submit, self._target, self._settings, asked)
        most_prefills = self._cfg.max_prefill_bs or self._target.max_guesses
        pending = self._target.pending_prefills
        speculator = Speculator(start, pending, most_prefills, is_worth)
        got = retrieve(map(Found.from_hits, stages), speculator)
        guessed = got.said.started > 0
        left_s = [got.said.ended_s - each_s for each_s in got.said.stages_s]
        took_s = got.said.search_s
        pace.note_search(took_s, got.lists, num_stages, left_s=left_s, guessed=guessed)
        notes = got.generation.notes
        notes.guesses = got.said
        notes.retrieve_ms += got.said.ahead_s * 1e3  # a right guess came before the end
        return got.generation
