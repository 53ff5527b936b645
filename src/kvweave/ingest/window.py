"""Documents that are cut and wait: embedded together, then committed one by one.

Nothing of a document is visible before all of it is. Vectors are kept as they are made, so a run
that was killed does not embed again; a source is marked done after its last document, so one that
was half-way is looked at again and only its missing documents are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.metadata import Metadata
from kvweave.errors import CorpusError, KVWeaveError
from kvweave.ingest.report import Tally, reason_of
from kvweave.types import Chunk, DocumentId, ParsedDocument, PlacedChunk

WINDOW = 2048  # chunks embedded together: sorted by length they pad little
SLICE = 256  # chunks embedded and kept at a time: what a kill can cost


@dataclass(slots=True)
class OpenSource:
    """A source whose documents are not all committed. The reader opens it, the window counts
    down."""

    source: str
    fingerprint: str
    metadata: Metadata = field(default_factory=dict)  # of each of its documents
    num_pending: int = 0  # documents not yet committed
    seen: set[DocumentId] = field(default_factory=set)
    is_read: bool = False  # all its documents are in the window or in the catalogue


class PendingDocument(NamedTuple):
    """A document that is cut and not yet committed."""

    source: OpenSource
    document: ParsedDocument
    fingerprint: str
    placed: list[PlacedChunk]
    is_update: bool
    size_bytes: int  # its share of the source


class Window:
    """Lives on the thread that ingests, inside `kb.writing`."""

    def __init__(self, kb: KnowledgeBase, tally: Tally) -> None:
        self._kb = kb
        self._catalogue = kb.catalogue
        self._tally = tally
        self._pending: list[PendingDocument] = []
        self._num_chunks = 0

    def add(self, pending: PendingDocument) -> None:
        """Take a document in; a full window is flushed."""
        pending.source.num_pending += 1
        self._pending.append(pending)
        self._num_chunks += len(pending.placed)
        if self._num_chunks >= WINDOW:
            self.flush()

    def end_of(self, source: OpenSource) -> None:
        """Close a source whose last document was added."""
        source.is_read = True
        self._finish_if_done(source)

    def flush(self) -> None:
        """Embed what is here, then commit its documents one by one.

        Any trouble ends the run as one CorpusError; what was committed stays.
        """
        try:
            self._flush()
        except KVWeaveError:
            raise
        except Exception as error:
            raise CorpusError(
                f"ingest stopped while embedding and storing ({reason_of(error)}); what is "
                "complete stays, run it again to go on"
            ) from error

    def _flush(self) -> None:
        window, self._pending, self._num_chunks = self._pending, [], 0
        window_bytes = sum(pending.size_bytes for pending in window)
        self._embed([p.chunk for pending in window for p in pending.placed], window_bytes)
        tally = self._tally
        for pending in window:
            written = self._catalogue.put(pending.document, pending.fingerprint, pending.placed)
            tally.new_ids += written.new
            tally.shared_chunks += len({p.chunk.id for p in pending.placed}) - len(written.new)
            tally.orphaned += written.orphaned
            tally.updated += pending.is_update
            tally.added += not pending.is_update
            tally.done_bytes += pending.size_bytes
            pending.source.num_pending -= 1
            self._finish_if_done(pending.source)
        tally.tell("embed")

    def _embed(self, chunks: Sequence[Chunk], window_bytes: int) -> None:
        by_id = {chunk.id: chunk for chunk in chunks}
        known = self._catalogue.with_vectors(list(by_id))
        todo = [chunk for chunk_id, chunk in by_id.items() if chunk_id not in known]
        todo.sort(key=lambda chunk: len(chunk.token_ids))
        for start in range(0, len(todo), SLICE):
            part = todo[start : start + SLICE]
            vectors = self._kb.embedder.embed_passages([chunk.text for chunk in part])
            self._catalogue.put_vectors([chunk.id for chunk in part], vectors)
            self._tally.tell("embed", "", window_bytes * (start + len(part)) // len(todo))

    def _finish_if_done(self, source: OpenSource) -> None:
        """If all documents are in, drop those that left the source, and mark it as done."""
        if not source.is_read or source.num_pending:
            return
        gone = [d for d in self._catalogue.fingerprints(source.source) if d not in source.seen]
        if gone:
            self._tally.orphaned += self._catalogue.remove(gone, keep_vectors=True).orphaned
            self._tally.removed += len(gone)
        self._catalogue.finish_source(source.source, source.fingerprint)
