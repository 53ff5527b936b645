"""The composition root: opens a model and a knowledge base, and answers.

`Weave` is what the library, the command line and the server share. It may be used from many
threads: one engine computes for all of them.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvweave.answering import Answer, Answering, Piece, TokenLogprob
from kvweave.ask import AUTO, BOUND, REUSES, TOP_K, Ask, AskOptions, PlanOptions
from kvweave.asking import Asking
from kvweave.conversations import Conversations, Part
from kvweave.detokenizer import texts_of
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.sampling import Sampling
from kvweave.errors import RequestError
from kvweave.fuse.profiles import Profile
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.plan.ordering import PROMOTION
from kvweave.prompt import SYSTEM, Document, Prompt
from kvweave.replying import LookUp, Replying, at_once
from kvweave.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvweave.ingest.pipeline import IngestOptions
    from kvweave.ingest.report import IngestReport, OnProgress
    from kvweave.ingest.sources import Source
    from kvweave.library import Library, OpenEmbedder
    from kvweave.plan.plan import Plan
    from kvweave.speculation import Mode, SpeculationConfig
    from kvweave.types import Hit

__all__ = [
    "AUTO",
    "BOUND",
    "REUSES",
    "TOP_K",
    "Answer",
    "Answering",
    "Document",
    "Piece",
    "Sampling",
    "TokenLogprob",
    "Weave",
]


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
        look_up: LookUp = at_once,
        conversations: Conversations | Part | None = None,
    ) -> None:
        """`promotion`: requests that bring a chunk which was never ingested before its KV is stored
        with the knowledge base; 0: never. `asking` is another Weave's, whose engine is shared;
        `tenant` is whose knowledge base it is: tenants share no exact KV. `look_up` runs searches,
        on threads of its choice: a catalogue keeps a connection per thread. `conversations` where
        they are remembered beyond this Weave."""
        self.model_name = name
        self.system = system
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._library = library
        self._look_up = look_up
        self._owns_engine = asking is None
        self._ingesting = threading.Lock()
        self._replying = Replying(
            decoder,
            tokenizer,
            asking or Asking(decoder, engine),
            system,
            library,
            None if library is None else self.search,
            speculation=speculation,
            promotion=promotion,
            tenant=tenant,
            look_up=look_up,
            conversations=conversations,
        )

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
        if kb is None:
            return cls(decoder, tokenizer, name, system)
        from kvweave.library import Library
        from kvweave.speculation import SpeculationConfig

        guessing = SpeculationConfig(speculate)
        library = Library.open(Path(kb), decoder, tokenizer, system, embedder, encoding, extras)
        return cls(decoder, tokenizer, name, system, library, None, guessing, promotion)

    def over(
        self,
        folder: Path,
        *,
        open_embedder: "OpenEmbedder | None" = None,
        encoding: str | None = None,
        tenant_salt: str = "",
        look_up: LookUp = at_once,
        host_bytes: int | None = None,
        conversations: Conversations | Part | None = None,
    ) -> "Weave":
        """A Weave with the same model over another knowledge base, made if it is not there.

        The two share an engine. Close this one last. `look_up` and `conversations` as for a Weave
        of its own; `host_bytes` is what its host tier may have, None the usual.
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
            host_bytes=host_bytes,
        )
        return Weave(
            self._decoder,
            self._tokenizer,
            self.model_name,
            self.system,
            library,
            asking=self._replying.asking,
            tenant=tenant_salt,
            look_up=look_up,
            conversations=conversations,
        )

    def is_at_rest(self) -> bool:
        """No request that is over still holds chunk KV of the open knowledge base. Waits for the
        engine's step, in which it hears who has left."""
        self.engine.run_alone(lambda: None)
        return self.library.store.num_pinned() == 0

    def close(self) -> None:
        """Finish writing chunk KV, keep what was learnt of the machine, let go of everything."""
        self._replying.close(with_engine=self._owns_engine)
        if self._library is not None:
            self._library.close()

    def __enter__(self) -> "Weave":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def profile(self) -> Profile | None:
        """What was measured of the model: the user's profile, or the packaged one."""
        return self._replying.ways.profile

    @property
    def facts(self) -> ModelFacts:
        """What strategies must know of the model, from its profile if it has one."""
        return self._replying.ways.facts

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._decoder.spec.max_context

    @property
    def engine(self) -> Engine:
        """What computes; started if it is not yet."""
        return self._replying.asking.engine

    @property
    def library(self) -> "Library":
        """The open knowledge base."""
        return self._replying.ways.library

    def measure(self) -> None:
        """Measure this machine for reuse="auto" now, unless it was measured before; otherwise the
        first who asks for "auto" waits for it. Seconds, in which nothing is answered."""
        self._replying.ways.measure()

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

        `chunk_kv` also computes and stores the chunks' KV, so that `reuse="reuse"` finds it.
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

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        return self.library.remove(reference)

    def search(self, question: str, k: int = TOP_K) -> "list[Hit]":
        """The chunks of the knowledge base nearest to `question`, best first."""
        kb = self.library.kb
        return self._look_up(lambda: kb.search(question, k))

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Answer from `documents`, or from the `k` nearest chunks of the open knowledge base.

        `system` takes the place of the Weave's own system prompt for this question. `reuse` names a
        strategy: "full" prefills everything, "prefix" reuses what is exact, "reuse" takes stored
        chunk KV as it is, "weave" and others recompute a `ratio` of it (their own default if None):
        faster, and not exact. "auto" takes the cheapest way on this machine that calibration allows
        within `bound` (nats per token); `order="free"` lets it move chunks. Without `reuse`, a
        `ratio` means "weave"; without both it is "auto" where the knowledge base has KV of the
        chunks and this machine was measured before, else "full". `Answer.explain` says what was
        done, and `Answer.decision` why.

        `history` are the {"role", "content"} messages said before, the user's first. With a
        `conversation_id` the chunks of those turns stand in the history again, and those it holds
        are not sent twice; conversations of one `tenant` are unknown to others.
        """
        return self.stream(question, **options).finish()

    def stream(self, question: str, **options: Unpack[AskOptions]) -> Answering:
        """As `ask`, piece by piece."""
        called_s = time.perf_counter()
        return self._replying.answer(Ask(question, **options), called_s)

    def plan(self, question: str, **options: Unpack[PlanOptions]) -> "Plan":
        """What `ask` with reuse="auto" would do, and what else it would cost. Answers nothing."""
        return self._replying.plan(Ask(question, **options))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, sampling: Sampling | None = None
    ) -> Answering:
        """Continue a conversation of {"role", "content"} messages."""
        called_s = time.perf_counter()
        if not messages:
            raise RequestError("messages is empty; send at least one")
        return self._replying.plain(self._tokenizer.encode_chat(messages), sampling, called_s)

    def complete(
        self, prompt: str | Sequence[int], *, sampling: Sampling | None = None
    ) -> Answering:
        """Continue a text or token ids, without a chat template."""
        called_s = time.perf_counter()
        ids = self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self._replying.plain(ids, sampling, called_s)

    def build_prompt(
        self,
        question: str,
        documents: Sequence[Document | str] = (),
        system: str | None = None,
    ) -> Prompt:
        """The prompt `ask` would use for these documents, by part."""
        return self._replying.prompting.build(question, documents, system)

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds; a character of several tokens comes with its last one."""
        return texts_of(self._tokenizer, token_ids)
