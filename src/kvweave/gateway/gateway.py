"""The face of a gateway: what `Weave` is where the model runs here."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.notes import AnswerNotes
from kvweave.app.answer.question import ChatOptions, CompletionOptions, PlainOptions
from kvweave.app.answer.settings import AnswerSettings, Fields, SamplingDefaults
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.library import DEFAULT_EMBEDDER, OpeningOptions, open_sentence_embedder
from kvweave.app.library.library_kv import KVOptions
from kvweave.config import GatewaySettings
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.settings import read_settings
from kvweave.engine.sampling import Sampling
from kvweave.errors import ModelError, RequestError, UpstreamError
from kvweave.gateway.answer import RoutedAnswer
from kvweave.gateway.bodies import UpstreamRequest
from kvweave.gateway.cards import UpstreamCard
from kvweave.gateway.fleet import Fleet
from kvweave.gateway.kv_progress import peek_progress
from kvweave.gateway.library import RoutedLibrary
from kvweave.gateway.prompts import (
    PromptMaker,
    TextPrompts,
    TokenPrompts,
    UpstreamPrompt,
    chat_messages,
    plain_text,
)
from kvweave.gateway.replica import Replica
from kvweave.gateway.target import FleetAnswerers, Upstreams
from kvweave.kv.tiers.config import TierConfig
from kvweave.metrics import Metrics, Sample
from kvweave.model.files.generation import read_generation
from kvweave.model.files.locate import locate_tokenizer
from kvweave.text.tokenizer import Tokenizer

stages = logging.getLogger("kvweave.stages")  # what a server does before it is ready

GUESSERS = 16  # threads that wait for prompts of guesses
FIRST_CARD_S = 60.0  # for an upstream to say what it is, at the start


class Gateway:
    """A `ModelHost` over upstreams. Any thread. `close` it after all that came from `over`."""

    def __init__(
        self,
        cfg: GatewaySettings,
        *,
        tokenizer: str | None = None,
        settings: AnswerSettings | None = None,
        remotes: Sequence[TierConfig] = (),
        first_card_s: float = FIRST_CARD_S,
    ) -> None:
        """Waits for the first upstream to answer. `tokenizer` names the model whose tokenizer is
        used; None is the upstreams' own, where it is on this machine, and else one that only cuts
        documents: prompts then go as text. Raises UpstreamError, ModelError."""
        self._settings = settings or AnswerSettings()
        self.fleet = Fleet(cfg)
        self._watch = HealthWatch(self.fleet)
        self._threads = ThreadPoolExecutor(GUESSERS, thread_name_prefix="guess")
        with ExitStack() as stack:
            stack.callback(self.close)
            self._watch.start()
            stages.info("waiting for an upstream to answer")
            card = self._watch.wait_for_one(first_card_s)
            self.model_name = card.model
            folder, is_models = _tokenizer_folder(tokenizer, card.model)
            prompts: PromptMaker = TextPrompts()
            found = Tokenizer(folder)
            if is_models and card.takes_ids:
                prompts = TokenPrompts(found)
            generation = read_generation(folder) if is_models else {}
            configured = self._settings.usual.sampling
            self._upstreams = Upstreams(
                self.fleet,
                card.model,
                prompts,
                found,
                SamplingDefaults(configured, generation),
                self._threads,
                card.max_context,
                remotes,
            )
            self._answerers = FleetAnswerers(self._upstreams, self._settings)
            stack.pop_all()

    def close(self) -> None:
        """Cut what is under way. Harmless the second time."""
        self._watch.close()
        self.fleet.close()
        self._threads.shutdown()

    # ── what it is ───────────────────────────────────────────────────────────

    @property
    def max_context(self) -> int | None:
        return self._upstreams.max_context

    def models(self) -> dict[str, int | None]:
        return {self.model_name: self.max_context, **self.fleet.models()}

    def models_of(self, folder: Path) -> list[str]:
        stored = read_settings(folder)
        is_fitting = stored is None or stored.tokenizer == self._upstreams.tokenizer.fingerprint
        return [self.model_name] if is_fitting else []

    @property
    def engines(self) -> tuple[()]:
        """None: upstreams are watched by the fleet."""
        return ()

    def why_unready(self) -> str | None:
        return self.fleet.why_unready()

    @property
    def system(self) -> str:
        return self._settings.system

    @property
    def words(self) -> str:
        """How prompts go out, for people."""
        is_ids = isinstance(self._upstreams.prompts, TokenPrompts)
        how = "token ids" if is_ids else "text: the model's tokenizer is not here"
        num, others = len(self.fleet.replicas), len(self.models()) - 1
        fused = "chunk KV is reused there" if self.fleet.can_fuse() else "prefixes are reused there"
        also = f", {others} other model{'s' if others > 1 else ''} beside it" if others else ""
        return f"{num} upstream{'s' if num > 1 else ''}{also}, prompts go as {how}; {fused}"

    def peek_kv(self, kb: KnowledgeBase, tenant: str) -> KVProgress:
        return peek_progress(kb, self._upstreams, tenant)

    def metrics(self) -> Iterable[Metrics]:
        return ()

    def samples(self) -> Iterable[Sample]:
        return self.fleet.samples()

    # ── answers ──────────────────────────────────────────────────────────────

    def sampling(
        self, asked: Fields = None, built_in: Fields = None, model: str | None = None
    ) -> Sampling:
        return self._upstreams.for_model(model).sampling.sampling(asked, built_in)

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        self._answerers.check_reuse(reuse, model)

    def stream(self, question: str, **options: Any) -> PieceStream:
        return self._answerers.stream(question, **options)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> RoutedAnswer:
        """`tools` go to the upstream as they are: its template shows them, and it reads calls."""
        if not messages:
            raise RequestError("messages is empty; send at least one")
        plain = PlainOptions.from_chat(options)
        name = self._upstreams.for_model(options.get("model")).model
        tools = () if plain.tool_use is None else plain.tool_use.tools
        return self._plain(chat_messages(messages, plain.tenant.encode(), name, tools), plain)

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CompletionOptions]
    ) -> RoutedAnswer:
        if options.get("transfer") is not None:
            raise RequestError("'kv_transfer_params' are for engines; this is a gateway")
        tenant, name = (
            options.get("tenant", ""),
            self._upstreams.for_model(options.get("model")).model,
        )
        plain = PlainOptions(options.get("sampling"), options.get("reuse"), tenant)
        return self._plain(plain_text(prompt, tenant.encode(), name), plain)

    def _plain(self, prompt: UpstreamPrompt, options: PlainOptions) -> RoutedAnswer:
        sampling = options.sampling or self.sampling(model=prompt.routed.model)
        use = options.tool_use
        request = UpstreamRequest(prompt, sampling, options.tenant, options.reuse, tool_use=use)
        return RoutedAnswer(self.fleet, request, AnswerNotes(time.perf_counter()))

    # ── knowledge bases ──────────────────────────────────────────────────────

    def over(
        self,
        folder: Path,
        options: KVOptions,
        settings: AnswerSettings,
        **how: Unpack[OpeningOptions],
    ) -> RoutedLibrary:
        """Open a knowledge base over these upstreams, made if it is not there. `options` and a
        promotion are about chunk KV, which upstreams make."""
        stored = read_settings(folder)
        name = stored.embedder if stored else how.get("new_embedder", DEFAULT_EMBEDDER)
        kb = KnowledgeBase.open(
            folder,
            tokenizer=self._upstreams.tokenizer,
            embedder=(how.get("open_embedder") or open_sentence_embedder)(name),
            create=True,
        )
        return RoutedLibrary(kb, self._upstreams, settings)


def _tokenizer_folder(name: str | None, model: str) -> tuple[Path, bool]:
    """Where the tokenizer is, and whether it is the upstreams' model's."""
    if name is not None:
        return locate_tokenizer(name), True
    try:
        return locate_tokenizer(model, pull=False), True
    except ModelError:
        return locate_tokenizer(DEFAULT_EMBEDDER), False


ABOUT_S = 2.0  # that replicas which are up may differ by, when a gateway starts
SOON_S = 0.2  # between two looks at a replica that was never seen


class HealthWatch:
    """`start` it once and `close` it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stopped = threading.Event()
        self._threads: Sequence[threading.Thread] = [
            threading.Thread(target=self._watch, args=(replica,), name="health", daemon=True)
            for replica in fleet.replicas
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_one(self, timeout_s: float) -> UpstreamCard:
        """The card of the first replica that answers; of several that do so at about the same time,
        of the one that is named first. Raises UpstreamError."""
        give_up_s = time.monotonic() + timeout_s
        while self._fleet.card() is None:
            if time.monotonic() >= give_up_s or self._stopped.is_set():
                told = "; ".join(replica.words for replica in self._fleet.replicas)
                raise UpstreamError(f"no upstream answers within {timeout_s:g} s: {told}")
            time.sleep(0.02)
        give_up_s = min(give_up_s, time.monotonic() + ABOUT_S)
        while self._fleet.is_any_unseen() and time.monotonic() < give_up_s:
            time.sleep(0.02)
        card = self._fleet.card()
        return card if card is not None else self.wait_for_one(timeout_s)  # it died meanwhile

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _watch(self, replica: Replica) -> None:
        while not self._stopped.is_set():
            self._fleet.look(replica)
            is_new = replica.card is None
            self._stopped.wait(
                min(SOON_S, self._fleet.cfg.health_s) if is_new else self._fleet.cfg.health_s
            )
