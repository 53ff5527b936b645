"""A knowledge base together with the chunk KV that one model has computed for it.

<folder>/            the knowledge base, see corpus/knowledge_base.py
<folder>/kv/         its chunk KV, see library_kv.py
"""

import logging
import sqlite3
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypedDict, Unpack

from kvweave.app.library.corpus_kv import CorpusKV
from kvweave.app.library.kv_behind import ChunkPromotion, KVBehind, KVByPreamble, PreambleKey
from kvweave.app.library.kv_maker import KVMaker
from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.kv_sync import SyncJob, remove_documents
from kvweave.app.library.library_kv import KVOptions, LibraryKV
from kvweave.app.library.runtime import EngineClient, ModelRuntime
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.config import LibrarySettings
from kvweave.corpus.bert_encoder import EncoderWeights
from kvweave.corpus.embedder import Embedder, SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.removals import RemovalReader
from kvweave.corpus.settings import read_settings
from kvweave.errors import CorpusFull, KVWeaveError, RequestError
from kvweave.fuse.encode.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.encode.preparation import choose_preparation
from kvweave.ingest.pipeline import ingest
from kvweave.ingest.report import IngestReport, OnProgress
from kvweave.ingest.sources import IngestOptions, Source
from kvweave.model.files.locate import locate
from kvweave.plan.ordering import PROMOTION
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

DEFAULT_EMBEDDER = LibrarySettings().embedder
FLUSH_S = 10.0  # at the end, for writes under way

OpenEmbedder = Callable[[str], Embedder]


class OpeningOptions(TypedDict, total=False):
    """How a knowledge base is opened, where that is not as usual."""

    new_embedder: str  # of one that is new
    open_embedder: OpenEmbedder  # lets several knowledge bases share one
    promotion: int  # requests that bring a chunk before its KV is stored; 0: never


class IngestHow(TypedDict, total=False):
    """What `Weave.ingest` is told besides the sources, for those who pass it on."""

    chunk_kv: bool
    progress: OnProgress | None
    options: IngestOptions | None
    only_new: bool


def open_sentence_embedder(name: str, weights: EncoderWeights = "auto") -> Embedder:
    """The embedder called `name`, by the library that most of them are made for."""
    return SentenceEmbedder(locate(name), name=name, weights=weights)


def embedder_opener(settings: LibrarySettings) -> OpenEmbedder:
    """Opens embedders as configured."""
    return lambda name: open_sentence_embedder(name, settings.embedder_weights)


class Library:
    """Ingests into one knowledge base and knows what KV there is of its chunks.

    Any thread may read; one at a time ingests. `settle` it while the engine still runs, then
    `close` it.
    """

    def __init__(
        self,
        kb: KnowledgeBase,
        kv: LibraryKV,
        client: EngineClient,
        *,
        promotion: int = PROMOTION,
    ) -> None:
        """Closes `kb` and `kv`. `promotion`: requests that bring a chunk which was never ingested
        before its KV is stored here; 0: never. `kv` says whether chunk KV is made in the
        background; `start` begins with that."""
        self.kb = kb
        self.kv = kv
        self.store, self.encoder = kv.store, kv.encoder
        self._client = client
        self._is_settled = False
        self._is_emptied = False  # by `remove_all`, most often for good
        self._uid = kb.catalogue.uid()
        self._tenant = kv.encoder.context.tenant_salt
        self.asked_by(self._tenant)
        self._removals = RemovalWatch(
            kb.catalogue.path, self._uid, client.heard, self._forget, kv.store.forget
        )
        corpus = None if kv.background is None else CorpusKV(kb, kv, kv.background)
        if kv.background is not None:
            client.pace.share = kv.background.share
        self.maker = KVMaker(client.pace, self._is_gone, client.read_exact, corpus)
        self.promotion: ChunkPromotion | None = None
        if promotion:
            self.promotion = ChunkPromotion(kv.max_context, promotion, self.maker)
        made_by = self.promotion, self.maker, kv.worth.evidence
        neighbours = None
        if kv.table is not None:
            neighbours = NeighbourEncoder(kv.encoder, kb.catalogue.chunks)
        self.own = KVBehind(kv.encoder, client, *made_by, neighbours=neighbours, is_own=True)
        self._others = KVByPreamble(self._behind_another)
        kv.store.know_by(self._find_known)

    @classmethod
    def open(
        cls,
        folder: Path,
        runtime: ModelRuntime,
        options: KVOptions | None = None,
        *,
        embedder: str | None = None,
        **how: Unpack[OpeningOptions],
    ) -> "Library":
        """Open or make the knowledge base in `folder`. `embedder` None: what it was made with."""
        options = options or KVOptions()
        # what cannot be meant is refused before a knowledge base is made
        choose_preparation(folder / KV_FOLDER, options.encoding)
        stored = read_settings(folder)
        name = embedder or (
            stored.embedder if stored else how.get("new_embedder", DEFAULT_EMBEDDER)
        )
        decoder, tokenizer, client = runtime.decoder, runtime.tokenizer, runtime.client
        with ExitStack() as stack:  # a part that does not open leaves no other part open
            kb = stack.enter_context(
                KnowledgeBase.open(
                    folder,
                    tokenizer=tokenizer,
                    embedder=(how.get("open_embedder") or open_sentence_embedder)(name),
                    create=True,
                )
            )
            kv = stack.enter_context(
                LibraryKV.open(kb, decoder, tokenizer, options, run_alone=client.run_alone)
            )
            library = cls(kb, kv, client, promotion=how.get("promotion", PROMOTION))
            stack.callback(library._removals.close)
            library.repair()
            library.start()
            stack.pop_all()
        return library

    def start(self) -> None:
        """Make what KV is missing, in the background, if that was asked for."""
        self.maker.start()

    def kv_progress(self) -> KVProgress | None:
        """How far the chunk KV is that is made in the background; None: none is."""
        progress = self.maker.progress()
        if progress is None:
            return None
        calibration = self.kv.worth.state()
        return progress._replace(hurried=self.maker.is_hurried, calibration=calibration)

    def hurry_kv(self) -> None:
        """Have the chunk KV that it lacks made now, beside answers. Raises RequestError where none
        is made in the background."""
        progress = self.maker.progress()
        if progress is None:
            raise RequestError(
                "no chunk KV is made in the background here (library.background_kv = never); "
                "upload with wait_for_kv, or run kvweave ingest --kv"
            )
        if progress.state == "unused":
            raise RequestError(f"no chunk KV is made here: {progress.why}")
        self.maker.hurry()

    def settle(self) -> None:
        """Finish storing chunks, and forget what was removed elsewhere until now: chunk KV that was
        written after its removal would stay. The engine still runs. Harmless the second time."""
        self.maker.close()
        if self._is_settled:
            return
        self._is_settled = True
        self.store.flush(FLUSH_S)  # a process that removes it from now on finds it where it lies
        try:
            self.catch_up()
        except KVWeaveError as error:
            log.warning("chunk KV of removed documents may be left: %s", error)

    def close(self) -> None:
        self._removals.close()
        if self._is_emptied:  # a server may make and delete knowledge bases without end
            self._client.end(self._uid)
        self.kv.close()
        self.kb.close()

    def ingest(
        self,
        sources: Sequence[Source],
        *,
        chunk_kv: bool,
        progress: OnProgress | None = None,
        options: IngestOptions | None = None,
        refresh_neighbours: bool = False,
        only_new: bool = False,
    ) -> IngestReport:
        """Documents to chunks and vectors, and to chunk KV if asked for: of every chunk that has
        none, or with `only_new` of those that come, once all others are known to have been looked
        at with this encoding."""
        job = SyncJob(chunk_kv, only_new, refresh_neighbours, self._forget)
        sync = self.kv.sync(job)
        if chunk_kv:
            self.kv.prepare_to_encode()
        encoder = self.encoder if chunk_kv else None
        try:
            return ingest(
                self.kb, sources, encoder, progress=progress, options=options, kv_sync=sync
            )
        finally:
            self.maker.look()

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        ids = [document.id for document in self.kb.find(reference)]
        sync = self.kv.sync(SyncJob(forgotten=self._forget))
        return len(remove_documents(self.kb, ids, sync).orphaned)

    def remove_all(self) -> bool:
        """Remove every document, and all chunk KV. False: a remote tier could not be told; it is,
        once it answers, while this knowledge base is open."""
        ids = [document.id for document in self.kb.documents()]
        sync = self.kv.sync(SyncJob(forgotten=self._forget))
        try:
            remove_documents(self.kb, ids, sync)
        except CorpusFull:  # who deletes the folder next frees the room all the same
            self._forget(None)
            self.store.clear()
            raise
        self.store.clear()  # what requests brought, and what was stored behind other preambles
        self._is_emptied = True
        return not sync.is_owing

    def repair(self) -> None:
        """Delete what a removal or an ingest that was killed has left. A writer at work does it
        itself."""
        sync = self.kv.sync(SyncJob(forgotten=self._forget))
        if sync.is_settled:
            return
        with self.kb.writing_if_free() as is_free:
            if is_free:
                sync.before()

    def catch_up(self) -> None:
        """Forget what other processes have removed. Microseconds if there is nothing new."""
        self._removals.catch_up()

    def asked_by(self, tenant: str) -> None:
        """A request of a tenant is about to look for chunks here: deletions reach it too."""
        self._client.note_asker(self._uid, tenant)

    def behind(self, key: PreambleKey) -> KVBehind:
        """Its chunk KV behind a preamble: the one that documents are ingested behind, or another
        that a request came with."""
        is_own = key.preamble == self.encoder.preamble_ids
        return self.own if is_own else self._others.get(key)

    def _behind_another(self, key: PreambleKey) -> KVBehind:
        encoder = self.encoder.behind(key.preamble)
        made_by = self.promotion, self.maker, self.kv.worth.evidence
        return KVBehind(encoder, self._client, *made_by)

    def _is_gone(self, chunk_id: ChunkId, as_of: int, tenant: str) -> bool:
        """Whether a chunk that was found in generation `as_of` was deleted since, here or by
        another process."""
        self.catch_up()  # the request may have found it long ago
        return self._client.is_gone(chunk_id, as_of, tenant)

    def _forget(self, chunk_ids: Collection[ChunkId] | None) -> None:
        self._client.forget_catalogue(self._uid, chunk_ids)

    def _find_known(self, chunk_ids: Collection[str]) -> Collection[str]:
        try:
            return self.kb.catalogue.existing([ChunkId(each) for each in chunk_ids])
        except sqlite3.Error as error:  # on a thread that brings bytes, which are not to blame
            log.warning("%s: %s; chunk KV of chunks that may be gone goes", self.kb.folder, error)
            return ()


Forget = Callable[[Collection[ChunkId] | None], object]  # None: any may have been


class RemovalWatch:
    """Documents that another process removed leave the memory of this one: tree, store,
    conversations. Any thread; `close` it.

    The catalogue's generation is read before every request. Where it has moved on, what went since
    is forgotten as if it had been removed here: out of the knowledge tree, with a tombstone that
    requests under way and conversations see (`engine/tombstones.py`), and out of the host tier.
    Files are left to the process that removed the document, and to the next writer should that one
    have been killed. A process that has not looked for so long that the catalogue no longer names
    what went (`corpus/removals.py`) forgets all that it cannot find in the catalogue.
    """

    def __init__(self, catalogue: Path, uid: str, heard: dict[str, int], *forget: Forget) -> None:
        """`uid` is that of the catalogue. `heard` has the generation up to which each one was heard
        of; it outlives this, as do the tree and conversations: what went while the knowledge base
        was closed is news at the first request."""
        self._reader = RemovalReader(catalogue)
        self._uid = uid
        self._heard = heard
        self._forget = forget
        self._lock = threading.Lock()
        self._generation = heard.setdefault(uid, self._reader.generation())

    def catch_up(self) -> None:
        """Forget what went. Microseconds if nothing did; else waits for a step of the engine, and
        so do requests that come meanwhile."""
        if self._reader.generation() == self._generation:
            return
        with self._lock:
            removed = self._reader.since(self._generation)
            if removed.chunk_ids is None or removed.chunk_ids:
                for forget in self._forget:
                    forget(removed.chunk_ids)
            # last: a failure leaves it to the next request
            self._generation = self._heard[self._uid] = removed.generation

    def close(self) -> None:
        self._reader.close()
