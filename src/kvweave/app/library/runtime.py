"""A loaded model and the engine that computes with it, shared by every Weave over that model."""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kvweave.config import ModelChoice
from kvweave.engine.background import QUIET_S, ActiveAnswers, BackgroundPace
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk
from kvweave.errors import EngineClosed
from kvweave.fuse.protocol import Prefix
from kvweave.kernels.freed_memory import keep_freed_memory
from kvweave.model.decoder import Decoder
from kvweave.model.files.embedded import DEFAULT, EMBEDDED, FALLBACK, default_model, peek
from kvweave.model.files.generation import read_generation
from kvweave.model.files.locate import locate
from kvweave.model.files.model_cache import ModelCache
from kvweave.model.load import load_decoder, resolve_place
from kvweave.model.shapes import find_shape, random_decoder
from kvweave.plan.profile import MachineProfile
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

T = TypeVar("T")
RANDOM = "random:"  # in front of a shape: the name of a model whose weights are drawn


def drawn_model(shape: str) -> str:
    """The name of a model of random weights. Raises ConfigError for an unknown shape."""
    find_shape(shape)
    return RANDOM + shape


class ModelRuntime:
    """One decoder, its tokenizer and its engine. Any thread; `close` it after all who share it."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        name: str,
        engine: EngineConfig | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """`name` is what people call the model. `generation`: how its makers want answers drawn,
        see `read_generation`."""
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.name = name
        self.generation: Mapping[str, Any] = generation or {}
        self.client = EngineClient(decoder, engine)

    @classmethod
    def open(cls, choice: ModelChoice, engine: EngineConfig | None = None) -> "ModelRuntime":
        """Load a model: an embedded name, a folder, a .gguf file, a hub id, or the default; or
        draw one of a shape (RANDOM)."""
        if choice.model is not None and choice.model.startswith(RANDOM):
            return cls._draw(choice, choice.model.removeprefix(RANDOM), engine)
        model = default_model() if choice.model is None else choice.model
        folder = locate(model)
        keep_freed_memory()
        decoder = load_decoder(folder, device=choice.device, dtype=choice.dtype, quant=choice.quant)
        path = Path(model).expanduser()
        name = path.resolve().name if path.exists() else model  # resolved: `--model .`
        return cls(decoder, Tokenizer(folder), name, engine, read_generation(folder))

    @classmethod
    def _draw(cls, choice: ModelChoice, shape: str, engine: EngineConfig | None) -> "ModelRuntime":
        """Make a model of random weights, with a tokenizer that is at hand. Its vocabulary grows to
        the tokenizer's where it is smaller."""
        spec = find_shape(shape)
        at_hand = [name for name in (DEFAULT, FALLBACK) if peek(EMBEDDED[name], ModelCache())]
        tokenizer = Tokenizer(locate(at_hand[0] if at_hand else default_model()))
        spec = replace(spec, vocab_size=max(spec.vocab_size, tokenizer.vocab_size))
        device, dtype = resolve_place(choice.device, choice.dtype)
        keep_freed_memory()
        log.warning("%s has RANDOM weights, for load tests: answers mean nothing", RANDOM + shape)
        return cls(random_decoder(spec, device, dtype), tokenizer, RANDOM + shape, engine)

    @property
    def is_random(self) -> bool:
        """Whether its weights are drawn, for load tests."""
        return self.decoder.weights.is_random

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.decoder.spec.max_context

    def wait_for_quiet(self, timeout_s: float) -> bool:
        """Wait until no answer was in the making for a moment, so long at most. False: one is."""
        return self.client.answers.wait_for_quiet(QUIET_S, timeout_s)

    def close(self) -> None:
        """End what runs. Harmless the second time."""
        self.client.close()


class EngineClient:
    """Owns the engine, which is made when it is first needed. Any thread."""

    def __init__(self, decoder: Decoder, cfg: EngineConfig | None = None) -> None:
        self._decoder = decoder
        self._cfg = cfg
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._closed = False
        self.answers = ActiveAnswers()
        self.pace = BackgroundPace(self.answers)
        self.heard: dict[str, int] = {}  # catalogues: removals up to there are in the tombstones
        self._askers: dict[str, set[str]] = {}  # catalogues: namespaces that asked over them
        # machine profiles by codec, of this process; changed on the engine thread alone
        self.measured: dict[str, MachineProfile] = {}

    @property
    def engine(self) -> Engine:
        """The engine; made now if there is none. Raises EngineClosed after `close`."""
        with self._lock:
            if self._closed:
                raise EngineClosed("this Weave was closed; open another one to ask")
            if self._engine is None:
                self._engine = Engine(self._decoder, self._cfg)
            return self._engine

    def close(self) -> None:
        """End what runs. Harmless the second time."""
        with self._lock:
            self._closed = True
            engine = self._engine
        if engine is not None:
            engine.close()

    def stats(self) -> Mapping[str, float]:
        """What the engine counts, once it is closed as well."""
        with self._lock:
            closed = self._engine if self._closed else None
            if self._closed and closed is None:
                return {}
        return (closed or self.engine).stats()

    def run_alone(self, job: Callable[[], T]) -> T:
        """Run a job that needs the decoder between two steps of the engine; give its result."""
        return self.engine.run_alone(job)

    def read_exact(
        self, preamble: Sequence[int], chunk: EngineChunk, namespace: str
    ) -> Prefix | None:
        """Copy the exact KV of a chunk right behind a preamble, see `Engine.read_exact`."""
        return self.engine.read_exact(preamble, chunk, namespace)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless the model and the engine's pool can take a prompt."""
        self.engine.check(prompt_ids)

    def leave(self, file: BinaryIO, most_bytes: int) -> int:
        """Write what another process can go on with to a file: exact KV that can be read, so many
        bytes of it at most, and up to which removals it is right. Returns how many chunks. Behind
        `Engine.abandon`."""
        with self._lock:
            engine, heard = self._engine, dict(self.heard)
            askers = {catalogue: sorted(names) for catalogue, names in self._askers.items()}
        file.write(json.dumps({"heard": heard, "askers": askers}).encode() + b"\n")
        return 0 if engine is None else engine.leave_exact(file, most_bytes)

    def take(self, file: BinaryIO) -> int:
        """Take what another process left; return how many chunks. Before the first question. Raises
        ValueError or OSError if it is not whole."""
        left = json.loads(file.readline())
        with self._lock:
            self.heard.update(left["heard"])
            self._askers.update({name: set(each) for name, each in left["askers"].items()})
        return self.engine.take_exact(file)

    def note_asker(self, catalogue: str, namespace: str) -> None:
        """Note that chunks of this catalogue may stand in prompts of this namespace from now on."""
        if namespace not in self._askers.get(catalogue, ()):
            with self._lock:
                self._askers.setdefault(catalogue, set()).add(namespace)

    def end(self, catalogue: str) -> None:
        """All that was in this catalogue is forgotten: so is the catalogue. Should it be asked
        again after all, it is as one that is met for the first time."""
        with self._lock:
            self.heard.pop(catalogue, None)
            self._askers.pop(catalogue, None)

    def forget_catalogue(self, catalogue: str, chunk_ids: Collection[ChunkId] | None) -> None:
        """Forget chunks for all namespaces that this catalogue's chunks were in prompts of."""
        with self._lock:
            namespaces = tuple(self._askers.get(catalogue, ()))
        self.forget(chunk_ids, namespaces)

    def forget(
        self, chunk_ids: Collection[ChunkId] | None, namespaces: Collection[str] = ("",)
    ) -> None:
        """Chunks were deleted: their exact KV is no longer found either. None: any may have been,
        so that all of it goes."""
        with self._lock:
            engine = None if self._closed else self._engine
        if engine is not None and namespaces:
            engine.forget(chunk_ids, namespaces)

    def generation(self) -> int:
        """Count of deletions so far. Read before chunks are looked for: a deletion from then on is
        known as one that came after them."""
        return self.engine.tombstones.generation

    def is_gone(self, chunk_id: ChunkId, as_of: int, namespace: str = "") -> bool:
        """Whether a chunk that was found in generation `as_of` has been deleted since, for those of
        a namespace."""
        with self._lock:
            engine = self._engine
        return engine is not None and engine.tombstones.is_gone(chunk_id, as_of, namespace)
