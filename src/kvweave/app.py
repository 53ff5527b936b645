"""The composition root: opens a model and a knowledge base, and answers.

`Weave` is what the library, the command line and the server share. It may be used from many
threads: each request owns its state, and the decoder runs one step at a time.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.answering import Answer, Answering, Note, Piece, TokenLogprob
from kvweave.detokenizer import Detokenizer
from kvweave.engine.generate import check_prompt, generate
from kvweave.engine.sampling import Choice, Sampling
from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.calibration import BOUND
from kvweave.fuse.profiles import Profile, find_profile
from kvweave.fuse.strategy import NAMES, NEEDS_PROFILE, ModelFacts, chosen_ratio, open_strategy
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.plan.ordering import OrderPermission
from kvweave.prompt import SYSTEM, Document, Prompt, build_prompt, chunk_text, lay_out_turns
from kvweave.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvweave.conversations import Memory
    from kvweave.ingest.pipeline import IngestOptions
    from kvweave.ingest.report import IngestReport, OnProgress
    from kvweave.ingest.sources import Source
    from kvweave.library import Library, OpenEmbedder
    from kvweave.plan.plan import Plan
    from kvweave.planning import Planning
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

LookUp = Callable[[Callable[[], "list[Hit]"]], "list[Hit]"]
AUTO = "auto"  # a `reuse` that is no strategy: the planner chooses one
REUSES = ("full", AUTO, *(name for name in NAMES if name != "full"))
TOP_K = 5  # chunks that are put in front of a question


class Weave:
    """Answers questions with one loaded model, over given documents or a knowledge base."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        name: str,
        system: str,
        library: "Library | None" = None,
    ) -> None:
        self.model_name = name
        self.system = system
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._library = library
        self._planning: Planning | None = None  # opened by the first reuse="auto"
        self._turn = threading.Lock()  # held for one decoder step
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
    ) -> "Weave":
        """Load a model: an embedded name, a folder, a .gguf file or a hub id.

        `kb` is the folder of a knowledge base, made if it is not there; None does without one.
        `embedder` None is the one it was made with, MiniLM for a new one. `encoding` is the
        encoding context of chunk KV ("isolated", "filler:4", "neighbours:10") and `extras` what is
        stored beside it; None, each for itself, is what the knowledge base has, filler without
        extras for a new one.
        """
        folder = locate(model)
        decoder = load_decoder(folder, device=device, dtype=dtype, quant=quant)
        tokenizer = Tokenizer(folder)
        path = Path(model).expanduser()
        name = path.resolve().name if path.exists() else model  # resolved, for `--model .`
        library = None
        if kb is not None:
            from kvweave.library import Library

            library = Library.open(Path(kb), decoder, tokenizer, system, embedder, encoding, extras)
        return cls(decoder, tokenizer, name, system, library)

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

        The two take turns at the decoder. Close each; the model goes with the last. `look_up` runs
        searches, on threads of its choice: a catalogue keeps a connection per thread.
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
        other = Weave(self._decoder, self._tokenizer, self.model_name, self.system, library)
        other._turn = self._turn
        other._look_up = look_up
        return other

    def close(self) -> None:
        """Finish writing chunk KV, keep what was learnt of the machine, let go of everything."""
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
        with self._turn:
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
        if self._look_up is None:
            return self.library.kb.search(question, k)
        return self._look_up(lambda: self.library.kb.search(question, k))

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
    ) -> Answer:
        """Answer from `documents`, or from the `k` nearest chunks of the open knowledge base.

        `system` takes the place of the Weave's own system prompt for this question. `reuse` names a
        strategy: "full" prefills everything, "prefix" reuses what is exact, "reuse" takes stored
        chunk KV as it is, "weave" and others recompute a `ratio` of it (their own default if None):
        faster, and not exact. "auto" takes the cheapest way on this machine that calibration allows
        within `bound` (nats per token); `order="free"` lets it move chunks. `Answer.explain` says
        what was done, and `Answer.decision` why.
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
        history: Sequence[Mapping[str, str]] = (),
        memory: "Memory | None" = None,
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
        prompt = self._prompt(question, documents, system, k, history, memory)
        retrieve_ms = (time.perf_counter() - called_s) * 1e3
        if strategy is not None and strategy.reuses == "none":
            return self._start(prompt.token_ids, sampling, called_s)
        sampling = sampling or Sampling()
        ids = prompt.token_ids
        check_prompt(ids, self._decoder.spec.vocab_size, self.max_context)
        note = Note(retrieve_ms)
        if strategy is None:
            self.library.check_preamble(prompt)
            choices = self._planned(prompt, sampling, bound, permission, note)
        else:
            choices = self.library.generate(
                prompt, sampling, self._tokenizer.eos_ids, strategy, ratio or 0.0, note.keep
            )
        return self._answering(choices, sampling, len(ids), called_s, note)

    def plan(
        self,
        question: str,
        *,
        documents: Sequence[Document | str] | None = None,
        system: str | None = None,
        k: int = TOP_K,
        bound: float = BOUND,
        order: str = "keep",
    ) -> "Plan":
        """What `ask` with reuse="auto" would do, and what else it would cost. Answers nothing."""
        permission = check_planned(bound, order)
        prompt = self._prompt(question, documents, system, k)
        check_prompt(prompt.token_ids, self._decoder.spec.vocab_size, self.max_context)
        self.library.check_preamble(prompt)
        with self._turn:
            return self._open_planning().plan(prompt, bound, permission).plan

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, sampling: Sampling | None = None
    ) -> Answering:
        """Continue a conversation of {"role", "content"} messages."""
        called_s = time.perf_counter()
        if not messages:
            raise RequestError("messages is empty; send at least one")
        prompt_ids = self._tokenizer.encode_chat(messages)
        return self._start(prompt_ids, sampling, called_s)

    def complete(
        self, prompt: str | Sequence[int], *, sampling: Sampling | None = None
    ) -> Answering:
        """Continue a text or token ids, without a chat template."""
        called_s = time.perf_counter()
        ids = self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self._start(ids, sampling, called_s)

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
        """Hold the turn: the first time may measure the machine, with the decoder."""
        if self._planning is None:
            from kvweave.planning import Planning

            self._planning = Planning(self.library, self._decoder, self.facts, self.profile)
        return self._planning

    def _planned(
        self,
        prompt: Prompt,
        sampling: Sampling,
        bound: float,
        order: OrderPermission,
        note: Note,
    ) -> Iterator[Choice]:
        planning = self._open_planning()
        yield from planning.generate(prompt, sampling, self._tokenizer.eos_ids, bound, order, note)

    def _prompt(
        self,
        question: str,
        documents: Sequence[Document | str] | None,
        system: str | None,
        k: int,
        history: Sequence[Mapping[str, str]] = (),
        memory: "Memory | None" = None,
    ) -> Prompt:
        _refuse_empty(question)
        if documents is None and self._library is not None:
            chunks = [hit.chunk.token_ids for hit in self.search(question, k)]
        else:
            texts = [Document(d) if isinstance(d, str) else d for d in documents or ()]
            chunks = [tuple(self._tokenizer.encode_text(chunk_text(d))) for d in texts]
        if memory is not None:
            chunks = memory.together(chunks)
        words = self.system if system is None else system
        turns = [*history, {"role": "user", "content": question}]
        return lay_out_turns(self._tokenizer, turns, chunks, words)

    def _start(
        self, prompt_ids: Sequence[int], sampling: Sampling | None, called_s: float
    ) -> Answering:
        sampling = sampling or Sampling()
        choices = generate(self._decoder, prompt_ids, sampling, self._tokenizer.eos_ids)
        return self._answering(choices, sampling, len(prompt_ids), called_s)

    def _answering(
        self,
        choices: Iterator[Choice],
        sampling: Sampling,
        prompt_tokens: int,
        called_s: float,
        note: Note | None = None,
    ) -> Answering:
        turns = self._taking_turns(choices)
        return Answering(turns, self._tokenizer, sampling, prompt_tokens, called_s, note)

    def _taking_turns(self, choices: Iterator[Choice]) -> Iterator[Choice]:
        """Let one request's step run at a time."""
        while True:
            with self._turn:
                choice = next(choices, None)
            if choice is None:
                return
            yield choice


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
