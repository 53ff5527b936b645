"""Documents → chunks → vectors → catalogue, then chunk KV. Idempotent, resumable, safe to kill.

    find ─► read ─► parse ─► cut ─► (window of chunks) ─► embed ─► one transaction per document

Nothing of a document is visible before all of it is. Vectors are kept as they are made, so a run
that was killed does not embed again; a file is marked done after its last document, so a file that
was half-way is looked at again and only its missing documents are added.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.parsers import ParseLimits, Record, parse, read_bytes
from kvweave.corpus.parsers.base import PARSERS_VERSION, lone_record
from kvweave.errors import CorpusError, KVWeaveError
from kvweave.ingest.encoder import Encoder, Upkeep
from kvweave.ingest.report import IngestProgress, IngestReport, OnProgress, Phase, Skipped
from kvweave.ingest.sources import (
    FileBytes,
    FoundFile,
    Ignored,
    Later,
    Selection,
    Source,
    TextSource,
    find_files,
    folder_of,
)
from kvweave.types import Chunk, ChunkId, Document, DocumentId, PlacedChunk

WINDOW = 2048  # chunks embedded together: sorted by length they pad little
SLICE = 256  # chunks embedded and kept at a time: what a kill can cost
UPLOAD = "upload:"  # how sources begin that came as bytes with a name
ENCODE_BATCH = 64  # chunks offered to the encoder at a time

_Item = FoundFile | Ignored | Skipped | TextSource | FileBytes | Later


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """How to ingest; what to ingest are the sources."""

    selection: Selection = field(default_factory=Selection)
    limits: ParseLimits = field(default_factory=ParseLimits)
    prune: bool = False  # remove documents of files that are gone from the given folders


def ingest(
    kb: KnowledgeBase,
    sources: Iterable[Source],
    encoder: Encoder | None = None,
    *,
    progress: OnProgress | None = None,
    options: IngestOptions | None = None,
    upkeep: Upkeep | None = None,
) -> IngestReport:
    """Bring the sources into the knowledge base; do only what changed since the last time.

    A bad file is reported and skipped, and leaves what an earlier run took from it. Holds the
    writer lock. An interrupt loses at most the documents under way; run again to go on.
    """
    run = _Run(kb, options or IngestOptions(), progress)
    with kb.writing():
        if upkeep is not None:
            upkeep.before()
        only_new = encoder is not None and upkeep is not None and upkeep.is_encoded()
        run.take_all(sources)
        run.flush()
        run.prune()
        run.tell("index", "")
        kb.catalogue.drop_unused_vectors()
        kb.publish()
        if encoder is not None:
            run.encode(encoder, only_new=only_new)
        if upkeep is not None:
            upkeep.after(run.report().orphaned, progress, run.new_ids if only_new else None)
    return run.report()


@dataclass(slots=True)
class _File:
    """A source whose documents are on their way."""

    source: str
    fingerprint: str
    num_pending: int = 0  # documents not yet committed
    seen: set[DocumentId] = field(default_factory=set)
    is_read: bool = False  # all its documents are in the window or in the catalogue


@dataclass(frozen=True, slots=True)
class _Pending:
    file: _File
    document: Document
    fingerprint: str
    placed: list[PlacedChunk]
    is_update: bool
    size_bytes: int  # its share of the file


class _Run:
    """The state of one ingest. Lives on one thread."""

    def __init__(
        self, kb: KnowledgeBase, options: IngestOptions, progress: OnProgress | None
    ) -> None:
        self._kb = kb
        self._catalogue = kb.catalogue
        self._chunker = kb.chunker
        self._options = options
        self._progress = progress
        self._window: list[_Pending] = []
        self._window_chunks = 0
        self._skipped: list[Skipped] = []
        self._orphaned: list[ChunkId] = []
        self.new_ids: list[ChunkId] = []
        self._present: dict[str, str] = {}  # sources seen in this run; of texts the fingerprint
        self._folders: list[Path] = []
        self._added = self._updated = self._unchanged = self._removed = self._ignored = 0
        self._new_chunks = self._shared_chunks = self._cut_chunks = 0
        self._done_bytes = 0
        self._total_bytes: int | None = None
        self._started = time.monotonic()

    # ── reading ──────────────────────────────────────────────────────────────

    def take_all(self, sources: Iterable[Source]) -> None:
        if isinstance(sources, Sized):
            found = [item for source in sources for item in self._find(source)]
            self._total_bytes = sum(_size(item) for item in found)
            for item in found:
                self._take(item)
        else:  # a generator: it may be endless, so take it as it comes
            for source in sources:
                for item in self._find(source):
                    self._take(item)

    def _find(self, source: Source) -> Iterable[_Item]:
        if isinstance(source, TextSource | FileBytes | Later):
            return [source]
        if isinstance(source, tuple):
            return [TextSource(*source)]
        path = Path(source)
        folder = folder_of(path)
        if folder is not None:
            self._folders.append(folder)
        return find_files(path, self._options.selection)

    def _take(self, item: _Item) -> None:
        match item:
            case Skipped():
                self._skipped.append(item)
            case Ignored():
                self._ignored += 1
            case TextSource():
                self._take_text(item)
            case FileBytes(name, data):
                self._take_bytes(f"{UPLOAD}{name}", Path(name), data)
            case Later():
                self._take(item.read())
            case FoundFile(path, _):
                self._take_file(path)

    def _take_file(self, path: Path) -> None:
        source = str(path)
        if source in self._present:
            return  # named twice, or reached by two links
        self._present[source] = ""
        self.tell("read", source)
        try:
            data = read_bytes(path, self._options.limits)
        except (CorpusError, OSError) as error:
            self._skip(source, error)
            return
        self._take_bytes(source, path, data)

    def _take_bytes(self, source: str, path: Path, data: bytes) -> None:
        """`path` is looked at for its name alone."""
        fingerprint = f"{PARSERS_VERSION}:{hashlib.sha256(data).hexdigest()}"
        if self._is_unchanged(source, fingerprint, len(data)):
            return
        try:
            records = parse(path, data, self._options.limits)
        except Exception as error:  # whatever a parser trips over, the other files can do without
            self._skip(source, error)
            return
        self._queue(_File(source, fingerprint), records, len(data))

    def _take_text(self, item: TextSource) -> None:
        fingerprint = _text_fingerprint(item.title, item.text)
        key = (item.key or fingerprint).encode(errors="replace").decode()  # the catalogue's UTF-8
        source = f"text:{key}"
        if self._present.get(source) == fingerprint:
            return  # the same text twice in one run
        self._present[source] = fingerprint
        if self._is_unchanged(source, fingerprint, _size(item)):
            return
        try:
            records = lone_record(item.title, item.text)
        except CorpusError as error:
            self._skip(f"{source} ({item.title[:60]!a})", error)
            return
        self._queue(_File(source, fingerprint), records, _size(item))

    def _skip(self, source: str, error: Exception) -> None:
        self._skipped.append(Skipped(source, _reason(error)))

    def _is_unchanged(self, source: str, fingerprint: str, size_bytes: int) -> bool:
        if self._catalogue.source_fingerprint(source) != fingerprint:
            return False
        self._unchanged += len(self._catalogue.fingerprints(source))
        self._done_bytes += size_bytes
        return True

    def _queue(self, file: _File, records: Sequence[Record], size_bytes: int) -> None:
        """Cut what is new or changed in a file, and write when the window is full.

        Only cutting is guarded: trouble while writing is not the file's fault and stops the run.
        A file that cannot be cut to its end stays unfinished: the next run looks at it again.
        """
        old = self._catalogue.fingerprints(file.source)
        num_chars = sum(len(record.text) for record in records)
        for record in records:
            share_bytes = size_bytes * len(record.text) // num_chars
            document_id = _document_id(file.source, record.key)
            file.seen.add(document_id)
            fingerprint = _text_fingerprint(record.title, record.text)
            if old.get(document_id) == fingerprint:
                self._unchanged += 1
                self._done_bytes += share_bytes
                continue
            document = Document(document_id, file.source, record.title, record.text)
            try:
                placed = list(self._chunker.cut(record.title, record.text))
                assert placed, "parsers leave blank records out"
            except Exception as error:  # see _take_file
                self._skip(file.source, error)
                return
            self._cut_chunks += len(placed)
            file.num_pending += 1
            is_update = document_id in old
            self._window.append(
                _Pending(file, document, fingerprint, placed, is_update, share_bytes)
            )
            self._window_chunks += len(placed)
            if self._window_chunks >= WINDOW:
                self.flush()
        file.is_read = True
        self._finish_if_done(file)

    # ── writing ──────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Embed what the window holds, then commit its documents one by one.

        Any trouble ends the run as one CorpusError; what was committed stays.
        """
        try:
            self._flush()
        except KVWeaveError:
            raise
        except Exception as error:
            raise CorpusError(
                f"ingest stopped while embedding and storing ({_reason(error)}); what is complete "
                "stays, run it again to go on"
            ) from error

    def _flush(self) -> None:
        window, self._window, self._window_chunks = self._window, [], 0
        window_bytes = sum(pending.size_bytes for pending in window)
        self._embed([p.chunk for pending in window for p in pending.placed], window_bytes)
        for pending in window:
            written = self._catalogue.put(pending.document, pending.fingerprint, pending.placed)
            self._new_chunks += len(written.new)
            self.new_ids += written.new
            self._shared_chunks += len({p.chunk.id for p in pending.placed}) - len(written.new)
            self._orphaned += written.orphaned
            self._updated += pending.is_update
            self._added += not pending.is_update
            self._done_bytes += pending.size_bytes
            pending.file.num_pending -= 1
            self._finish_if_done(pending.file)
        self.tell("embed", "")

    def _embed(self, chunks: Sequence[Chunk], window_bytes: int) -> None:
        by_id = {chunk.id: chunk for chunk in chunks}
        known = self._catalogue.with_vectors(list(by_id))
        todo = [chunk for chunk_id, chunk in by_id.items() if chunk_id not in known]
        todo.sort(key=lambda chunk: len(chunk.token_ids))
        for start in range(0, len(todo), SLICE):
            part = todo[start : start + SLICE]
            vectors = self._kb.embedder.embed_passages([chunk.text for chunk in part])
            self._catalogue.put_vectors([chunk.id for chunk in part], vectors)
            self.tell("embed", "", window_bytes * (start + len(part)) // len(todo))

    def _finish_if_done(self, file: _File) -> None:
        """All documents are in: drop those that left the file, and mark it as done."""
        if not file.is_read or file.num_pending:
            return
        gone = [d for d in self._catalogue.fingerprints(file.source) if d not in file.seen]
        if gone:
            self._orphaned += self._catalogue.remove(gone, keep_vectors=True).orphaned
            self._removed += len(gone)
        self._catalogue.finish_source(file.source, file.fingerprint)

    def prune(self) -> None:
        """Forget files below the given folders that are no longer there."""
        if not self._options.prune:
            return
        for source in self._catalogue.sources():
            below = any(Path(source).is_relative_to(folder) for folder in self._folders)
            if below and source not in self._present and not Path(source).exists():
                self._removed += len(self._catalogue.fingerprints(source))
                self._orphaned += self._catalogue.forget_source(source).orphaned

    def encode(self, encoder: Encoder, *, only_new: bool) -> None:
        """Offer every chunk to the encoder, or those that came in this run and are still there."""
        self._cut_chunks = 0
        catalogue = self._catalogue
        batches = (
            catalogue.some_chunks(self.new_ids, ENCODE_BATCH)
            if only_new
            else catalogue.all_chunks(ENCODE_BATCH)
        )
        for chunks in batches:
            encoder.encode(chunks)
            self._cut_chunks += len(chunks)
            self.tell("encode", "")

    # ── telling ──────────────────────────────────────────────────────────────

    def tell(self, phase: Phase, source: str, embedded_bytes: int = 0) -> None:
        if self._progress is not None:
            self._progress(
                IngestProgress(
                    phase,
                    self._done_bytes + embedded_bytes,
                    self._total_bytes,
                    self._added + self._updated + self._unchanged,
                    self._cut_chunks,
                    source,
                )
            )

    def report(self) -> IngestReport:
        return IngestReport(
            added=self._added,
            updated=self._updated,
            unchanged=self._unchanged,
            removed=self._removed,
            new_chunks=self._new_chunks,
            shared_chunks=self._shared_chunks,
            skipped=tuple(self._skipped),
            ignored_files=self._ignored,
            orphaned=tuple(self._catalogue_orphans()),
            elapsed_s=time.monotonic() - self._started,
        )

    def _catalogue_orphans(self) -> list[ChunkId]:
        """Orphans that no later document of this run took in again."""
        alive = self._catalogue.chunks(self._orphaned)
        return [chunk_id for chunk_id in self._orphaned if chunk_id not in alive]


def _document_id(source: str, key: str) -> DocumentId:
    digest = hashlib.blake2b(f"{source}\0{key}".encode(errors="surrogateescape"), digest_size=16)
    return DocumentId(digest.hexdigest())


def _text_fingerprint(title: str, text: str) -> str:
    data = f"{title}\0{text}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    """In one line. Our own errors say it all; of others the type tells as much as the words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = " ".join(str(error).split())[:200]
    if isinstance(error, KVWeaveError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _size(item: _Item) -> int:
    if isinstance(item, FoundFile | Later):
        return item.size_bytes
    if isinstance(item, FileBytes):
        return len(item.data)
    return len(item.text) if isinstance(item, TextSource) else 0
