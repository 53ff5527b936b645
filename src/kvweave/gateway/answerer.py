"""From a question to the answer that a replica computes.

history with its chunks ─► search, stage by stage ─► dedup ─► order ─► prompt ─► RoutedAnswer
                                └► guesses.py
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvweave.app.answer.answerer import HISTORY_SHARE, AnswerSettings
from kvweave.app.answer.citations import CitedAnswer
from kvweave.app.answer.nothing_found import NOTHING_TEXT, NothingFound, SaidAnswer
from kvweave.app.answer.piece_stream import PieceStream
from kvweave.app.answer.recognised import conversation_name
from kvweave.app.answer.rewriting import SAMPLING, read_rewritten, rewriting_messages
from kvweave.app.answer.sources import RetrievedChunk, routed_sources
from kvweave.app.answer.speculation import SpeculationConfig
from kvweave.app.answer.talk import Talk
from kvweave.app.question import AUTO, PLAIN_REUSES, Question
from kvweave.app.sampling_defaults import SamplingDefaults
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import ConfigError, PromptTooLong, RequestError
from kvweave.gateway.answer import AnswerStory, RoutedAnswer
from kvweave.gateway.bodies import UpstreamRequest
from kvweave.gateway.chunk_order import ChunkOrder
from kvweave.gateway.fleet import Fleet, ReplicaLease
from kvweave.gateway.guesses import PrefillGuess, ReadyRequest
from kvweave.gateway.prompts import (
    ChunkIds,
    PromptMaker,
    PromptWords,
    TextPrompts,
    chat_messages,
)
from kvweave.kv.config import TierConfig
from kvweave.plan.retrieval import (
    RetrievalResult,
    SpeculationLog,
    SpeculationRecord,
    Speculator,
    ids_of,
    retrieve,
)
from kvweave.plan.search_pace import MAX_STAGES
from kvweave.text.length import refuse_long
from kvweave.text.prompt import Document, PastMessage, chunk_text, past_messages
from kvweave.text.tokenizer import Tokenizer
from kvweave.text.tool_calls import has_tool_parts
from kvweave.types import ChunkId, Hit

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

    def of(self, model: str | None) -> "Upstreams":
        """The same for another model. Its tokenizer is not here, so that prompts go as text. Raises
        RequestError where no upstream has it."""
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


class MadeRequest(NamedTuple):
    """A request, and what was decided on the way to it."""

    request: UpstreamRequest
    chunks: tuple[ChunkIds, ...]  # in front of the question, in the order they are sent in
    retrieved: tuple[RetrievedChunk, ...]  # for the question: found, or brought
    left_out: int  # chunks that the history holds
    ordered_by: str
    talk: Talk  # as it was laid out


Generation = PrefillGuess | ReadyRequest
StartGeneration = Callable[[Sequence[Hit], bool], Generation]


class RoutedAnswerers:
    """One for each model that is asked for. Any thread."""

    def __init__(
        self, upstreams: Upstreams, settings: AnswerSettings, kb: KnowledgeBase | None = None
    ) -> None:
        self._up = upstreams
        self._settings = settings
        self._kb = kb
        self._lock = threading.Lock()
        self._made: dict[str, RoutedAnswerer] = {}

    def of(self, model: str | None) -> "RoutedAnswerer":
        """None: the usual one. Raises RequestError where no upstream has the model."""
        upstreams = self._up.of(model)
        with self._lock:
            if upstreams.model not in self._made:
                made = RoutedAnswerer(upstreams, self._settings, self._kb)
                self._made[upstreams.model] = made
            return self._made[upstreams.model]


class RoutedAnswerer:
    """Answers with a fleet and, where there is one, a knowledge base. Any thread."""

    def __init__(
        self, upstreams: Upstreams, settings: AnswerSettings, kb: KnowledgeBase | None = None
    ) -> None:
        self._up = upstreams
        self._fleet = upstreams.fleet
        self._settings = settings
        self._kb = kb
        self._order = ChunkOrder(upstreams.fleet)
        self._speculation = settings.speculation or SpeculationConfig()

    def check_reuse(self, reuse: str | None) -> None:
        """Raise ConfigError for a strategy that no upstream has."""
        if reuse not in (None, *PLAIN_REUSES) and not self._fleet.can_fuse(self._up.model):
            raise ConfigError(
                f"reuse {reuse!r} needs chunk KV, and no upstream reuses it; leave it out, or run "
                "upstreams with kvweave's connector"
            )

    def answer(self, asked: Question, called_s: float) -> PieceStream:
        """The answer to a question, searched for. Nothing is sent for it yet, but guesses."""
        usual = self._settings.usual
        kb_order = None if self._kb is None else self._kb.settings.order
        asked = self._rewritten(asked.filled(usual, kb_order))
        texts: list[str] = []
        try:
            answering = self._begin(asked, called_s, texts)
        except NothingFound:
            return SaidAnswer(usual.nothing_text or NOTHING_TEXT, called_s, asked.query)
        return CitedAnswer(answering, texts) if asked.cite else answering

    def _begin(self, asked: Question, called_s: float, cited: list[str]) -> RoutedAnswer:
        """The answer to a question in which nothing is left open; the texts of its chunks are added
        to `cited`. Raises NothingFound."""
        try:
            self.check_reuse(asked.reuse)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        if asked.tool_use is not None or has_tool_parts([*asked.history, *asked.since]):
            raise RequestError(NO_TOOLS)
        self._refuse_long(asked)
        talk = self._talk(asked)
        texts = self._texts_of(talk.messages)
        story = AnswerStory(called_s)
        if asked.documents is not None:
            made = self._made(asked, talk, self._given(asked, texts), texts)
        elif self._kb is None:
            raise ConfigError(NO_KB)
        else:
            made = self._found(self._kb, asked, talk, texts, story)

        def heard(lease: ReplicaLease) -> None:
            self._learn(lease, made, story)
            self._settings.uses.saw([c.id for c in made.retrieved if c.id is not None])
            made.talk.sent(asked.question, made.chunks)

        story.on_first = heard
        story.sources = routed_sources(made.retrieved, made.request.prompt.places)
        story.left_out, story.ordered_by = made.left_out, made.ordered_by
        story.query = asked.query
        cited += [self._up.tokenizer.decode(chunk.token_ids) for chunk in made.retrieved]
        return RoutedAnswer(self._fleet, made.request, story)

    def _rewritten(self, asked: Question) -> Question:
        """A follow-up with the query that the model makes of it, where that is asked for."""
        is_searched = asked.documents is None and self._kb is not None
        if not (asked.rewrite and asked.history and is_searched):
            return asked
        tenant = asked.tenant or self._settings.tenant
        messages = rewriting_messages(asked.question, asked.history)
        request = UpstreamRequest(chat_messages(messages, tenant.encode()), SAMPLING, tenant)
        made = RoutedAnswer(self._fleet, request, AnswerStory(time.perf_counter())).finish()
        return replace(asked, query=read_rewritten(made.text))

    # ── searching ────────────────────────────────────────────────────────────

    def _found(
        self,
        kb: KnowledgeBase,
        asked: Question,
        talk: Talk,
        texts: dict[ChunkIds, str],
        story: AnswerStory,
    ) -> MadeRequest:
        """The request for the chunks nearest to a question, with guesses meanwhile."""

        def made(hits: Sequence[Hit]) -> MadeRequest:
            if not hits and asked.nothing_found == "say" and not talk.holds_chunks:
                raise NothingFound
            texts.update({hit.chunk.token_ids: hit.chunk.text for hit in hits})
            return self._made(asked, talk, [RetrievedChunk.found(hit) for hit in hits], texts)

        num_stages = self._num_stages(asked) if asked.search.is_staged else 1
        if num_stages == 1:
            hits = self._settings.look_up(lambda: self._search(kb, asked))
            story.retrieve_ms = (time.perf_counter() - story.called_s) * 1e3
            return made(hits)
        lists: dict[int, MadeRequest] = {}

        def start(hits: Sequence[Hit], held: bool) -> Generation:
            each = made(hits)
            generation: Generation = (
                PrefillGuess(self._fleet, each.request, self._up.threads)
                if held
                else ReadyRequest(each.request)
            )
            lists[id(generation)] = each
            return generation

        got = self._settings.look_up(lambda: self._speculate(kb, asked, start, num_stages))
        story.retrieve_ms = (time.perf_counter() - story.called_s) * 1e3
        guess = got.generation
        if isinstance(guess, PrefillGuess):
            story.guess = guess
        story.speculation = lambda: _record(got.said, guess)
        return lists[id(guess)]

    def _num_stages(self, asked: Question) -> int:
        mode = asked.speculate or self._speculation.mode
        if mode == "off":
            return 1
        paces = self._settings.paces
        if mode == "on":
            return MAX_STAGES
        return 1 if paces.prefill.row_s is None else paces.search.num_stages()

    def _search(self, kb: KnowledgeBase, asked: Question) -> list[Hit]:
        how = asked.search
        if not how.is_staged:
            return kb.search(asked.searched, asked.num_chunks, how)
        vector = kb.embedder.embed_query(asked.searched)
        kb.load_index()  # once, and no part of what a search takes
        started_s = time.perf_counter()
        hits = kb.search(vector, asked.num_chunks, how)
        taken_s = time.perf_counter() - started_s
        self._settings.paces.search.searched(taken_s, [ids_of(hits)], 1)
        return hits

    def _speculate(
        self, kb: KnowledgeBase, asked: Question, start: StartGeneration, most: int
    ) -> RetrievalResult[Generation]:
        vector = kb.embedder.embed_query(asked.searched)
        num_stages = kb.num_stages(asked.num_chunks, most)
        stages = kb.search_staged(vector, asked.num_chunks, num_stages, asked.search)
        paces, mode = self._settings.paces, asked.speculate or self._speculation.mode
        row_s, prefill_s = paces.prefill.row_s, paces.prefill.prefill_s

        def is_worth(stage: int) -> bool:
            if mode == "on" or row_s is None:
                return stage < num_stages  # a guess at the last stage is none
            return paces.search.is_worth(stage, num_stages, row_s * STEP_ROWS, prefill_s)

        most_prefills = self._speculation.max_prefill_bs or GUESSES_PER_REPLICA
        pending = self._fleet.pending_prefills
        speculator: Speculator[Generation] = Speculator(start, pending, most_prefills, is_worth)
        got = retrieve(stages, speculator)
        guessed = got.said.started > 0
        paces.search.searched(got.said.search_s, got.lists, num_stages, guessed=guessed)
        return got

    def _learn(self, lease: ReplicaLease, made: MadeRequest, story: AnswerStory) -> None:
        """Learn the pace of an engine from a prompt that it had not seen."""
        num_tokens = made.request.prompt.num_tokens - lease.match.exact
        if story.guess is None and lease.replica.load == 1:
            self._settings.paces.prefill.computed(num_tokens, lease.held_s)

    # ── prompts ──────────────────────────────────────────────────────────────

    def _made(
        self,
        asked: Question,
        talk: Talk,
        retrieved: Sequence[RetrievedChunk],
        texts: dict[ChunkIds, str],
    ) -> MadeRequest:
        """The question behind its history and the chunks that the history does not hold."""
        chunks = [chunk.token_ids for chunk in retrieved]
        laid = talk.bringing(chunks)
        held = laid.held(chunks)
        new = [ids for ids in dict.fromkeys(chunks) if ids not in held]
        system = self._settings.system if asked.system is None else asked.system
        tenant = asked.tenant or self._settings.tenant
        salt, model = tenant.encode(), self._up.model
        words = PromptWords(asked.question, new, system, laid.messages, salt, model)
        prompts = self._up.prompts
        ordered = self._order.choose(prompts.front(words, texts.__getitem__), new, asked.permission)
        prompt = prompts.make(words._replace(chunks=ordered.chunks), texts.__getitem__)
        most = self._up.max_context
        if most is not None and prompt.num_tokens >= most and laid.plain is not None:
            return self._made(asked, laid.plain, retrieved, texts)
        if most is not None and prompt.num_tokens >= most and prompt.chunks:
            raise PromptTooLong(
                f"the prompt has {prompt.num_tokens:,} tokens, the model's context {most:,}; ask "
                "for fewer chunks"
            )
        request = UpstreamRequest(
            prompt,
            asked.sampling or self._up.sampling.sampling(),
            tenant,
            None if asked.reuse == AUTO else asked.reuse,
            asked.ratio,
            asked.bound,
        )
        return MadeRequest(
            request, tuple(ordered.chunks), tuple(retrieved), len(held), ordered.by, laid
        )

    def _refuse_long(self, asked: Question) -> None:
        """What no context could hold is not tokenised here, where the model's tokenizer is."""
        most = self._up.max_context
        if most is None or self._up.prompts.needs_texts:
            return
        texts = [asked.question, asked.system or ""]
        texts += [str(message.get("content")) for message in asked.history]
        for each in asked.documents or ():
            texts.append(each if isinstance(each, str) else each.title + each.text)
        refuse_long(self._up.tokenizer, texts, most)

    def _given(self, asked: Question, texts: dict[ChunkIds, str]) -> list[RetrievedChunk]:
        """The documents of a request as chunks."""
        chunks = []
        for each in asked.documents or ():
            document = Document(each) if isinstance(each, str) else each
            text = chunk_text(document)
            ids = tuple(self._up.tokenizer.encode_text(text))
            chunks.append(RetrievedChunk.brought(document, ids))
            texts[ids] = text
        return chunks

    def _talk(self, asked: Question) -> Talk:
        """What was said before, with the chunks that stood there."""
        past, tenant = past_messages(asked.history), asked.tenant or self._settings.tenant
        most = self._up.max_context
        most_tokens = None if most is None else most // HISTORY_SHARE
        conversations = self._settings.conversations
        name = conversation_name(asked, past, is_searched=self._kb is not None)
        if not (name and past):
            return conversations.talk(tenant, name, past, most_tokens=most_tokens)
        # reads the catalogue, so where searches do
        return self._settings.look_up(
            lambda: conversations.talk(tenant, name, past, self._is_gone, most_tokens)
        )

    def _is_gone(self, chunk_id: ChunkId, as_of: int) -> bool:
        """Whether a chunk of an earlier turn was removed since."""
        return self._kb is not None and chunk_id not in self._kb.catalogue.known([chunk_id])

    def _texts_of(self, messages: Sequence[PastMessage]) -> dict[ChunkIds, str]:
        """Of the chunks of a history, where prompts are text."""
        wanted = {chunk: make_chunk_id(chunk) for message in messages for chunk in message.chunks}
        kb = self._kb
        if not wanted or kb is None or not self._up.prompts.needs_texts:
            return {}
        found = self._settings.look_up(lambda: kb.catalogue.chunks(list(wanted.values())))
        return {ids: found[name].text for ids, name in wanted.items() if name in found}


def _record(said: SpeculationLog[Generation], used: Generation) -> SpeculationRecord:
    right = said.right
    guess = used if isinstance(used, PrefillGuess) else None
    return SpeculationRecord(
        id=said.id,
        stages=said.stages,
        guesses=said.started,
        right_stage=None if right is None else right.stage,
        search_ms=said.search_s * 1e3,
        hidden_ms=said.ahead_s * 1e3,
        saved_tokens=guess.request.prompt.num_tokens if guess and guess.is_computed else 0,
        wasted_tokens=sum(
            wrong.request.prompt.num_tokens
            for wrong in said.wrong
            if isinstance(wrong, PrefillGuess) and wrong.is_computed
        ),
    )
