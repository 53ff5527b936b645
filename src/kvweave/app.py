"""The composition root: opens a model and a knowledge base, and answers.

`Weave` is what the library, the command line and the server share. It may be used from many
threads: one engine computes for all of them.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvweave.answering import Answer, Answering, Note, Piece, TokenLogprob
from kvweave.asking import Asking, Choices, Way, exact_request, keep_record, plain_request
from kvweave.conversations import Conversations, Talk
from kvweave.detokenizer import Detokenizer
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.calibration import BOUND
from kvweave.fuse.profiles import Profile, find_profile
from kvweave.fuse.strategy import (
    NAMES,
    NEEDS_PROFILE,
    ModelFacts,
    Strategy,
    chosen_ratio,
    open_strategy,
)
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.plan.ordering import PROMOTION, OrderPermission
from kvweave.prompt import (
    SYSTEM,
    Document,
    Prompt,
    build_prompt,
    chunk_text,
    lay_out,
    past_messages,
)
from kvweave.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvweave.fuse.chunk_encoder import ChunkEncoder
    from kvweave.ingest.pipeline import IngestOptions
    from kvweave.ingest.report import IngestReport, OnProgress
    from kvweave.ingest.sources import Source
    from kvweave.library import Library, OpenEmbedder
    from kvweave.plan.plan import Plan
    from kvweave.planning import Planning
    from kvweave.seen_chunks import SeenChunks
    from kvweave.speculation import Mode, Speculation, SpeculationConfig
    from kvweave.types import Hit

__all__ = [
    "BOUND",
    "TOP_K",
    "Answer",
    "Answering",
    "Document",
    "Piece",
    "Sampling",
    "TokenLogprob",
    "Weave",
]

T = TypeVar("T")
AUTO = "auto"  # a `reuse` that is no strategy: the planner chooses one
REUSES = ("full", AUTO, *(name for name in NAMES if name != "full"))
ALONE_WAIT_S = 30.0  # work beside answers waits so long for a moment without one
TOP_K = 5  # chunks that are put in front of a question


class LookUp(Protocol):
    """Runs a search, perhaps on another thread, and waits for it."""

    def __call__(self, search: Callable[[], T], /) -> T: ...


class Weave:
    """Answers questions with one loaded model, over given documents or a knowledge base."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        name: str,
        system: str,
        library: "Library | None" = None,
        engine: EngineConfig | None = None,
        speculation: "SpeculationConfig | None" = None,
        promotion: int = PROMOTION,
        *,
        asking: Asking | None = None,
        tenant: str = "",
    ) -> None:
        """`promotion`: requests that bring a chunk which was never ingested before its KV is stored
        with the knowledge base; 0: never. `asking` is another Weave's, whose engine is shared;
        `tenant` is whose knowledge base it is: tenants share no exact KV."""
        self.model_name = name
        self.system = system
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._library = library
        self._planning: Planning | None = None  # opened by the first reuse="auto"
        self._asking = asking or Asking(decoder, engine)
        self._owns_engine = asking is None
        self._tenant = tenant
        self._ingesting = threading.Lock()
        self._speculation: Speculation | None = None
        if library is not None:
            from kvweave import speculation as speculating

            library.encoder.alone = self._alone
            library.forgotten = self._asking.forget
            self._speculation = speculating.Speculation(
                library.kb, self._asking, decoder.device, speculation
            )
        self._conversations = Conversations()
        self._seen = None if library is None else self._watch(library.encoder, promotion)
        self._look_up: LookUp | None = None

    @classmethod
    def open(
        cls,
        kb: str | Path | None = None,
        *,
        model: str = "smollm2",
        device: str = "auto",
        dtype: str = "auto",
        quant: str = "none",
        system: str = SYSTEM,
        embedder: str | None = None,
        encoding: str | None = None,
        extras: Sequence[str] | None = None,
        promotion: int = PROMOTION,
        speculate: "Mode" = "auto",
    ) -> "Weave":
        """Load a model: an embedded name, a folder, a .gguf file or a hub id.

        `kb` is the folder of a knowledge base, made if it is not there; None does without one.
        `embedder` None is the one it was made with, MiniLM for a new one. `encoding` is the
        encoding context of chunk KV ("isolated", "filler:4", "neighbours:10") and `extras` what is
        stored beside it; None, each for itself, is what the knowledge base has, filler without
        extras for a new one. `promotion`: how many requests bring a document that was never
        ingested before its KV is stored with the knowledge base; 0: never. `speculate` computes
        prompts while their chunks are searched for: "auto" where that is expected to gain time,
        "on" always, "off" never.
        """
        folder = locate(model)
        decoder = load_decoder(folder, device=device, dtype=dtype, quant=quant)
        tokenizer = Tokenizer(folder)
        path = Path(model).expanduser()
        name = path.resolve().name if path.exists() else model  # resolved, for `--model .`
        library, speculation = None, None
        if kb is not None:
            from kvweave.library import Library
            from kvweave.speculation import SpeculationConfig

            speculation = SpeculationConfig(speculate)
            library = Library.open(Path(kb), decoder, tokenizer, system, embedder, encoding, extras)
        return cls(
            decoder,
            tokenizer,
            name,
            system,
            library,
            speculation=speculation,
            promotion=promotion,
        )

    def over(
        self,
        folder: Path,
        *,
        open_embedder: "OpenEmbedder | None" = None,
        encoding: str | None = None,
        tenant_salt: str = "",
        look_up: "LookUp | None" = None,
    ) -> "Weave":
        """A Weave with the same model over another knowledge base, made if it is not there.

        The two share an engine. Close this one last. `look_up` runs searches, on threads of its
        choice: a catalogue keeps a connection per thread.
        """
        from kvweave.library import Library

        library = Library.open(
            folder,
            self._decoder,
            self._tokenizer,
            self.system,
            encoding=encoding,
            open_embedder=open_embedder,
            tenant_salt=tenant_salt,
        )
        other = Weave(
            self._decoder,
            self._tokenizer,
            self.model_name,
            self.system,
            library,
            asking=self._asking,
            tenant=tenant_salt,
        )
        other._look_up = look_up
        return other

    def close(self) -> None:
        """Finish writing chunk KV, keep what was learnt of the machine, let go of everything."""
        if self._seen is not None:
            self._seen.close()
        if self._owns_engine:
            self._asking.close()
        if self._planning is not None:
            self._planning.close()
        if self._library is not None:
            self._library.close()

    def __enter__(self) -> "Weave":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def profile(self) -> Profile | None:
        """What was measured of the model: the user's profile, or the packaged one."""
        return find_profile(self._decoder.weights.fingerprint, self._tokenizer.fingerprint)

    @cached_property
    def facts(self) -> ModelFacts:
        """What strategies must know of the model, from its profile if it has one."""
        num_layers = self._decoder.spec.num_layers
        return ModelFacts(num_layers) if self.profile is None else self.profile.facts(num_layers)

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._decoder.spec.max_context

    @property
    def engine(self) -> Engine:
        """What computes; started if it is not yet."""
        return self._asking.engine

    @property
    def library(self) -> "Library":
        """The open knowledge base."""
        if self._library is None:
            raise ConfigError("no knowledge base is open; use Weave.open('./kb') or --kb DIR")
        return self._library

    def ingest(
        self,
        *sources: "Source",
        chunk_kv: bool = False,
        progress: "OnProgress | None" = None,
        options: "IngestOptions | None" = None,
        refresh_neighbours: bool = False,
    ) -> "IngestReport":
        """Bring files, folders or (title, text) pairs in; do only what changed.

        `chunk_kv` also computes and stores the chunks' KV, so that `reuse="reuse"` finds it.
        `options` choose among files, set limits and prune. `refresh_neighbours` is for encoding
        "neighbours": chunks whose neighbours are others by now are computed again.
        """
        with self._ingesting:
            return self.library.ingest(
                sources,
                chunk_kv=chunk_kv,
                progress=progress,
                options=options,
                refresh_neighbours=refresh_neighbours,
            )

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        return self.library.remove(reference)

    def search(self, question: str, k: int = TOP_K) -> "list[Hit]":
        """The chunks of the knowledge base nearest to `question`, best first."""
        look_up = self._look_up or _at_once
        return look_up(lambda: self.library.kb.search(question, k))

    def ask(
        self,
        question: str,
        *,
        documents: Sequence[Document | str] | None = None,
        sampling: Sampling | None = None,
        system: str | None = None,
        k: int = TOP_K,
        reuse: str = "full",
        ratio: float | None = None,
        bound: float = BOUND,
        order: str = "keep",
        conversation_id: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
    ) -> Answer:
        """Answer from `documents`, or from the `k` nearest chunks of the open knowledge base.

        `system` takes the place of the Weave's own system prompt for this question. `reuse` names a
        strategy: "full" prefills everything, "prefix" reuses what is exact, "reuse" takes stored
        chunk KV as it is, "weave" and others recompute a `ratio` of it (their own default if None):
        faster, and not exact. "auto" takes the cheapest way on this machine that calibration allows
        within `bound` (nats per token); `order="free"` lets it move chunks. `Answer.explain` says
        what was done, and `Answer.decision` why.

        `history` are the {"role", "content"} messages said before, the user's first. With a
        `conversation_id` the chunks of those turns stand in the history again, and those it holds
        are not sent twice; conversations of one `tenant` are unknown to others.
        """
        return self.stream(
            question,
            documents=documents,
            sampling=sampling,
            system=system,
            k=k,
            reuse=reuse,
            ratio=ratio,
            bound=bound,
            order=order,
            conversation_id=conversation_id,
            history=history,
            tenant=tenant,
        ).finish()

    def stream(
        self,
        question: str,
        *,
        documents: Sequence[Document | str] | None = None,
        sampling: Sampling | None = None,
        system: str | None = None,
        k: int = TOP_K,
        reuse: str = "full",
        ratio: float | None = None,
        bound: float = BOUND,
        order: str = "keep",
        conversation_id: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
    ) -> Answering:
        """As `ask`, piece by piece.

        `history` are the user and assistant messages in front of the question, a user's first; the
        chunks stand in front of them all. `memory` is that of their conversation: the chunks that
        earlier turns brought stay where they were, and none stands there twice.
        """
        called_s = time.perf_counter()
        permission = check_planned(bound, order)
        if reuse not in REUSES:
            raise RequestError(f"reuse {reuse!r} is unknown; known: {', '.join(REUSES)}")
        if reuse == AUTO:
            if ratio is not None:
                raise RequestError("reuse 'auto' chooses the ratio itself; leave it out")
            strategy = None
        else:
            # a damaged profile is no trouble of who does not use it
            needed = reuse in NEEDS_PROFILE
            facts = self.facts if needed else ModelFacts(self._decoder.spec.num_layers)
            strategy = open_strategy(reuse, facts)
            ratio = chosen_ratio(strategy, ratio)
        tenant = tenant or self._tenant
        talk = self._conversations.talk(tenant, conversation_id, past_messages(history))
        drawn = sampling or Sampling()

        def laid(final: Prompt) -> None:
            talk.sent(question, final.chunks)
            if self._seen is not None and strategy is not None and strategy.reuses == "all":
                self._seen.saw(final.chunks)

        def way_of(chunks: Sequence[tuple[int, ...]]) -> Way:
            """Says nothing to anybody before its first token: it may be a guess."""
            prompt = self._over(chunks, question, system, talk, tenant)
            note = Note(on_laid=laid)
            if strategy is None:
                return self._planned(prompt, drawn, bound, permission, note)
            return self._way(prompt, drawn, strategy, ratio or 0.0, note)

        _refuse_empty(question)
        speculation, look_up = self._speculation, self._look_up or _at_once
        if documents is None and speculation is not None:
            way, choices = look_up(
                lambda: speculation.answer(
                    question, k, lambda hits: way_of([hit.chunk.token_ids for hit in hits])
                )
            )
        else:
            way = way_of(self._texts(documents or ()))
            choices = self._asking.choices(way.request, way.on_first)
        way.note.retrieve_ms = (time.perf_counter() - called_s) * 1e3
        return self._answering(choices, drawn, way.prompt_tokens, called_s, way.note)

    def plan(
        self,
        question: str,
        *,
        documents: Sequence[Document | str] | None = None,
        system: str | None = None,
        k: int = TOP_K,
        bound: float = BOUND,
        order: str = "keep",
        conversation_id: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
    ) -> "Plan":
        """What `ask` with reuse="auto" would do, and what else it would cost. Answers nothing."""
        permission = check_planned(bound, order)
        talk = self._conversations.talk(tenant, conversation_id, past_messages(history))
        prompt = self._prompt(question, documents, system, k, talk, tenant or self._tenant)
        self._asking.check(prompt.token_ids)
        self.library.check_preamble(prompt)
        return self._alone(lambda: self._open_planning().plan(prompt, bound, permission).plan)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, sampling: Sampling | None = None
    ) -> Answering:
        """Continue a conversation of {"role", "content"} messages."""
        called_s = time.perf_counter()
        if not messages:
            raise RequestError("messages is empty; send at least one")
        prompt_ids = self._tokenizer.encode_chat(messages)
        return self._plain(prompt_ids, sampling, called_s)

    def complete(
        self, prompt: str | Sequence[int], *, sampling: Sampling | None = None
    ) -> Answering:
        """Continue a text or token ids, without a chat template."""
        called_s = time.perf_counter()
        ids = self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self._plain(ids, sampling, called_s)

    def build_prompt(
        self,
        question: str,
        documents: Sequence[Document | str] = (),
        system: str | None = None,
    ) -> Prompt:
        """The prompt `ask` would use for these documents, by part."""
        _refuse_empty(question)
        texts = [Document(d) if isinstance(d, str) else d for d in documents]
        words = self.system if system is None else system
        return build_prompt(self._tokenizer, question, texts, words)

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds; a character of several tokens comes with its last one."""
        detokenizer = Detokenizer(self._tokenizer)
        texts = [detokenizer.push(token_id) for token_id in token_ids]
        return [*texts[:-1], texts[-1] + detokenizer.flush()] if texts else []

    def _open_planning(self) -> "Planning":
        """On the engine thread: the first time may measure the machine, with the decoder."""
        if self._planning is None:
            from kvweave.planning import Planning

            self._planning = Planning(
                self.library,
                self._decoder,
                self.facts,
                self.profile,
                engine=self.engine,
                seen=self._seen,
                tenant=self._tenant,
            )
        return self._planning

    def _way(
        self, prompt: Prompt, sampling: Sampling, strategy: Strategy, ratio: float, note: Note
    ) -> Way:
        """A prompt answered as the caller says. Raises RequestError if it cannot be."""
        ids, eos_ids = prompt.token_ids, self._tokenizer.eos_ids
        self._asking.check(ids)
        if strategy.reuses != "all":
            request = exact_request(prompt, sampling, eos_ids, use_tree=strategy.reuses == "exact")
        else:
            self.library.check_preamble(prompt)
            request = self.library.request(prompt, sampling, eos_ids, strategy, ratio)
        return Way(len(ids), request, keep_record(note, prompt), note)

    def _planned(
        self,
        prompt: Prompt,
        sampling: Sampling,
        bound: float,
        order: OrderPermission,
        note: Note,
    ) -> Way:
        """Planned when its turn comes, by what the engine's tree holds then."""
        from kvweave.planning import Wish

        ids = prompt.token_ids
        self._asking.check(ids)
        self.library.check_preamble(prompt)
        wish = Wish(prompt, sampling, self._tokenizer.eos_ids, bound, order, note)
        return Way(
            len(ids),
            lambda: self._open_planning().request(wish),
            lambda ticket: self._open_planning().observe(wish, ticket),
            note,
        )

    def _prompt(
        self,
        question: str,
        documents: Sequence[Document | str] | None,
        system: str | None,
        k: int,
        talk: Talk,
        tenant: str,
    ) -> Prompt:
        """The question behind its history and the chunks that the history does not hold."""
        _refuse_empty(question)
        if documents is None and self._library is not None:
            chunks = [hit.chunk.token_ids for hit in self.search(question, k)]
        else:
            chunks = self._texts(documents or ())
        return self._over(chunks, question, system, talk, tenant)

    def _texts(self, documents: Sequence[Document | str]) -> list[tuple[int, ...]]:
        """Documents of a request as chunks."""
        texts = [Document(d) if isinstance(d, str) else d for d in documents]
        return [tuple(self._tokenizer.encode_text(chunk_text(text))) for text in texts]

    def _over(
        self,
        chunks: Sequence[tuple[int, ...]],
        question: str,
        system: str | None,
        talk: Talk,
        tenant: str,
    ) -> Prompt:
        """The prompt of a question over chunks."""
        held = talk.held(chunks)
        new = [ids for ids in chunks if ids not in held]
        words = self.system if system is None else system
        prompt = lay_out(self._tokenizer, question, new, words, talk.messages)
        return replace(prompt, left_out=tuple(held), tenant=tenant)

    def _watch(self, encoder: "ChunkEncoder", promotion: int) -> "SeenChunks | None":
        if not promotion:
            return None
        from kvweave.seen_chunks import SeenChunks

        return SeenChunks(encoder, self.max_context, self._when_quiet, promotion)

    def _when_quiet(self, work: Callable[[], None]) -> None:
        """Encode something when no answer needs the decoder, or has needed it for long."""
        self._asking.answers.wait_for_none(ALONE_WAIT_S)
        work()

    def _plain(
        self, prompt_ids: Sequence[int], sampling: Sampling | None, called_s: float
    ) -> Answering:
        """Answer a prompt without parts."""
        sampling = sampling or Sampling()
        self._asking.check(prompt_ids)
        request = plain_request(prompt_ids, sampling, self._tokenizer.eos_ids)
        choices = self._asking.choices(request)
        return self._answering(choices, sampling, len(prompt_ids), called_s)

    def _answering(
        self,
        choices: Choices,
        sampling: Sampling,
        prompt_tokens: int,
        called_s: float,
        note: Note | None = None,
    ) -> Answering:
        return Answering(choices, self._tokenizer, sampling, prompt_tokens, called_s, note)

    def _alone(self, job: Callable[[], T]) -> T:
        """Use the decoder between two steps of the engine."""
        return self.engine.run_alone(job)


def _at_once(search: Callable[[], T], /) -> T:
    return search()


def _refuse_empty(question: str) -> None:
    if not question.strip():
        raise RequestError("the question is empty; ask something")


def check_planned(bound: float, order: str) -> OrderPermission:
    """Judge what a caller allows the planner. Raises RequestError."""
    if not 0.0 <= bound < math.inf:
        raise RequestError(f"bound {bound:g} is no number of nats from 0 on; give one such as 0.02")
    if order not in list(OrderPermission):
        raise RequestError(f"order {order!r} is unknown; known: {', '.join(OrderPermission)}")
    return OrderPermission(order)
