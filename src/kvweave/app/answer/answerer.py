"""From a question to the answer in the making: everything in between, wired for one Weave.

    ask ─► prompting ─► ways ─► asking ─► engine
              └── speculation, where a search and a prefill go side by side

Part of the composition root: only `app.py` uses it. Any thread.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvweave.app.answer.answering import AnswerNotes, AnswerStream
from kvweave.app.answer.conversations import Conversations, ConversationScope
from kvweave.app.answer.engine_client import EngineClient, Submission, plain_request
from kvweave.app.answer.prompting import Find, PromptMaker
from kvweave.app.answer.router import Router
from kvweave.app.library.removal_watch import RemovalWatch
from kvweave.app.question import Question
from kvweave.engine.sampling import Sampling
from kvweave.errors import KVWeaveError
from kvweave.model.decoder import Decoder
from kvweave.plan.ordering import PROMOTION
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId

if TYPE_CHECKING:
    from kvweave.app.answer.speculation import Speculation, SpeculationConfig
    from kvweave.app.library.library import Library
    from kvweave.app.library.promotion import ChunkPromotion
    from kvweave.plan.plan import Plan

log = logging.getLogger(__name__)

T = TypeVar("T")
FLUSH_S = 10.0  # at the end, for writes under way


class LookUp(Protocol):
    """Runs a search, perhaps on another thread, and waits for it."""

    def __call__(self, search: Callable[[], T], /) -> T: ...


def at_once(search: Callable[[], T], /) -> T:
    """On the thread that asks."""
    return search()


class Answerer:
    """Answers with one model and, where one is open, its knowledge base."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        asking: EngineClient,
        system: str,
        library: "Library | None" = None,
        find: Find | None = None,
        *,
        speculation: "SpeculationConfig | None" = None,
        promotion: int = PROMOTION,
        tenant: str = "",
        look_up: LookUp = at_once,
        conversations: Conversations | ConversationScope | None = None,
    ) -> None:
        """`find` searches the library; both or neither are given. `look_up` runs what searches and
        submits by itself."""
        self._look_up = look_up
        self._tokenizer = tokenizer
        self.asking = asking
        self.seen: ChunkPromotion | None = None
        self._speculation: Speculation | None = None
        self._deletions: RemovalWatch | None = None
        self._library = library
        if library is not None:
            from kvweave.app.answer import speculation as speculating
            from kvweave.app.library.promotion import watch

            library.encoder.alone = lambda job: asking.engine.run_alone(job)
            library.forgotten = asking.forget
            catalogue = library.kb.catalogue
            deletions = RemovalWatch(
                catalogue.path, catalogue.uid(), asking.heard, asking.forget, library.drop_copies
            )
            self._deletions = deletions

            def is_gone(chunk_id: ChunkId, as_of: int) -> bool:
                deletions.catch_up()  # a request may have found it long ago
                return asking.is_gone(chunk_id, as_of)

            self._speculation = speculating.Speculation(
                library.kb, asking, decoder.device, speculation
            )
            max_context = decoder.spec.max_context
            self.seen = watch(library.encoder, max_context, asking.answers, promotion, is_gone)
        self.ways = Router(decoder, tokenizer, asking, library, self.seen, tenant)
        self.prompting = PromptMaker(
            tokenizer, system, tenant, find, conversations, is_gone=asking.is_gone
        )

    def close(self, *, with_engine: bool) -> None:
        """Finish storing chunks, keep what was learnt of the machine."""
        if self.seen is not None:
            self.seen.close()
        self._look_once_more()
        if with_engine:
            self.asking.close()
        if self._deletions is not None:
            self._deletions.close()
        self.ways.close()

    def _look_once_more(self) -> None:
        """Chunk KV that was written down behind a removal elsewhere goes before we do: nobody would
        look for it later."""
        library, self._library = self._library, None  # closing twice is harmless
        if library is None:
            return
        library.store.flush(FLUSH_S)  # who removes it from now on finds it where it lies
        try:
            self._catch_up()
        except KVWeaveError as error:
            log.warning("chunk KV of removed documents may be left: %s", error)

    def answer(self, ask: Question, called_s: float) -> AnswerStream:
        """The answer to a question. Nothing is computed yet, unless a search guessed."""
        self._catch_up()
        as_of = self.asking.now()
        stated, talk = self.ways.stated(ask), self.prompting.talk(ask)

        def way_of(chunks: Sequence[tuple[int, ...]]) -> Submission:
            note = AnswerNotes(on_laid=lambda laid: talk.sent(ask.question, laid.chunks, as_of))
            prompt = replace(self.prompting.over(chunks, ask, talk), as_of=as_of)
            return self.ways.way(prompt, ask, stated, note)

        speculation = self._speculation
        if ask.documents is None and speculation is not None:
            way, choices = self._look_up(
                lambda: speculation.answer(
                    ask.question, ask.k, lambda hits: way_of([hit.chunk.token_ids for hit in hits])
                )
            )
        else:
            way = way_of(self.prompting.given(ask))
            choices = self.asking.choices(way.request, way.on_first)
        way.note.retrieve_ms = (time.perf_counter() - called_s) * 1e3
        tokens, note = way.prompt_tokens, way.note
        return AnswerStream(choices, self._tokenizer, ask.drawn, tokens, called_s, note)

    def plan(self, ask: Question) -> "Plan":
        """What "auto" would do for a question."""
        self._catch_up()
        return self.ways.plan(self.prompting.prompt(ask), ask)

    def _catch_up(self) -> None:
        """Other processes may have removed documents."""
        if self._deletions is not None:
            self._deletions.catch_up()

    def plain(
        self, prompt_ids: Sequence[int], sampling: Sampling | None, called_s: float
    ) -> AnswerStream:
        """The answer to a prompt without parts."""
        sampling = sampling or Sampling()
        self.asking.check(prompt_ids)
        request = plain_request(prompt_ids, sampling, self._tokenizer.eos_ids)
        choices = self.asking.choices(request)
        return AnswerStream(choices, self._tokenizer, sampling, len(prompt_ids), called_s)
