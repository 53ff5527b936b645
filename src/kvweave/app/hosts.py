"""What answers, as the server sees it: a model in this process, or engines elsewhere.

    ModelHost     answers without a knowledge base, and opens one     Weave, ModelSet, Gateway
    LibraryHost   answers from one open knowledge base                Weave, …, RoutedLibrary
    PieceStream   an answer in the making                             AnswerStream, RoutedAnswer

`serve/` and `app/libraries/` know no more of those than this. Any thread may call any of it, and
every call may block, unless it says otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from kvweave.app.answer.answer_stream import PieceStream as PieceStream
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.library import OpenEmbedder
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.question import AskOptions, ChatOptions, KVTransfer
from kvweave.engine.sampling import Sampling
from kvweave.metrics import Metrics, Sample

if TYPE_CHECKING:
    from kvweave.app.weave import Weave
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.ingest.pipeline import IngestOptions
    from kvweave.ingest.report import IngestReport, OnProgress
    from kvweave.ingest.sources import Source


class LibraryHost(Protocol):
    """Answers from one knowledge base that is open."""

    @property
    def local(self) -> "Weave | None":
        """The same, where the model and chunk KV are in this process; the first of several."""
        ...

    @property
    def engines(self) -> "Sequence[Weave]":
        """The same with each model of this process that has it open; the first is `local`."""
        ...

    def of(self, model: str | None) -> "Weave | None":
        """The same with one model of this process, which opens it if need be; None: elsewhere.
        Raises RequestError for a model that does not answer from it."""
        ...

    @property
    def kb(self) -> "KnowledgeBase": ...

    def stream(self, question: str, **options: Unpack[AskOptions]) -> PieceStream: ...

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        """Raise RequestError for a `reuse` that is refused, ConfigError for one that the model is
        not ready for; `model` None: the usual one."""

    def ingest(
        self,
        *sources: "Source",
        chunk_kv: bool = False,
        progress: "OnProgress | None" = None,
        options: "IngestOptions | None" = None,
        only_new: bool = False,
    ) -> "IngestReport": ...

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

    def num_pinned(self) -> int:
        """Chunk KV that some lease holds. Does not block."""
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
    def local(self) -> "Weave | None":
        """The same, where the model is in this process; the usual one of several."""
        ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_context(self) -> int | None:
        """Tokens that prompt and answer may have together; None: not known."""

    def models(self) -> Mapping[str, int | None]:
        """What a request may name as its `model`, the usual one first, with the context of each.
        Does not block."""
        ...

    def models_of(self, folder: Path) -> Sequence[str]:
        """Which of `models` are listed for a knowledge base; none: it is of another tokenizer."""
        ...

    @property
    def engines(self) -> "Sequence[Weave]":
        """Those whose engine is in this process; the first is `local`."""
        ...

    def why_unready(self) -> str | None:
        """Why no request would be answered now; None: nothing is known against it. Does not
        block."""

    @property
    def takes_transfer(self) -> bool:
        """`complete` takes a `KVTransfer`. A gateway makes them."""
        ...

    @property
    def system(self) -> str: ...

    def sampling(
        self,
        asked: Mapping[str, Any] | None = None,
        built_in: Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> Sampling:
        """`model` is one of `models`, here and below; None: the usual one."""
        ...

    def stream(self, question: str, **options: Unpack[AskOptions]) -> PieceStream: ...

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        """As `LibraryHost.check_strategy`."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> PieceStream: ...

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        reuse: str | None = None,
        tenant: str = "",
        transfer: KVTransfer | None = None,
        model: str | None = None,
    ) -> PieceStream: ...

    def over(
        self,
        folder: Path,
        options: KVOptions,
        settings: AnswerSettings,
        *,
        new_embedder: str = ...,
        open_embedder: OpenEmbedder | None = None,
        promotion: int = ...,
    ) -> LibraryHost:
        """The same over a knowledge base, made if it is not there. Close this one last."""
        ...

    def metrics(self) -> Iterable[Metrics]:
        """Its counters beside those of knowledge bases. Does not block."""
        ...

    def samples(self) -> Iterable[Sample]:
        """What the engine or the engines count. Does not block."""
        ...
