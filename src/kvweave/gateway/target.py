"""Replicas elsewhere as a target: prompts in, tokens out. See app/answer/stages.py."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.answerer import Answerer
from kvweave.app.answer.conversations import Talk
from kvweave.app.answer.guessing import PrefillPace
from kvweave.app.answer.notes import AnswerNotes
from kvweave.app.answer.question import AUTO, PLAIN_REUSES, Question
from kvweave.app.answer.settings import AnswerSettings, SamplingDefaults
from kvweave.app.answer.stages import (
    Asked,
    LaidOut,
    Planned,
    PromptWords,
    Recall,
    Submitted,
    TurnOpening,
)
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError, PromptTooLong, RequestError
from kvweave.gateway.answer import RoutedAnswer
from kvweave.gateway.bodies import UpstreamRequest
from kvweave.gateway.chunk_order import ChunkOrder
from kvweave.gateway.fleet import Fleet, ReplicaLease
from kvweave.gateway.guesses import PrefillGuess, ReadyRequest
from kvweave.gateway.prompts import (
    ChunkIds,
    PromptMaker,
    TextPrompts,
    UpstreamPrompt,
    UpstreamWords,
    chat_messages,
)
from kvweave.kv.tiers.config import TierConfig
from kvweave.text.prompt import refuse_long
from kvweave.text.tokenizer import Tokenizer
from kvweave.text.tool_calls import has_tool_parts
from kvweave.types import ChunkId

GUESSES_PER_REPLICA = 4  # prompts under way at a replica, at which no guess is added
STEP_ROWS = 2048  # that an engine computes between two looks for a cut connection
NO_TOOLS = (
    "a gateway passes 'tools' and their calls on in plain chats only; leave 'kb' and 'documents' "
    "out, or ask an engine"
)
NO_KB = "no knowledge base is named, and no documents; send 'kb' or 'documents'"


@dataclass(frozen=True, slots=True)
class Upstreams:
    """What the parts of one gateway share."""

    fleet: Fleet
    model: str  # that answers
    prompts: PromptMaker
    tokenizer: Tokenizer  # the model's, or one that only cuts and counts
    sampling: SamplingDefaults
    threads: ThreadPoolExecutor  # for guesses
    max_context: int | None
    remotes: Sequence[TierConfig] = ()  # tiers that upstreams share: what is removed goes there too

    def for_model(self, model: str | None) -> "Upstreams":
        """Return these for another model, whose prompts go as text: its tokenizer is not here.
        Raises RequestError where no upstream has it."""
        if model is None or model == self.model:
            return self
        known = self.fleet.models()
        if model not in known:
            names = ", ".join(map(repr, known))
            raise RequestError(f"no upstream has a model {model!r}; they have {names}")
        return replace(
            self,
            model=model,
            prompts=TextPrompts(),
            sampling=SamplingDefaults(self.sampling.configured),
            max_context=known[model],
        )


class FleetTarget:
    """One model of a fleet, and the knowledge base it is asked about. Any thread."""

    def __init__(
        self, upstreams: Upstreams, settings: AnswerSettings, kb: KnowledgeBase | None = None
    ) -> None:
        self._up = upstreams
        self._fleet = upstreams.fleet
        self._settings = settings
        self._kb = kb
        self._order = ChunkOrder(upstreams.fleet, settings.planner.window)
        self.tokenizer = upstreams.tokenizer
        self.max_context = upstreams.max_context
        self.sampling = upstreams.sampling
        self.max_guesses = GUESSES_PER_REPLICA
        self.pending_prefills = upstreams.fleet.pending_prefills

    def check_reuse(self, reuse: str | None) -> None:
        """Raise ConfigError for a strategy that no upstream has."""
        if reuse not in (None, *PLAIN_REUSES) and not self._fleet.can_fuse(self._up.model):
            raise ConfigError(
                f"reuse {reuse!r} needs chunk KV, and no upstream reuses it; leave it out, or run "
                "upstreams with kvweave's connector"
            )

    def check(self, question: Question) -> None:
        try:
            self.check_reuse(question.reuse)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        if question.tool_use is not None or has_tool_parts([*question.history, *question.since]):
            raise RequestError(NO_TOOLS)
        if question.documents is None and self._kb is None:
            raise ConfigError(NO_KB)
        # what no context could hold is not tokenised here, where the model's tokenizer is
        if self.max_context is not None and not self._up.prompts.needs_texts:
            refuse_long(self.tokenizer, question.texts, self.max_context)

    def open_turn(self, question: Question, recall: Recall) -> TurnOpening:
        if self._kb is None or not question.history:
            return TurnOpening(recall(self._is_gone))
        return self._settings.look_up(partial(self._open_turn, self._kb, recall))

    def say(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, tenant: str) -> str:
        request = UpstreamRequest(chat_messages(messages, tenant.encode()), sampling, tenant)
        return RoutedAnswer(self._fleet, request, AnswerNotes(time.perf_counter())).finish().text

    def make_prompt(self, words: PromptWords) -> UpstreamPrompt:
        return self._make(words, tuple(dict.fromkeys(words.chunks)))

    def has_room(self, prompt: UpstreamPrompt, max_tokens: int) -> bool:
        return self.max_context is None or prompt.num_tokens < self.max_context

    def plan(
        self, laid: LaidOut[UpstreamPrompt], notes: AnswerNotes
    ) -> Planned[UpstreamPrompt, UpstreamRequest]:
        prompt, question = laid.prompt, laid.words.asked.question
        if prompt.spans and not self.has_room(prompt, 0):
            raise PromptTooLong(
                f"the prompt has {prompt.num_tokens:,} tokens, the model's context "
                f"{self.max_context:,}; ask for fewer chunks"
            )
        ordered = self._order.choose(prompt.front, prompt.chunks, question.permission)
        if ordered.chunks != prompt.chunks:
            prompt = self._make(laid.words, ordered.chunks)
        notes.ordered_by = ordered.by
        request = UpstreamRequest(
            prompt,
            question.drawn,
            question.tenant,
            None if question.reuse == AUTO else question.reuse,
            question.ratio,
            question.bound,
        )
        return Planned(prompt, request, notes, (partial(self._learn, request, notes),))

    def submit(
        self, planned: Planned[UpstreamPrompt, UpstreamRequest], *, is_held: bool = False
    ) -> Submitted:
        guess = PrefillGuess(self._fleet, planned.request, self._up.threads) if is_held else None
        answer = RoutedAnswer(self._fleet, planned.request, planned.notes, planned.listeners, guess)
        return Submitted(answer, planned.notes, guess or ReadyRequest())

    def may_guess(self, asked: Asked) -> bool:
        """Planning computes nothing here."""
        return True

    def get_ready(self, asked: Asked) -> None:
        """Upstreams get themselves ready."""

    def boundary_s(self, pace: PrefillPace) -> float | None:
        return None if pace.row_s is None else pace.row_s * STEP_ROWS

    def _make(self, words: PromptWords, chunks: tuple[ChunkIds, ...]) -> UpstreamPrompt:
        asked = words.asked
        question = asked.question
        texts = {**asked.turn.texts, **{each.token_ids: each.text for each in words.found.chunks}}
        said = UpstreamWords(
            question.question,
            chunks,
            question.system or "",
            words.history,
            question.tenant.encode(),
            self._up.model,
        )
        return self._up.prompts.make(said, texts.__getitem__)

    def _open_turn(self, kb: KnowledgeBase, recall: Recall) -> TurnOpening:
        """Reads the catalogue, so where searches do."""
        talk = recall(self._is_gone)
        return TurnOpening(talk, texts=self._texts_of(kb, talk))

    def _is_gone(self, chunk_id: ChunkId, as_of: int) -> bool:
        """Whether a chunk of an earlier turn was removed since."""
        return self._kb is not None and chunk_id not in self._kb.catalogue.existing([chunk_id])

    def _texts_of(self, kb: KnowledgeBase, talk: Talk) -> dict[ChunkIds, str]:
        """Texts of the chunks of a history, where prompts are text."""
        if not self._up.prompts.needs_texts:
            return {}
        said = {chunk: make_chunk_id(chunk) for each in talk.messages for chunk in each.chunks}
        found = kb.catalogue.chunks(list(said.values()))
        return {ids: found[name].text for ids, name in said.items() if name in found}

    def _learn(self, request: UpstreamRequest, notes: AnswerNotes, lease: ReplicaLease) -> None:
        """Learn the pace of an engine from a prompt that it had not seen."""
        num_tokens = request.prompt.num_tokens - lease.match.exact
        is_guessed = notes.guesses is not None and notes.guesses.right is not None
        if not is_guessed and lease.replica.load == 1:
            self._settings.paces.prefill.note_prefill(num_tokens, lease.held_s)


class FleetAnswerers:
    """An answerer for each model that is asked for. Any thread."""

    def __init__(
        self, upstreams: Upstreams, settings: AnswerSettings, kb: KnowledgeBase | None = None
    ) -> None:
        self._up = upstreams
        self._settings = settings
        self._kb = kb
        self._lock = threading.Lock()
        self._made: dict[str, Answerer[UpstreamPrompt, UpstreamRequest]] = {}

    def stream(self, question: str, **options: Any) -> PieceStream:
        """Answer by the model that the question names, or the usual one. Raises RequestError where
        no upstream has it."""
        called_s = time.perf_counter()
        asked = Question(question, **options)
        upstreams = self._up.for_model(asked.model)
        with self._lock:
            if upstreams.model not in self._made:
                target = FleetTarget(upstreams, self._settings, self._kb)
                self._made[upstreams.model] = Answerer(target, self._settings, self._kb)
            answerer = self._made[upstreams.model]
        return answerer.answer(asked, called_s)

    def check_reuse(self, reuse: str | None, model: str | None) -> None:
        """Raise ConfigError for a strategy that no upstream has for a model."""
        FleetTarget(self._up.for_model(model), self._settings).check_reuse(reuse)
