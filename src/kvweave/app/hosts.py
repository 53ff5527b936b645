"""What answers, as the server sees it: a model in this process, or engines elsewhere.

    ModelHost     answers without a knowledge base, and opens one     Weave, ModelSet, Gateway
    LibraryHost   answers from one open knowledge base                Weave, …, RoutedLibrary
    LocalModel    one of those, computed in this process              Weave
    PieceStream   an answer in the making                             AnswerStream, RoutedAnswer

`serve/` and `app/libraries/` know no more of those than this. Any thread may call any of it, and
every call may block, unless it says otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from kvweave.app.answer.answer_stream import Answer
from kvweave.app.answer.answer_stream import PieceStream as PieceStream
from kvweave.app.answer.question import ChatOptions, CompletionOptions
from kvweave.app.answer.settings import AnswerSettings, Fields
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.library import IngestHow, OpeningOptions
from kvweave.app.library.library_kv import KVOptions
from kvweave.engine.sampling import Sampling
from kvweave.metrics import Metrics, Sample

if TYPE_CHECKING:
    from kvweave.app.answer.answer_details import AnswerDetails
    from kvweave.app.audit.auditor import Auditor
    from kvweave.app.library.library import Library
    from kvweave.app.library.runtime import ModelRuntime
    from kvweave.calibrate.profiles import Profile
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.engine.engine import Engine
    from kvweave.ingest.report import IngestReport
    from kvweave.ingest.sources import Source


class LocalModel(Protocol):
    """A model of this process, by itself or over one knowledge base, for those who look closer."""

    @property
    def model_name(self) -> str: ...

    @property
    def engine(self) -> "Engine": ...

    @property
    def runtime(self) -> "ModelRuntime": ...

    @property
    def library(self) -> "Library":
        """The knowledge base it is over. Raises ConfigError where it is over none."""
        ...

    @property
    def document_tiers(self) -> Sequence[str]:
        """Tiers that keep chunk KV of documents which come with requests; none: it is not kept."""
        ...

    @property
    def auditor(self) -> "Auditor": ...

    @property
    def profile(self) -> "Profile | None": ...

    @property
    def bound(self) -> float: ...

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CompletionOptions]
    ) -> PieceStream: ...

    def details(self, answer: Answer, queue_s: float = 0.0) -> "AnswerDetails": ...


class LibraryHost(Protocol):
    """Answers from one knowledge base that is open."""

    @property
    def engines(self) -> Sequence[LocalModel]:
        """The models of this process that have it open, the usual one first; none: elsewhere."""
        ...

    def engine_of(self, model: str | None) -> LocalModel | None:
        """One model of this process, which opens it if need be; None: it is elsewhere. Raises
        RequestError for a model that does not answer from it."""
        ...

    @property
    def kb(self) -> "KnowledgeBase": ...

    def stream(self, question: str, **options: Any) -> PieceStream: ...

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        """Raise RequestError for a `reuse` that is refused, ConfigError for one that the model is
        not ready for; `model` None: the usual one."""

    def ingest(self, *sources: "Source", **how: Unpack[IngestHow]) -> "IngestReport": ...

    def remove(self, reference: str) -> int:
        """Remove a document; returns how many chunks went with it."""
        ...

    def remove_all(self) -> bool:
        """Remove every document, and all chunk KV. False: a remote tier could not be told."""
        ...

    def kv_progress(self) -> KVProgress | None:
        """How far the chunk KV is that is made in the background; None: none is."""

    def metrics(self) -> Iterable[Metrics]:
        """Its counters, brought up to date. Does not block."""
        ...

    def catch_up(self) -> None:
        """Hear of what other processes have removed. Microseconds if there is nothing new."""
        ...

    def is_at_rest(self) -> bool:
        """Nothing that was begun with it still holds its chunk KV."""
        ...

    def close(self) -> None: ...


class ModelHost(Protocol):
    """Answers with one model or several, wherever that is computed."""

    @property
    def model_name(self) -> str:
        """The usual one."""
        ...

    def models(self) -> Mapping[str, int | None]:
        """What a request may name as its `model`, the usual one first, with the context of each.
        Does not block."""
        ...

    def models_of(self, folder: Path) -> Sequence[str]:
        """Which of `models` are listed for a knowledge base; none: it is of another tokenizer."""
        ...

    @property
    def engines(self) -> Sequence[LocalModel]:
        """The models of this process, the usual one first; none: a gateway, whose engines are
        elsewhere."""
        ...

    def why_unready(self) -> str | None:
        """Why no request would be answered now; None: nothing is known against it. Does not
        block."""

    @property
    def system(self) -> str: ...

    def peek_kv(self, kb: "KnowledgeBase", tenant: str) -> KVProgress:
        """How far the chunk KV of a knowledge base of a tenant is that is not open."""
        ...

    def sampling(
        self, asked: Fields = None, built_in: Fields = None, model: str | None = None
    ) -> Sampling:
        """`model` is one of `models`, here and below; None: the usual one."""
        ...

    def stream(self, question: str, **options: Any) -> PieceStream: ...

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        """Raise what `LibraryHost.check_strategy` raises."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> PieceStream: ...

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CompletionOptions]
    ) -> PieceStream:
        """Continue a prompt. Hosts with engines here take a `transfer`; a gateway makes them."""
        ...

    def over(
        self,
        folder: Path,
        options: KVOptions,
        settings: AnswerSettings,
        **how: Unpack[OpeningOptions],
    ) -> LibraryHost:
        """Open a knowledge base over these models, made if it is not there. Close it first."""
        ...

    def metrics(self) -> Iterable[Metrics]:
        """Its counters beside those of knowledge bases. Does not block."""
        ...

    def samples(self) -> Iterable[Sample]:
        """What the engine or the engines count. Does not block."""
        ...
