"""Several models in one process: a `ModelHost` over a Weave for each.

Each has an engine, a knowledge tree and chunk KV of its own; memory is divided among them. What a
request names as its `model` answers it, the first one where it names none. A knowledge base was cut
with one tokenizer, so the models that have that one answer from it; each opens it when it is asked
for the first time.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.guessing import Paces, PrefillPace
from kvweave.app.answer.question import ChatOptions, CompletionOptions
from kvweave.app.answer.settings import AnswerSettings, Fields
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.library import IngestHow, OpeningOptions
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Weave
from kvweave.config import WeaveConfig, given_values
from kvweave.corpus.settings import read_settings
from kvweave.engine.config import EngineConfig
from kvweave.engine.free_memory import free_bytes
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError, CorpusMismatch, RequestError
from kvweave.metrics import Metrics, Sample
from kvweave.model.files.locate import locate
from kvweave.model.files.tensor_files import TensorFiles

if TYPE_CHECKING:
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.ingest.report import IngestReport
    from kvweave.ingest.sources import Source

log = logging.getLogger(__name__)

GB = 1e9
OpenLibrary = Callable[[Weave], Weave]  # the knowledge base, over another model


class ModelSet:
    """Several models as one host. Any thread. Closes its Weaves; `close` it after all that came
    from `over`."""

    def __init__(self, weaves: Sequence[Weave]) -> None:
        """The first is the usual one. Raises ConfigError where two have the same name."""
        self._weaves = {weave.model_name: weave for weave in weaves}
        if len(self._weaves) < len(weaves):
            names = ", ".join(weave.model_name for weave in weaves)
            raise ConfigError(f"two models have the same name: {names}; leave one out")
        self._first = weaves[0]
        self.model_name, self.max_context = self._first.model_name, self._first.max_context

    @classmethod
    def from_config(cls, config: WeaveConfig, models: Sequence[str]) -> "ModelSet":
        """Load `models`, the usual one first, each with its part of the memory. Raises ConfigError
        before a model for which there is not enough left."""
        share = EngineConfig().pool_share / len(models)
        engine = replace(EngineConfig(**given_values(config.engine)), pool_share=share)
        with ExitStack() as stack:
            weaves: list[Weave] = []
            for name in models:
                choice = replace(config.model, model=name)
                _check_memory(name, choice.quant, choice.device, [w.model_name for w in weaves])
                weaves.append(Weave.from_config(replace(config, model=choice), engine=engine))
                stack.callback(weaves[-1].close)
            made = cls(weaves)
            stack.pop_all()
        return made

    def close(self) -> None:
        """Harmless the second time."""
        for weave in self._weaves.values():
            weave.close()

    # ── what it is ───────────────────────────────────────────────────────────

    @property
    def engines(self) -> Sequence[Weave]:
        return tuple(self._weaves.values())

    def models(self) -> dict[str, int | None]:
        return {name: weave.max_context for name, weave in self._weaves.items()}

    @property
    def weights_words(self) -> str:
        """What the weights of each are, for people."""
        return "; ".join(f"{name}: {each.weights_words}" for name, each in self._weaves.items())

    def models_of(self, folder: Path) -> list[str]:
        """Names of models that answer from a knowledge base, the usual one first: they have its
        tokenizer, which is the usual one's where it is new."""
        stored = read_settings(folder)
        wanted = _fingerprint(self._first) if stored is None else stored.tokenizer
        return [name for name, each in self._weaves.items() if _fingerprint(each) == wanted]

    def why_unready(self) -> None:
        """Nothing: what is wrong with an engine is found by those who watch it."""

    @property
    def system(self) -> str:
        return self._first.system

    def peek_kv(self, kb: "KnowledgeBase", tenant: str) -> KVProgress:
        return self._first.peek_kv(kb, tenant)

    def metrics(self) -> Iterable[Metrics]:
        """Counters of the usual model: series have no label for models."""
        return self._first.metrics()

    def samples(self) -> Iterator[Sample]:
        """What all engines count, together: bytes and tokens add up as events do."""
        totals: dict[tuple[str, tuple[tuple[str, str], ...], bool], float] = {}
        for weave in self._weaves.values():
            for name, labels, value, is_counter in weave.samples():
                key = (name, tuple(labels), is_counter)
                totals[key] = totals.get(key, 0) + value
        for (name, labels, is_counter), value in totals.items():
            yield Sample(name, labels, value, is_counter=is_counter)

    def measure(self) -> None:
        for weave in self._weaves.values():
            weave.measure()

    # ── answers ──────────────────────────────────────────────────────────────

    def weave_for(self, model: str | None) -> Weave:
        """None: the usual one. Raises RequestError where there is no such model."""
        if model is None:
            return self._first
        if model not in self._weaves:
            names = ", ".join(map(repr, self._weaves))
            raise RequestError(f"no model {model!r} here; there are {names}")
        return self._weaves[model]

    def sampling(
        self, asked: Fields = None, built_in: Fields = None, model: str | None = None
    ) -> Sampling:
        return self.weave_for(model).sampling(asked, built_in)

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        self.weave_for(model).check_strategy(reuse, ratio)

    def stream(self, question: str, **options: Any) -> PieceStream:
        return self.weave_for(options.get("model")).stream(question, **options)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> PieceStream:
        return self.weave_for(options.get("model")).chat(messages, **options)

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CompletionOptions]
    ) -> PieceStream:
        return self.weave_for(options.get("model")).complete(prompt, **options)

    # ── knowledge bases ──────────────────────────────────────────────────────

    def over(
        self,
        folder: Path,
        options: KVOptions,
        settings: AnswerSettings,
        **how: Unpack[OpeningOptions],
    ) -> "LibraryOfModels":
        """A knowledge base for all models that have its tokenizer; a new one is cut with that of
        the usual model. Raises CorpusMismatch where none has it."""
        fitting = self.models_of(folder)
        if not fitting:
            raise CorpusMismatch(
                f"the knowledge base {folder.name!r} was cut with a tokenizer that none of "
                f"{', '.join(self._weaves)} has; serve the model it was made for as well"
            )
        host_bytes = options.store.host_bytes
        if host_bytes is not None:
            part = replace(options.store, host_bytes=max(1, host_bytes // len(fitting)))
            options = replace(options, store=part)

        def open_for(weave: Weave) -> Weave:
            own = settings if weave.model_name == fitting[0] else _apart(settings, weave)
            return weave.over(folder, options, own, **how)

        return LibraryOfModels(
            folder.name, self, [self._weaves[name] for name in fitting], open_for
        )


class LibraryOfModels:
    """A `LibraryHost` of several models. The first of them is always open: it brings documents in
    and takes them out; the others hear of that as they would of another process."""

    def __init__(
        self, name: str, models: ModelSet, fitting: Sequence[Weave], opened: OpenLibrary
    ) -> None:
        self._name = name
        self._models = models
        self._fitting = {weave.model_name: weave for weave in fitting}
        self._opened = opened
        self._lock = threading.Lock()  # guards the next
        self._open = {fitting[0].model_name: opened(fitting[0])}
        self._first = self._open[fitting[0].model_name]

    @property
    def engines(self) -> tuple[Weave, ...]:
        with self._lock:
            return tuple(self._open.values())

    @property
    def kb(self) -> "KnowledgeBase":
        return self._first.kb

    def stream(self, question: str, **options: Any) -> PieceStream:
        return self.engine_of(options.get("model")).stream(question, **options)

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        self.engine_of(model).check_strategy(reuse, ratio)

    def ingest(self, *sources: "Source", **how: Unpack[IngestHow]) -> "IngestReport":
        """Chunk KV is made for the first model; for another when it is asked."""
        return self._first.ingest(*sources, **how)

    def remove(self, reference: str) -> int:
        count = self._first.remove(reference)
        self.catch_up()
        return count

    def remove_all(self) -> bool:
        is_done = self._first.remove_all()
        self.catch_up()
        return is_done

    def kv_progress(self) -> KVProgress | None:
        return self._first.kv_progress()

    def metrics(self) -> Iterable[Metrics]:
        return self._first.metrics()

    def catch_up(self) -> None:
        for weave in self.engines:
            weave.catch_up()

    def is_at_rest(self) -> bool:
        return all(weave.is_at_rest() for weave in self.engines)

    def close(self) -> None:
        for weave in reversed(self.engines):
            weave.close()

    def engine_of(self, model: str | None) -> Weave:
        """Raises RequestError for a model that has another tokenizer."""
        name = self._models.weave_for(model).model_name
        if name not in self._fitting:
            names = " or ".join(map(repr, self._fitting))
            raise RequestError(
                f"the knowledge base {self._name!r} was cut with another tokenizer than that of "
                f"{name!r}; ask {names}"
            )
        with self._lock:
            if name not in self._open:
                began_s = time.monotonic()
                self._open[name] = self._opened(self._fitting[name])
                took_s = time.monotonic() - began_s
                log.info("%s opened for %s too, in %.1f s", self._name, name, took_s)
            return self._open[name]


def _apart(settings: AnswerSettings, weave: Weave) -> AnswerSettings:
    """What two engines over one knowledge base must not share: generations of deletions, which
    conversations remember, and the pace of prefills."""
    known = settings.conversations
    known = known.part(f"{known.scope}\0{weave.model_name}")
    paces = Paces(settings.paces.search, PrefillPace())
    return replace(settings, conversations=known, paces=paces)


def _fingerprint(weave: Weave) -> str:
    return weave.runtime.tokenizer.fingerprint


def _check_memory(name: str, quant: str, device: str, loaded: Sequence[str]) -> None:
    """Raise ConfigError where the weights of a model cannot fit beside those of others."""
    import torch

    is_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    num_weights = TensorFiles(locate(name)).num_weights
    # float32 on a CPU, unless it may be rounded to a byte; two bytes on a GPU
    least = num_weights * (2 if is_gpu else 4 if quant == "none" else 1)
    free = int(torch.cuda.mem_get_info()[0]) if is_gpu else free_bytes()
    if least > free:
        beside = f" beside {', '.join(loaded)}" if loaded else ""
        raise ConfigError(
            f"{name} needs at least {least / GB:.1f} GB for its weights{beside}, and "
            f"{free / GB:.1f} GB are free; serve fewer models, or smaller ones"
        )
