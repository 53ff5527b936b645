"""One knowledge base of the gateway: documents here, answers from its upstreams."""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.question import Question
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.kv_places import KVPlaces
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.kv_sync import KVSync, remove_documents, sync_without_model
from kvweave.app.library.retries import Retries
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import RequestError
from kvweave.gateway.removals import EngineMemory
from kvweave.gateway.target import FleetAnswerers, Upstreams
from kvweave.ingest.pipeline import IngestOptions, ingest
from kvweave.ingest.report import IngestReport, OnProgress
from kvweave.ingest.sources import Source
from kvweave.metrics import Metrics


class RoutedLibrary:
    """A `LibraryHost`. Any thread; one at a time ingests. Closes `kb`."""

    def __init__(self, kb: KnowledgeBase, upstreams: Upstreams, settings: AnswerSettings) -> None:
        self._kb = kb
        self._remotes = upstreams.remotes
        self._engines = [EngineMemory(each, settings.tenant) for each in upstreams.fleet.replicas]
        self._retries = Retries(self._tell_engines)
        if KVPlaces(kb.folder / KV_FOLDER).is_owing(self._engines):  # since an earlier life
            self._retries.start()
        self._answerers = FleetAnswerers(upstreams, settings, kb)

    @property
    def engines(self) -> tuple[()]:
        return ()

    def engine_of(self, model: str | None) -> None:
        return None

    @property
    def kb(self) -> KnowledgeBase:
        return self._kb

    def stream(self, question: str, **options: Any) -> PieceStream:
        called_s = time.perf_counter()
        asked = Question(question, **options)
        return self._answerers.of(asked.model).answer(asked, called_s)

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        self._answerers.check_reuse(reuse, model)

    def ingest(
        self,
        *sources: Source,
        chunk_kv: bool = False,
        progress: OnProgress | None = None,
        options: IngestOptions | None = None,
        only_new: bool = False,
    ) -> IngestReport:
        """Documents to chunks and vectors. Their KV is made where the model is."""
        if chunk_kv:
            raise RequestError(
                "a gateway makes no chunk KV, its upstreams do when chunks come back; leave "
                "'wait_for_kv' out"
            )
        with self._sync() as sync:
            return ingest(self._kb, sources, None, progress=progress, options=options, kv_sync=sync)

    def remove(self, reference: str) -> int:
        """Remove a document, and the KV of its chunks: in tiers that upstreams share, and in those
        of each upstream."""
        ids = [document.id for document in self._kb.find(reference)]
        with self._sync() as sync:
            return len(remove_documents(self._kb, ids, sync).orphaned)

    def remove_all(self) -> bool:
        ids = [document.id for document in self._kb.documents()]
        with self._sync() as sync:
            remove_documents(self._kb, ids, sync)
            return not sync.is_owing

    def kv_progress(self) -> KVProgress | None:
        return None

    def metrics(self) -> Iterable[Metrics]:
        return ()

    def catch_up(self) -> None:
        """Holds nothing that was removed."""

    def is_at_rest(self) -> bool:
        return True

    def close(self) -> None:
        self._retries.close()
        self._kb.close()

    def _sync(self) -> AbstractContextManager[KVSync]:
        owing = self._retries.start
        return sync_without_model(self._kb, self._remotes, self._engines, owing)

    def _tell_engines(self) -> bool:
        """Tell those what they could not be told before; whether none is left. On the thread of
        the retries."""
        with self._sync() as sync, self._kb.writing_if_free() as is_free:
            if is_free:
                sync.before()
            return is_free and not sync.is_owing
