"""What bench/speculation/run.py and gpu.py measure alike: the same questions without guesses, with
guesses at every stage, and with guesses where they are expected to gain time.

Nothing but the engine's own dependencies is imported: a GPU box has no more.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import torch

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.conversations import Talk
from kvweave.app.answer.engine_target import GUESSES_ON_CPU, GUESSES_ON_DEVICE, TokenStream
from kvweave.app.answer.guessing import Paces, PrefillPace
from kvweave.app.answer.notes import AnswerNotes, RetrievedChunk
from kvweave.app.answer.question import Question, SpeculationMode
from kvweave.app.answer.searching import Searcher
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.answer.stages import (
    Asked,
    LaidOut,
    Planned,
    PromptWords,
    Submitted,
    Target,
    TurnOpening,
)
from kvweave.app.auto.requests import exact_request
from kvweave.app.library.runtime import EngineClient
from kvweave.config import SpeculationSettings
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import SearchOptions
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.text.prompt import Prompt

MODES: tuple[SpeculationMode, ...] = ("off", "on", "auto")
WARM_UP = "Who are you?"
LEARN = 16  # searches that teach "auto" before anything is measured
Row = dict[str, Any]
PromptOf = Callable[
    [str, Sequence[RetrievedChunk]], Prompt
]  # a question, and the chunks found for it


class SearchedKB(Protocol):
    """What `Speculation` searches, as if it were a `KnowledgeBase`, says what its last plain search
    took."""

    searched_s: float


class Learnt(NamedTuple):
    """A search by itself: what it took, and the list of each stage."""

    seconds: float
    lists: Sequence[Sequence[int]]


class Measured(NamedTuple):
    """One question, answered in one mode."""

    tokens: list[int]
    ttft_s: float
    search_s: float
    open_s: float  # of the search, while nothing of the answer was computed
    guesses: int
    wasted: int  # tokens


class Mode:
    """A way to speculate, with what it has learnt; and the engine as it is asked by it."""

    def __init__(self, name: SpeculationMode, bench: "Bench") -> None:
        self._asking = bench.asking
        self._prompt_of = bench.prompt_of
        self._eos_ids = bench.eos_ids
        self.paces = Paces()
        self.max_guesses = GUESSES_ON_CPU if bench.device.type == "cpu" else GUESSES_ON_DEVICE
        settings = AnswerSettings(speculation=SpeculationSettings(name), paces=self.paces)
        kb, target = cast(KnowledgeBase, bench.kb), cast("Target[Any, Any]", self)
        self.speculation = Searcher(kb, target, settings)

    def make_prompt(self, words: PromptWords) -> Prompt:
        return self._prompt_of(words.asked.question.question, words.found.chunks)

    def plan(self, laid: LaidOut[Prompt], notes: AnswerNotes) -> Planned[Prompt, EngineRequest]:
        prompt, question = laid.prompt, laid.words.asked.question
        request = exact_request(prompt, question.drawn, self._eos_ids, use_tree=True)
        request = replace(request, namespace=question.tenant)
        return Planned(prompt, request, notes, (self.learn,))

    def submit(
        self, planned: Planned[Prompt, EngineRequest], *, is_held: bool = False
    ) -> Submitted:
        """Nobody reads it as text."""
        tokens = TokenStream(self._asking, planned.request, planned.listeners, is_held=is_held)
        return Submitted(cast(PieceStream, tokens), planned.notes, tokens)

    def get_ready(self, asked: Asked) -> None:
        """Nothing is waited for."""

    def pending_prefills(self) -> int:
        return self._asking.engine.pending_prefills()

    def boundary_s(self, pace: PrefillPace) -> float | None:
        if pace.row_s is None:
            return None
        return self._asking.engine.guess_boundary_s(pace.row_s, pace.prefill_s)

    def learn(self, ticket: Ticket) -> None:
        """Learn what the engine takes."""
        if ticket.record is not None and not ticket.timeline.shared:
            counts = ticket.record.counts
            rows = counts["computed"] + counts["recomputed"]
            self.paces.prefill.note_prefill(rows, ticket.timeline.computing_s)


@dataclass
class Bench:
    """An engine, and questions over one knowledge base."""

    kb: SearchedKB
    asking: EngineClient
    prompt_of: PromptOf
    k: int
    sampling: Sampling
    eos_ids: Sequence[int]
    device: torch.device

    def ask(self, mode: "Mode", question: str, namespace: str) -> Measured:
        """`namespace` keeps what other modes have computed out of reach."""
        started_s = time.perf_counter()
        turn = TurnOpening(Talk(()))
        asked = Asked(
            Question(question, k=self.k, sampling=self.sampling, tenant=namespace),
            started_s,
            turn,
            True,
            False,
        )
        submitted = mode.speculation.submit(asked)
        choices = cast(TokenStream, submitted.work)
        tokens = [next(choices).token_id]
        ttft_s = time.perf_counter() - started_s
        tokens += [choice.token_id for choice in choices]
        said = submitted.notes.speculation
        if said is None:
            search_s = self.kb.searched_s
            return Measured(tokens, ttft_s, search_s, search_s, 0, 0)
        open_s = (said.search_ms - said.hidden_ms) / 1e3
        return Measured(
            tokens, ttft_s, said.search_ms / 1e3, open_s, said.guesses, said.wasted_tokens
        )

    def level(
        self, named: str, questions: Sequence[str], learnt: Iterable[Learnt], rounds: int = 1
    ) -> Row:
        """All modes, question by question, so many times. `learnt` are searches that "auto" has
        seen before; `named` keeps this level's prompts apart from others', and each round's are
        apart from those of the rounds before. The first question warms up."""
        by_mode = {name: Mode(name, self) for name in MODES}
        for each in learnt:
            by_mode["auto"].paces.search[SearchOptions().kind].note_search(
                each.seconds, each.lists, len(each.lists)
            )
        got: dict[str, list[Measured]] = {mode: [] for mode in MODES}
        again = [(r, question) for r in range(rounds) for question in questions[bool(r) :]]
        for number, (r, question) in enumerate(again):
            first = number % len(MODES)  # what comes first pays for what the others find ready
            for mode in (*MODES[first:], *MODES[:first]):
                one = self.ask(by_mode[mode], question, f"{named} {r} {mode}")
                if number:
                    got[mode].append(one)
        return summary(got)


def summary(got: dict[str, list[Measured]]) -> Row:
    def mean_ms(mode: str, name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in got[mode]) * 1e3

    def p50_ms(mode: str) -> float:
        return statistics.median(one.ttft_s for one in got[mode]) * 1e3

    plain_ms = mean_ms("off", "search_s")
    prefill_ms = mean_ms("off", "ttft_s") - plain_ms
    row: Row = {"search_ms": round(plain_ms, 1), "prefill_ms": round(prefill_ms, 1)}
    for mode in MODES:
        open_ms = mean_ms(mode, "open_s")
        row[mode] = {
            "ttft_ms": round(mean_ms(mode, "ttft_s"), 1),
            "ttft_p50_ms": round(p50_ms(mode), 1),
            "ttft_max_ms": round(max(o.ttft_s for o in got[mode]) * 1e3, 1),
            "times": round(mean_ms("off", "ttft_s") / mean_ms(mode, "ttft_s"), 3),
            "times_p50": round(p50_ms("off") / p50_ms(mode), 3),
            "search_ms": round(mean_ms(mode, "search_s"), 1),
            "not_overlapped_ms": round(open_ms, 1),
            "cut": round(plain_ms / open_ms, 2),
            "hidden_share": round(1 - open_ms / mean_ms(mode, "search_s"), 3),
            "guesses": statistics.fmean(one.guesses for one in got[mode]),
            "wasted_tokens": statistics.fmean(one.wasted for one in got[mode]),
            "same_answers": sum(
                one.tokens == plain.tokens for one, plain in zip(got[mode], got["off"], strict=True)
            ),
        }
    return row
