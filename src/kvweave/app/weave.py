"""The face of kvweave: documents in, answers out.

`Weave` is what the library, the command line and the server share.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from kvweave.app.answer.answer_stream import (
    REPETITION,
    Answer,
    AnswerStream,
    Piece,
    PieceStream,
    TokenLogprob,
)
from kvweave.app.answer.answerer import Answerer
from kvweave.app.answer.engine_target import EngineTarget
from kvweave.app.answer.notes import AnswerSource
from kvweave.app.answer.question import (
    AUTO,
    BOUND,
    TOP_K,
    ChatOptions,
    CompletionOptions,
    PlainOptions,
    Question,
    SpeculationMode,
)
from kvweave.app.answer.settings import NO_LIBRARY, AnswerSettings, Fields
from kvweave.app.answer.wrapped_answers import ToolAnswer
from kvweave.app.library.library import Library, OpeningOptions, embedder_opener
from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.library.store_tiers import check_store
from kvweave.config import (
    LibrarySettings,
    ModelChoice,
    SpeculationSettings,
    WeaveConfig,
    given_values,
)
from kvweave.corpus.settings import read_settings
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError, RequestError
from kvweave.metrics import Metrics, Sample
from kvweave.plan.ordering import PROMOTION
from kvweave.text.detokenizer import texts_of
from kvweave.text.prompt import (
    SYSTEM,
    Document,
    Prompt,
    build_prompt,
    chat_prompt,
    plain_prompt,
    refuse_long,
    spanned_prompt,
)
from kvweave.text.tool_calls import ToolCall, texts_of_tools

if TYPE_CHECKING:
    from kvweave.app.answer.answer_details import AnswerDetails
    from kvweave.app.audit.auditor import Auditor
    from kvweave.app.library.kv_progress import KVProgress
    from kvweave.calibrate.profiles import Profile
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.corpus.search import SearchOptions
    from kvweave.ingest.report import IngestReport, OnProgress
    from kvweave.ingest.sources import IngestOptions, Source
    from kvweave.plan.plan import Plan
    from kvweave.types import Hit

__all__ = [
    "AUTO",
    "BOUND",
    "REPETITION",
    "TOP_K",
    "Answer",
    "AnswerSource",
    "AnswerStream",
    "Document",
    "Piece",
    "Sampling",
    "TokenLogprob",
    "ToolCall",
    "Weave",
]


log = logging.getLogger(__name__)

# Threads that compute must end before Python does: one that is stopped within a kernel takes the
# process down with SIGABRT.
_OPEN: "weakref.WeakSet[Weave]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN.clear)  # the child has none of these threads


@atexit.register
def _close_all() -> None:
    for weave in sorted(_OPEN, key=lambda one: one._owns_runtime):  # what shares an engine first
        try:
            weave.close()
        except Exception:  # the others are closed nevertheless; nobody is left to count it
            log.exception("a Weave that was left open did not close")


class Weave:
    """Answers questions with one loaded model, over given documents or a knowledge base.

    May be used from many threads: one engine computes for all of them. `close` it when done, or use
    `with`; one that is still open when Python ends is closed then.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        library: Library | None = None,
        settings: AnswerSettings | None = None,
        *,
        owns_runtime: bool = True,
    ) -> None:
        """Closes the library, and the runtime unless others share it (`owns_runtime`)."""
        self.runtime = runtime  # the loaded model, to be shared with another Weave
        self._library = library
        self._settings = settings or AnswerSettings()
        self._owns_runtime = owns_runtime
        self._ingesting = threading.Lock()
        self._target = EngineTarget(runtime, library, self._settings)
        kb = None if library is None else library.kb
        self._answerer = Answerer(self._target, self._settings, kb)
        _OPEN.add(self)

    @classmethod
    def open(
        cls,
        kb: str | Path | None = None,
        *,
        model: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quant: str = "auto",
        system: str = SYSTEM,
        embedder: str | None = None,
        encoding: str | None = None,
        promotion: int = PROMOTION,
        speculate: SpeculationMode = "auto",
        background_kv: bool = False,
    ) -> Self:
        """Load a model: an embedded name, a folder, a .gguf file or a hub id. None is kvweave's
        default, or a smaller model with a warning where that cannot be had.

        `kb` is the folder of a knowledge base, made if it is not there, whose embedder is loaded as
        well; None does without one. `embedder` None is the one it was made with, MiniLM for a new
        one. `encoding` is the encoding context of chunk KV ("isolated", "filler:4", "neighbours:3";
        "neighbours" are as many as calibration found for the model, 3 if it did not); None is what
        the knowledge base has, filler for a new one. `promotion`: how many requests bring a
        document that was never ingested before its KV is stored with the knowledge base; 0: never.
        `speculate` computes prompts while their chunks are searched for: "auto" where that is
        expected to gain time, "on" always, "off" never. `background_kv` makes the KV of chunks that
        have none in idle time, for as long as this Weave is open: `kv_progress` says how far it is.
        """
        config = WeaveConfig(
            ModelChoice(None if model is None else str(model), str(device), dtype, quant, system),
            LibrarySettings(encoding=encoding, promotion=promotion),
            speculation=SpeculationSettings(speculate),
        )
        return cls.from_config(config, kb, embedder=embedder, background_kv=background_kv)

    @classmethod
    def from_config(
        cls,
        config: WeaveConfig,
        kb: str | Path | None = None,
        *,
        embedder: str | None = None,
        background_kv: bool = False,
        engine: EngineConfig | None = None,
    ) -> Self:
        """Load what a configuration says: `kvweave.config.load_config` reads one from file and
        variables. With `background_kv` it says as well whether and how that is made. `engine` goes
        before the configuration's."""
        if kb is not None:
            check_store(config.store)
        engine = engine or EngineConfig(**given_values(config.engine))
        runtime = ModelRuntime.open(config.model, engine)
        settings = AnswerSettings.from_config(config)
        if kb is None:
            return cls(runtime, settings=settings)
        options = KVOptions.from_config(config)
        if background_kv:
            options = replace(options, background=BackgroundKV.from_config(config))
        library = Library.open(
            Path(kb),
            runtime,
            options,
            embedder=embedder,
            new_embedder=config.library.embedder,
            open_embedder=embedder_opener(config.library),
            promotion=config.library.promotion,
        )
        with ExitStack() as stack:  # an embedder that does not load leaves nothing open
            stack.callback(library.close)
            library.kb.warm()
            stack.pop_all()
        return cls(runtime, library, settings)

    def over(
        self,
        folder: Path,
        options: KVOptions,
        settings: AnswerSettings,
        **how: Unpack[OpeningOptions],
    ) -> Self:
        """Another with the same model over another knowledge base, made if it is not there. The two
        share an engine: close this one last."""
        library = Library.open(folder, self.runtime, options, **how)
        return type(self)(self.runtime, library, settings, owns_runtime=False)

    def close(self) -> None:
        """End what runs and give everything back. Harmless the second time."""
        _OPEN.discard(self)
        if self._library is not None:
            self._library.settle()
        self._target.settle()
        if self._owns_runtime:
            self.runtime.close()
        self._target.close()
        if self._library is not None:
            self._library.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- documents

    def ingest(
        self,
        *sources: "Source",
        chunk_kv: bool = False,
        progress: "OnProgress | None" = None,
        options: "IngestOptions | None" = None,
        refresh_neighbours: bool = False,
        only_new: bool = False,
    ) -> "IngestReport":
        """Bring files, folders or (title, text) pairs in; do only what changed.

        `chunk_kv` also computes and stores the chunks' KV before it returns, so that
        `reuse="reuse"` finds it; a Weave that was opened with `background_kv` makes it by itself.
        `options` choose among files, set limits and prune. `refresh_neighbours` is for encoding
        "neighbours": chunks whose neighbours are others by now are computed again. `only_new`
        computes KV of the chunks that come, without a look at each of the others; the first time,
        and after an ingest without KV, all are looked at.
        """
        with self._ingesting:
            return self.library.ingest(
                sources,
                chunk_kv=chunk_kv,
                progress=progress,
                options=options,
                refresh_neighbours=refresh_neighbours,
                only_new=only_new,
            )

    def remove_all(self) -> bool:
        """Remove every document, and all chunk KV. False: a remote tier could not be told; it is,
        once it answers, while this is open."""
        return self.library.remove_all()

    def kv_progress(self) -> "KVProgress | None":
        """How far the chunk KV is that is made in the background; None: none is."""
        return self.library.kv_progress()

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        return self.library.remove(reference)

    def search(
        self, question: str, k: int = TOP_K, how: "SearchOptions | None" = None
    ) -> "list[Hit]":
        """The chunks of the knowledge base nearest to `question`, best first. `how` they are found:
        by vector, by words or by both, with a least score, among documents with some metadata; None
        is as configured."""
        return self._answerer.search(question, k, how)

    # ---- answers

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer from `documents`, or from the `k` nearest chunks of the open knowledge base.

        `system` takes the place of the Weave's own system prompt for this question. `reuse` names a
        strategy: "full" prefills everything, "prefix" reuses what is exact, "reuse" takes stored
        chunk KV as it is, "weave" and others recompute a `ratio` of it (their own default if None):
        faster, and not exact. "auto" takes the cheapest option on this machine that calibration
        allows within `bound` (nats per token). Without `reuse`, a `ratio` means "weave"; without
        both it is "auto" where KV of the chunks is stored and this machine was measured before,
        else "prefix". `order` says whether chunks may move to where more of them is exact: "free",
        "as_found", or "auto", if calibration found that harmless. `Answer.explain` says what was
        done, and `Answer.decision` why.

        `history` are the {"role", "content"} messages said before, the user's first. With a
        `conversation_id` the chunks of those turns stand in the history again, and those it holds
        are not sent twice; without one, unless `recognise` is False, where most of what is found
        stood there. Conversations of one `tenant` are unknown to others.

        `retrieval` finds chunks by "vector", by "words" or "hybrid"; those with a score below
        `min_score` are left out, and a `filter` takes those of documents with such metadata.
        `rewrite` has the model put a follow-up so that a search understands it (`Answer.query`).
        Where nothing is found the answer says so (`Answer.nothing_found`), unless `nothing_found`
        is "answer". `cite` puts numbers of sources behind sentences. `tools` are as in `chat`; the
        calls that the model made for this very question, and their results, are `since`.
        """
        return self.stream(question, **options).finish()

    def sampling(
        self, asked: Fields = None, built_in: Fields = None, model: str | None = None
    ) -> Sampling:
        """How an answer is drawn that is `asked` to be so (fields of `Sampling`): the rest is as
        the configuration has it, then the model's generation_config.json, then `built_in`.

        An answer without a `sampling` is drawn by `sampling()`; a `Sampling` that a caller makes
        counts as it is.
        """
        self._refuse_other(model)
        return self._target.sampling.sampling(asked, built_in)

    def stream(self, question: str, **options: Any) -> PieceStream:
        """Answer what `ask` answers, piece by piece."""
        called_s = time.perf_counter()
        self._refuse_other(options.get("model"))
        return self._answerer.answer(Question(question, **options), called_s)

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        """Raise RequestError for a `reuse` that `ask` would refuse, ConfigError for one that this
        model is not ready for."""
        self._refuse_other(model)
        self._target.router.open_named(reuse, ratio)

    def plan(self, question: str, **options: Any) -> "Plan":
        """What `ask` with reuse="auto" would do, and what else it would cost. Answers nothing."""
        laid = self._answerer.lay_out(Question(question, **options), time.perf_counter())
        return self._target.router.preview(laid.prompt, laid.words.asked.question)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> PieceStream:
        """Continue a conversation of {"role", "content"} messages. What is exact of earlier turns,
        or of others of the `tenant` that began alike, is not computed again unless `reuse` is
        "full".

        `tools` are functions that the model may call, as OpenAI's API has them; `Answer.tool_calls`
        has what it calls. An assistant's message brings its calls back as "tool_calls", and their
        results are messages of the role "tool"."""
        called_s = time.perf_counter()
        self._refuse_other(options.get("model"))
        if not messages:
            raise RequestError("messages is empty; send at least one")
        plain = PlainOptions.from_chat(options)
        use = plain.tool_use
        tokenizer, contents = self.runtime.tokenizer, [str(m.get("content")) for m in messages]
        contents += texts_of_tools(() if use is None else use.tools, messages)
        refuse_long(tokenizer, contents, self.max_context)
        prompt = chat_prompt(tokenizer, messages, use)
        last = str(messages[-1].get("content", ""))
        made = self._target.answer_plain(prompt, plain, called_s, last)
        return made if use is None else ToolAnswer(made, use)

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CompletionOptions]
    ) -> AnswerStream:
        """Continue a text or token ids, without a chat template. As `chat` otherwise. `transfer`
        says where chunks stand among token ids: their KV is reused as it is for documents, and
        chunks that it says are no more are forgotten, if requests brought them."""
        called_s = time.perf_counter()
        self._refuse_other(options.get("model"))
        tokenizer, transfer = self.runtime.tokenizer, options.get("transfer")
        if isinstance(prompt, str):
            refuse_long(tokenizer, [prompt], self.max_context)
        ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        tenant = options.get("tenant", "")
        plain = PlainOptions(options.get("sampling"), options.get("reuse"), tenant)
        if transfer is not None and transfer.forget:
            self._target.forget_brought(transfer.forget, tenant)
        if transfer is not None and transfer.chunks:
            if isinstance(prompt, str):
                raise RequestError("spans of chunks are spans of token ids; send the prompt as ids")
            parts = spanned_prompt(ids, transfer.chunks, transfer.preamble, transfer.asked)
            return self._target.answer_spanned(parts, transfer, plain, called_s)
        return self._target.answer_plain(plain_prompt(ids), plain, called_s)

    def build_prompt(
        self,
        question: str,
        documents: Sequence[Document | str] = (),
        system: str | None = None,
    ) -> Prompt:
        """The prompt `ask` would use for these documents, by part."""
        asked = Question(question, documents, system=self.system if system is None else system)
        given, words = asked.given_documents, asked.system or ""
        return build_prompt(self.runtime.tokenizer, question, given, words)

    def details(self, answer: Answer, queue_s: float = 0.0) -> "AnswerDetails":
        """How an answer of this Weave, or of one over the same model, came about: its prompt token
        by token, layer by layer, and when what happened, from `queue_s` before it was begun."""
        from kvweave.app.answer.answer_details import details_of

        return details_of(answer, self.runtime.tokenizer, queue_s)

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds; a character of several tokens comes with its last one."""
        return texts_of(self.runtime.tokenizer, token_ids)

    # ---- what it is made of

    @property
    def weights_words(self) -> str:
        """What the model's weights are and how they are multiplied, for people."""
        return self.runtime.decoder.weights_words

    @property
    def model_name(self) -> str:
        return self.runtime.name

    def models(self) -> dict[str, int | None]:
        """The one that is loaded, and its context. A gateway may have several."""
        return {self.model_name: self.max_context}

    def models_of(self, folder: Path) -> list[str]:
        """The one that is loaded, if the knowledge base is new or was cut with its tokenizer."""
        stored = read_settings(folder)
        is_fitting = stored is None or stored.tokenizer == self.runtime.tokenizer.fingerprint
        return [self.model_name] if is_fitting else []

    def why_unready(self) -> None:
        """Nothing: what is wrong with the engine is found by those who watch it."""

    def _refuse_other(self, model: str | None) -> None:
        if model not in (None, self.model_name):
            raise RequestError(f"no model {model!r} here; this is {self.model_name!r}")

    @property
    def system(self) -> str:
        """The system prompt, unless a question brings another."""
        return self._settings.system

    @property
    def bound(self) -> float:
        """Nats per token that reuse may cost, unless a question says otherwise."""
        return self._settings.usual.quality.bound

    @property
    def profile(self) -> "Profile | None":
        """What was measured of the model: the user's profile, or the packaged one."""
        return self._target.measured.profile

    @property
    def engines(self) -> "tuple[Weave, ...]":
        """This Weave, alone."""
        return (self,)

    def engine_of(self, model: str | None) -> "Weave":
        """This Weave. Raises RequestError for another model."""
        self._refuse_other(model)
        return self

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.runtime.max_context

    @property
    def engine(self) -> Engine:
        """What computes; started if it is not yet."""
        return self.runtime.client.engine

    @property
    def document_tiers(self) -> tuple[str, ...]:
        """Tiers that keep chunk KV of documents without a knowledge base, the fastest first."""
        documents = self._target.documents
        return () if documents is None else documents.tiers

    @property
    def library(self) -> Library:
        """The open knowledge base."""
        if self._library is None:
            raise ConfigError(NO_LIBRARY)
        return self._library

    @property
    def kb(self) -> "KnowledgeBase":
        """The documents of the open knowledge base."""
        return self.library.kb

    def peek_kv(self, kb: "KnowledgeBase", tenant: str) -> "KVProgress":
        """How far the chunk KV of a knowledge base is that is not open, by what is on its disk."""
        from kvweave.app.library.kv_progress import progress_on_disk

        return progress_on_disk(kb)

    def metrics(self) -> Iterator[Metrics]:
        """Counters of the store and of the audit, brought up to date."""
        store = None if self._library is None else self._library.store
        if self._target.documents is not None:
            store = self._target.documents.opened_store
        if store is not None:
            store.update_gauges()
            if self._library is not None:
                _gauge(self._library.kv_progress(), store.metrics)
            yield store.metrics
        yield self.auditor.metrics

    def catch_up(self) -> None:
        """Hear of what other processes have removed from the open knowledge base."""
        if self._library is not None:
            self._library.catch_up()

    def samples(self) -> Iterator[Sample]:
        """What the engine counts."""
        for name, value in self.runtime.client.stats().items():
            yield Sample(f"engine_{name}", (), value, is_counter=False)

    @property
    def auditor(self) -> "Auditor":
        """Computes a share of fused answers exactly in idle time, and knows what that found."""
        return self._target.auditor

    def measure(self) -> None:
        """Measure this machine for reuse="auto" now, unless it was measured before; otherwise the
        first question with "auto" waits for it. Seconds, in which nothing is answered."""
        self._target.measured.measure()

    def is_at_rest(self) -> bool:
        """No request that is over still holds chunk KV of the open knowledge base. Waits for the
        engine's step, in which it hears of those that have left."""
        self.engine.run_alone(lambda: None)
        return self.library.store.num_pinned() == 0


def _gauge(progress: "KVProgress | None", metrics: Metrics) -> None:
    """How far the chunk KV is that is made in the background."""
    if progress is not None:
        metrics.gauge("kv_chunks_done", progress.chunks_done)
        metrics.gauge("kv_chunks_left", progress.chunks_total - progress.chunks_done)
        metrics.gauge("kv_chunks_in_front", progress.chunks_in_front)
        metrics.gauge("kv_chunks_bytes", progress.num_bytes)
        metrics.gauge("kv_left_seconds", progress.eta_s or 0.0)
        metrics.gauge("kv_full", progress.state == "full")
        calibration = progress.calibration
        if calibration is not None:
            metrics.gauge("kv_calibration_questions", calibration.asked)
            metrics.gauge("kv_calibration_open", calibration.ratio is not None)
