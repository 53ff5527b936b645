"""Sources to cut documents: finds, reads, parses, and cuts what is new or has changed.

A bad file is counted as skipped, and leaves what an earlier run took from it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.metadata import Metadata, check_metadata, digest_text
from kvweave.corpus.parsers import ParsedRecord, read_bytes
from kvweave.corpus.parsers.base import PARSERS_VERSION, lone_record
from kvweave.corpus.parsers.parser_process import parse_in_child
from kvweave.errors import CorpusError, EngineClosed
from kvweave.ingest.report import Skipped, Tally
from kvweave.ingest.sources import (
    FileBytes,
    FoundFile,
    Ignored,
    IngestOptions,
    Later,
    Source,
    TextSource,
    find_files,
    folder_of,
)
from kvweave.ingest.window import OpenSource, PendingDocument, Window
from kvweave.types import DocumentId, ParsedDocument, PlacedChunk

UPLOAD = "upload:"  # how sources begin that came as bytes with a name

_Item = FoundFile | Ignored | Skipped | TextSource | FileBytes | Later


class SourceReader:
    """Lives on the thread that ingests; what it cuts goes into the window."""

    def __init__(
        self,
        kb: KnowledgeBase,
        options: IngestOptions,
        window: Window,
        tally: Tally,
    ) -> None:
        self._catalogue = kb.catalogue
        self._chunker = kb.chunker
        self._selection = options.selection
        self._limits = options.limits
        self._metadata = dict(options.metadata)
        self._window = window
        self._tally = tally
        self._present: dict[str, str] = {}  # sources seen in this run; of texts the fingerprint
        self._folders: list[Path] = []

    def take_all(self, sources: Iterable[Source]) -> None:
        if isinstance(sources, Sized):
            found = [item for source in sources for item in self._find(source)]
            self._tally.total_bytes = sum(_size(item) for item in found)
            for item in found:
                self._take(item)
        else:  # a generator: it may be endless, so take it as it comes
            for source in sources:
                for item in self._find(source):
                    self._take(item)

    def missing_sources(self) -> list[str]:
        """Sources of earlier runs below the folders of this one whose file is no longer there."""
        return [
            source
            for source in self._catalogue.sources()
            if any(Path(source).is_relative_to(folder) for folder in self._folders)
            and source not in self._present
            and _is_gone(Path(source))
        ]

    def _find(self, source: Source) -> Iterable[_Item]:
        if isinstance(source, TextSource | FileBytes | Later):
            return [source]
        if isinstance(source, tuple):
            return [TextSource(*source)]
        path = Path(source)
        folder = folder_of(path)
        if folder is not None:
            self._folders.append(folder)
        return find_files(path, self._selection)

    def _take(self, item: _Item) -> None:
        match item:
            case Skipped():
                self._tally.record_skipped(item)
            case Ignored():
                self._tally.ignored_files += 1
            case TextSource():
                self._take_text(item)
            case FileBytes(name, data, metadata):
                self._take_bytes(f"{UPLOAD}{name}", Path(name), data, metadata)
            case Later():
                self._take(item.read())
            case FoundFile(path, _):
                self._take_file(path)

    def _take_file(self, path: Path) -> None:
        source = str(path)
        if source in self._present:
            return  # named twice, or reached by two links
        self._present[source] = ""
        self._tally.tell("read", source)
        try:
            data = read_bytes(path, self._limits)
        except (CorpusError, OSError) as error:
            self._tally.skip(source, error)
            return
        self._take_bytes(source, path, data)

    def _take_bytes(
        self, source: str, path: Path, data: bytes, metadata: Metadata | None = None
    ) -> None:
        """`path` is looked at for its name alone."""
        said = check_metadata({**self._metadata, **(metadata or {})})
        fingerprint = f"{PARSERS_VERSION}:{hashlib.sha256(data).hexdigest()}{_suffix(said)}"
        if self._is_unchanged(source, fingerprint, len(data)):
            return
        try:
            records = parse_in_child(path, data, self._limits, self._make_tick(source))
        except CorpusError as error:  # what a parser tripped over, the other files can do without
            self._tally.skip(source, error)
            return
        self._cut(OpenSource(source, fingerprint, said), records, len(data))

    def _make_tick(self, source: str) -> Callable[[], None]:
        """Return what to call while a source is read: the caller of the ingest hears of it, and can
        end it by an EngineClosed."""
        return lambda: self._tally.tell_reading(source)

    def _take_text(self, item: TextSource) -> None:
        said = check_metadata({**self._metadata, **item.metadata})
        content = _text_fingerprint(item.title, item.text)
        fingerprint = f"{content}{_suffix(said)}"
        key = (item.key or content).encode(errors="replace").decode()  # the catalogue's UTF-8
        source = f"text:{key}"
        if self._present.get(source) == fingerprint:
            return  # the same text twice in one run
        self._present[source] = fingerprint
        if self._is_unchanged(source, fingerprint, _size(item)):
            return
        try:
            records = lone_record(item.title, item.text)
        except CorpusError as error:
            self._tally.skip(f"{source} ({item.title[:60]!a})", error)
            return
        self._cut(OpenSource(source, fingerprint, said), records, _size(item))

    def _is_unchanged(self, source: str, fingerprint: str, size_bytes: int) -> bool:
        if self._catalogue.source_fingerprint(source) != fingerprint:
            return False
        self._tally.unchanged += len(self._catalogue.fingerprints(source))
        self._tally.done_bytes += size_bytes
        return True

    def _cut(self, source: OpenSource, records: Sequence[ParsedRecord], size_bytes: int) -> None:
        """Cut what is new or changed in a source into the window.

        Only cutting is guarded: trouble while writing is not the file's fault and stops the run.
        A file that cannot be cut to its end stays unfinished: the next run looks at it again.
        """
        old = self._catalogue.fingerprints(source.source)
        num_chars = sum(len(record.text) for record in records)
        tick = self._make_tick(source.source)
        for record in records:
            share_bytes = size_bytes * len(record.text) // num_chars
            document_id = _document_id(source.source, record.key)
            source.seen.add(document_id)
            content = _text_fingerprint(record.title, record.text)
            said = source.metadata
            if record.metadata:
                said = {**said, **json.loads(record.metadata)}  # what it says of itself goes before
            fingerprint = f"{content}{_suffix(said)}"
            if old.get(document_id) == fingerprint:
                self._tally.unchanged += 1
                self._tally.done_bytes += share_bytes
                continue
            document = ParsedDocument(document_id, source.source, record.title, record.text, said)
            placed: list[PlacedChunk] = []
            try:
                check_metadata(said)
                self._check_length(record.text)
                for chunk in self._chunker.cut(record.title, record.text, tick):
                    placed.append(chunk)
                    self._tally.num_chunks += 1
                assert placed, "parsers leave blank records out"
            except EngineClosed:
                raise
            except Exception as error:  # as for a parser
                self._tally.skip(source.source, error)
                return
            is_update = document_id in old
            self._window.add(
                PendingDocument(source, document, fingerprint, placed, is_update, share_bytes)
            )
        self._window.end_of(source)

    def _check_length(self, text: str) -> None:
        most = self._limits.document_chars
        if len(text) > most:
            raise CorpusError(
                f"{len(text):,} characters in one document are more than {most:,}; split it, or "
                "raise --max-file-mb where you run kvweave ingest"
            )


def _document_id(source: str, key: str) -> DocumentId:
    digest = hashlib.blake2b(f"{source}\0{key}".encode(errors="surrogateescape"), digest_size=16)
    return DocumentId(digest.hexdigest())


def _text_fingerprint(title: str, text: str) -> str:
    data = f"{title}\0{text}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _suffix(metadata: Metadata) -> str:
    """What metadata adds to a fingerprint: other metadata is another document. Nothing for none, as
    catalogues have it that knew of none."""
    if not metadata:
        return ""
    return f"+{hashlib.blake2b(digest_text(metadata).encode(), digest_size=8).hexdigest()}"


def _is_gone(path: Path) -> bool:
    """Whether a file is certainly not there. A file in a folder that is closed to us may be there:
    it stays."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _size(item: _Item) -> int:
    if isinstance(item, FoundFile | Later):
        return item.size_bytes
    if isinstance(item, FileBytes):
        return len(item.data)
    return len(item.text) if isinstance(item, TextSource) else 0
