"""Documents → chunks → vectors → catalogue, then chunk KV. Idempotent, resumable, safe to kill.

    reading.py: find ─► read ─► parse ─► cut ─► window.py: embed ─► one transaction per document
                                                report.py: counts all of it

Nothing of a document is visible before all of it is; what a killed run left is finished by the
next.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest.reading import SourceReader
from kvweave.ingest.report import IngestProgress, IngestReport, OnProgress, Tally
from kvweave.ingest.sources import IngestOptions, Source
from kvweave.ingest.window import Window
from kvweave.types import Chunk, ChunkId, EncodeWork

ENCODE_BATCH = 64  # chunks offered to the encoder at a time


class Encoder(Protocol):
    """Computes and stores the KV of chunks.

    Called on the thread that ingests, after the chunks' vectors are committed, in batches: with the
    chunks that are new where `ChunkKVSync.is_encoded` vouches for the others, else with every chunk
    of the knowledge base. It must skip what its keys say is there, quickly. May block. When
    it raises, ingest stops; what was committed stays, and the next run offers the same ones again.
    """

    def missing(self, chunks: Sequence[Chunk]) -> EncodeWork:
        """What `encode` would compute of these."""
        ...

    def encode(
        self, chunks: Sequence[Chunk], tell: Callable[[EncodeWork], None] | None = None
    ) -> None:
        """`tell` hears what was computed, as often as some was."""
        ...


class ChunkKVSync(Protocol):
    """Keeps chunk KV in step with the documents. Called on the thread that ingests, by the writer.

    May block. When it raises, ingest stops; what was committed stays, and the next run calls again.
    """

    def before(self) -> None:
        """Before anything changes: finish what an interrupted run left undone."""
        ...

    def is_encoded(self) -> bool:
        """After `before`: every chunk that is there now was offered to the encoder earlier, so that
        only those that come need be. False: that is not known, or all are to be looked at."""
        ...

    def after(
        self,
        orphaned: Sequence[ChunkId],
        tell: Callable[[IngestProgress], None] | None = None,
        new: Sequence[ChunkId] | None = None,
    ) -> None:
        """All chunks can be searched and were offered to the encoder; `orphaned` are no more.
        `new` are those that came, where only they were offered; None: all were."""
        ...


def ingest(
    kb: KnowledgeBase,
    sources: Iterable[Source],
    encoder: Encoder | None = None,
    *,
    progress: OnProgress | None = None,
    options: IngestOptions | None = None,
    kv_sync: ChunkKVSync | None = None,
) -> IngestReport:
    """Bring the sources into the knowledge base; do only what changed since the last time.

    A bad file is reported and skipped, and leaves what an earlier run took from it. Holds the
    writer lock. An interrupt loses at most the documents under way; run again to go on.
    """
    options = options or IngestOptions()
    tally = Tally(progress)
    window = Window(kb, tally)
    reader = SourceReader(kb, options, window, tally)
    with kb.writing():
        if kv_sync is not None:
            kv_sync.before()
        only_new = encoder is not None and kv_sync is not None and kv_sync.is_encoded()
        reader.take_all(sources)
        window.flush()
        if options.prune:
            _prune(kb, reader.missing_sources(), tally)
        tally.tell("index")
        kb.catalogue.drop_unused_vectors()
        kb.publish()
        if encoder is not None:
            _encode(kb, encoder, tally, tally.new_ids if only_new else None)
        if kv_sync is not None:
            kv_sync.after(_orphans(kb, tally), progress, tally.new_ids if only_new else None)
    return tally.report(_orphans(kb, tally))


def _prune(kb: KnowledgeBase, gone: Iterable[str], tally: Tally) -> None:
    """Forget sources with their documents."""
    for source in gone:
        tally.removed += len(kb.catalogue.fingerprints(source))
        tally.orphaned += kb.catalogue.forget_source(source).orphaned


def _encode(kb: KnowledgeBase, encoder: Encoder, tally: Tally, only: list[ChunkId] | None) -> None:
    """Offer every chunk to the encoder, or those of `only` that are still there. They are gone
    through twice: how much there is to do is said before any of it is done."""

    def batches() -> Iterator[list[Chunk]]:
        if only is None:
            return kb.catalogue.all_chunks(ENCODE_BATCH)
        return kb.catalogue.some_chunks(only, ENCODE_BATCH)

    work = EncodeWork()
    for chunks in batches():
        work = work.plus(encoder.missing(chunks))
    if not work.num_chunks:
        return
    tally.begin_kv(work)
    for chunks in batches():
        encoder.encode(chunks, tally.count_kv)


def _orphans(kb: KnowledgeBase, tally: Tally) -> list[ChunkId]:
    """Orphans that no later document of this run took in again, each once: some go twice."""
    unique = dict.fromkeys(tally.orphaned)
    alive = kb.catalogue.existing(unique)
    return [chunk_id for chunk_id in unique if chunk_id not in alive]
