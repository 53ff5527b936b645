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

from kvweave.app.answer.speculation import Speculation, SpeculationConfig
from kvweave.app.answer.token_stream import Submission
from kvweave.app.notes import AnswerNotes
from kvweave.app.question import Question, SpeculationMode
from kvweave.app.requests import exact_request
from kvweave.app.runtime import EngineClient
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.sampling import Sampling
from kvweave.plan.search_pace import Paces
from kvweave.text.prompt import Prompt
from kvweave.types import Hit

MODES: tuple[SpeculationMode, ...] = ("off", "on", "auto")
WARM_UP = "Who are you?"
LEARN = 16  # searches that teach "auto" before anything is measured
Row = dict[str, Any]
PromptOf = Callable[[str, Sequence[Hit]], Prompt]  # a question, and the chunks found for it


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

    def ask(self, speculation: Speculation, question: str, namespace: str) -> Measured:
        """`namespace` keeps what other modes have computed out of reach."""

        def submission_of(hits: Sequence[Hit]) -> Submission:
            prompt = self.prompt_of(question, hits)
            request = exact_request(prompt, self.sampling, self.eos_ids, use_tree=True)
            request = replace(request, namespace=namespace)
            return Submission(prompt, request, AnswerNotes(), ())

        started_s = time.perf_counter()
        submission, choices = speculation.answer(
            Question(question, k=self.k), submission_of, lambda: None
        )
        tokens = [next(choices).token_id]
        ttft_s = time.perf_counter() - started_s
        tokens += [choice.token_id for choice in choices]
        said = submission.notes.speculation
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
        kb, device = cast(KnowledgeBase, self.kb), self.device
        paces = {mode: Paces() for mode in MODES}
        by_mode = {
            mode: Speculation(kb, self.asking, device, SpeculationConfig(mode), paces=paces[mode])
            for mode in MODES
        }
        for each in learnt:
            paces["auto"].search.searched(each.seconds, each.lists, len(each.lists))
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
