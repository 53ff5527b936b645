"""One knowledge base of the gateway: documents here, answers from its upstreams."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Unpack

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.kv_sync import KVSync, remove_documents, sync_without_model
from kvweave.app.library.library import IngestHow
from kvweave.app.library.library_kv import Retries
from kvweave.app.library.stored_kv import KV_FOLDER, Delete, KVPlaces
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import RequestError, TierError
from kvweave.gateway.connections import UpstreamFailed, error_of
from kvweave.gateway.kv_progress import peek_progress
from kvweave.gateway.prompts import COMPLETIONS
from kvweave.gateway.replica import Replica
from kvweave.gateway.target import FleetAnswerers, Upstreams
from kvweave.ingest.pipeline import ingest
from kvweave.ingest.report import IngestReport
from kvweave.ingest.sources import Source
from kvweave.metrics import Metrics
from kvweave.types import ChunkId


class RoutedLibrary:
    """A `LibraryHost`. Any thread; one at a time ingests. Closes `kb`."""

    def __init__(self, kb: KnowledgeBase, upstreams: Upstreams, settings: AnswerSettings) -> None:
        self.kb = kb
        self._upstreams = upstreams
        self._tenant = settings.tenant
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

    def stream(self, question: str, **options: Any) -> PieceStream:
        return self._answerers.stream(question, **options)

    def check_strategy(
        self, reuse: str | None, ratio: float | None = None, model: str | None = None
    ) -> None:
        self._answerers.check_reuse(reuse, model)

    def ingest(self, *sources: Source, **how: Unpack[IngestHow]) -> IngestReport:
        """Documents to chunks and vectors. Their KV is made where the model is."""
        if how.get("chunk_kv"):
            raise RequestError(
                "a gateway makes no chunk KV, its upstreams do when chunks come back; leave "
                "'wait_for_kv' out"
            )
        with self._sync() as sync:
            progress, options = how.get("progress"), how.get("options")
            return ingest(self.kb, sources, None, progress=progress, options=options, kv_sync=sync)

    def remove(self, reference: str) -> int:
        """Remove a document, and the KV of its chunks: in tiers that upstreams share, and in those
        of each upstream."""
        ids = [document.id for document in self.kb.find(reference)]
        with self._sync() as sync:
            return len(remove_documents(self.kb, ids, sync).orphaned)

    def remove_all(self) -> bool:
        ids = [document.id for document in self.kb.documents()]
        with self._sync() as sync:
            remove_documents(self.kb, ids, sync)
            return not sync.is_owing

    def kv_progress(self) -> KVProgress:
        return peek_progress(self.kb, self._upstreams, self._tenant)

    def metrics(self) -> Iterable[Metrics]:
        return ()

    def catch_up(self) -> None:
        """Holds nothing that was removed."""

    def is_at_rest(self) -> bool:
        return True

    def close(self) -> None:
        self._retries.close()
        self.kb.close()

    def _sync(self) -> AbstractContextManager[KVSync]:
        owing = self._retries.start
        return sync_without_model(self.kb, self._upstreams.remotes, self._engines, owing)

    def _tell_engines(self) -> bool:
        """Tell those what they could not be told before; whether none is left. On the thread of
        the retries."""
        with self._sync() as sync, self.kb.writing_if_free() as is_free:
            if is_free:
                sync.before()
            return is_free and not sync.is_owing


MOST_AT_ONCE = 1000  # chunk ids in one request
PATIENCE_S = 60.0  # for its reply: the engine may be busy, and its disk slow


class EngineMemory:
    """A `RemovalTarget`: what one replica keeps for one tenant. Any thread."""

    def __init__(self, replica: Replica, tenant: str) -> None:
        self._replica = replica
        self._tenant = tenant
        self.place, self.name = f"upstream {replica.name}", replica.name

    def remove(
        self, gone: Collection[ChunkId], behind: Collection[ChunkId], delete: Delete
    ) -> None:
        """No engine behind a gateway computes chunks behind others: `behind` is of no matter."""
        self._replica.loaded.drop(self._tenant, gone)
        card = self._replica.card
        if card is None:
            raise TierError(self._replica.words)
        if not card.fuses:
            return  # it keeps no chunk KV
        ids = sorted(gone)
        for at in range(0, len(ids), MOST_AT_ONCE):
            self._tell(card.model, ids[at : at + MOST_AT_ONCE])

    def _tell(self, model: str, chunk_ids: list[ChunkId]) -> None:
        """Raises TierError."""
        said: dict[str, Any] = {"forget": chunk_ids}
        if self._tenant:
            said["tenant"] = self._tenant
        body = {
            "model": model,
            "prompt": [1],
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"kvweave": said},
        }
        try:
            status, reply = self._replica.connections.post(COMPLETIONS, body, PATIENCE_S)
        except UpstreamFailed as failure:
            raise TierError(str(failure)) from failure
        told = reply.get("kv_transfer_params") if isinstance(reply, Mapping) else None
        told = told.get("kvweave") if isinstance(told, Mapping) else None
        if status == 200 and isinstance(told, Mapping) and told.get("forgotten") == len(chunk_ids):
            return
        error = error_of(reply)
        why = error.message if error is not None else str((told or {}).get("why", status))
        raise TierError(f"{self._replica.name} did not forget chunks: {why}")
