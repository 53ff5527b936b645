"""One knowledge base of the gateway: documents here, answers from its upstreams."""

import time
from collections.abc import Iterable
from typing import Unpack

from kvweave.app.answer.answerer import AnswerSettings
from kvweave.app.answer.piece_stream import PieceStream
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.kv_sync import remove_documents, sync_without_model
from kvweave.app.question import AskOptions, Question
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import RequestError
from kvweave.gateway.answerer import RoutedAnswerer, Upstreams
from kvweave.ingest.pipeline import IngestOptions, ingest
from kvweave.ingest.report import IngestReport, OnProgress
from kvweave.ingest.sources import Source
from kvweave.metrics import Metrics


class RoutedLibrary:
    """A `LibraryHost`. Any thread; one at a time ingests. Closes `kb`."""

    def __init__(self, kb: KnowledgeBase, upstreams: Upstreams, settings: AnswerSettings) -> None:
        self._kb = kb
        self._remotes = upstreams.remotes
        self._answerer = RoutedAnswerer(upstreams, settings, kb)

    @property
    def local(self) -> None:
        return None

    @property
    def kb(self) -> KnowledgeBase:
        return self._kb

    def stream(self, question: str, **options: Unpack[AskOptions]) -> PieceStream:
        called_s = time.perf_counter()
        return self._answerer.answer(Question(question, **options), called_s)

    def check_strategy(self, reuse: str | None, ratio: float | None = None) -> None:
        self._answerer.check_reuse(reuse)

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
        with sync_without_model(self._kb, self._remotes) as sync:
            return ingest(self._kb, sources, None, progress=progress, options=options, kv_sync=sync)

    def remove(self, reference: str) -> int:
        """Remove a document, and the KV of its chunks in tiers that upstreams share."""
        ids = [document.id for document in self._kb.find(reference)]
        with sync_without_model(self._kb, self._remotes) as sync:
            return len(remove_documents(self._kb, ids, sync).orphaned)

    def remove_all(self) -> bool:
        ids = [document.id for document in self._kb.documents()]
        with sync_without_model(self._kb, self._remotes) as sync:
            remove_documents(self._kb, ids, sync)
            return not sync.is_owing

    def kv_progress(self) -> KVProgress | None:
        return None

    def metrics(self) -> Iterable[Metrics]:
        return ()

    def num_pinned(self) -> int:
        return 0

    def is_at_rest(self) -> bool:
        return True

    def close(self) -> None:
        self._kb.close()
