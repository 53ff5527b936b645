"""Finds what to ingest: files in folders, single files, texts from Python. Reads no content."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from kvweave.corpus.metadata import Metadata, check_metadata
from kvweave.corpus.parsers import ENDINGS, ParseLimits
from kvweave.errors import CorpusError, error_words
from kvweave.ingest.report import Skipped

# What a path can do: not be there or be too long, loop or name no user, hold a NUL.
BAD_PATH = (OSError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text handed over from Python. The same `key` later means an update of the same document.

    Without a key the content is the key: adding it again changes nothing.
    """

    title: str
    text: str
    key: str | None = None
    metadata: Metadata = field(default_factory=dict)  # see corpus/metadata.py


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A file whose bytes are at hand, such as an upload. The same `name` later means an update.

    The name is never opened: it identifies the document, and its ending chooses the parser.
    """

    name: str
    data: bytes
    metadata: Metadata = field(default_factory=dict)  # of every document in it


@dataclass(frozen=True, slots=True)
class Later:
    """A source that is read when its turn comes, on the thread that ingests, and let go behind it:
    of many that wait, none is in memory."""

    size_bytes: int
    read: Callable[[], TextSource | FileBytes]


Source = str | Path | tuple[str, str] | TextSource | FileBytes | Later


class FoundFile(NamedTuple):
    path: Path  # resolved: the file's identity
    size_bytes: int


class Ignored(NamedTuple):
    """A file in a folder that no parser knows. Not worth a complaint."""

    path: Path


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files of a folder count. Patterns match the name or the path below the folder."""

    include: tuple[str, ...] = ()  # empty: every kind that has a parser
    exclude: tuple[str, ...] = ()
    roots: tuple[Path, ...] | None = None  # nothing outside these; None: anywhere (command line)

    def wants(self, relative: str) -> bool:
        name = relative.rpartition("/")[2]

        def any_of(patterns: Iterable[str]) -> bool:
            return any(fnmatchcase(relative, p) or fnmatchcase(name, p) for p in patterns)

        return (not self.include or any_of(self.include)) and not any_of(self.exclude)


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options of one ingest. Raises RequestError for metadata that cannot be."""

    selection: Selection = field(default_factory=Selection)
    limits: ParseLimits = field(default_factory=ParseLimits)
    prune: bool = False  # remove documents of files that are gone from the given folders
    # of every document of the run; what a source says of itself goes before
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_metadata(self.metadata)


def ensure_inside(roots: Sequence[Path], path: Path) -> Path:
    """The resolved path, if it lies in one of `roots` after following every symlink.

    Raises CorpusError otherwise, in the same words whether or not the file exists: a caller
    outside learns nothing about what is there.
    """
    try:
        resolved = path.expanduser().resolve()
    except BAD_PATH as error:
        raise CorpusError("outside the allowed folders") from error
    for root in roots:
        if resolved.is_relative_to(root.resolve()):
            return resolved
    raise CorpusError("outside the allowed folders")


def folder_of(path: Path) -> Path | None:
    """The resolved path if it is a folder; None for anything else, also for an impossible name."""
    try:
        start = path.expanduser()
        return start.resolve() if stat.S_ISDIR(start.stat().st_mode) else None
    except BAD_PATH:
        return None


def find_files(path: Path, selection: Selection) -> Iterator[FoundFile | Ignored | Skipped]:
    """The file itself, or the files below a folder in a stable order. Hidden ones are left out.

    Links are followed. A folder that several links lead to is entered once, from the first place
    in that order; one that contains itself is reported.
    """
    try:
        start = path.expanduser()
        if selection.roots is not None:
            ensure_inside(selection.roots, start)
        # stat raises where is_dir might say no: a missing file, a link to itself
        is_folder = stat.S_ISDIR(start.stat().st_mode)
    except (*BAD_PATH, CorpusError) as error:
        yield Skipped(_printable(path), _reason(error))
        return
    if not is_folder:
        yield _look_at(start, selection)
        return
    yield from _Walk(selection).find(start)


class _Folder(NamedTuple):
    key: tuple[int, int]  # device and inode: its identity
    below: str  # path below the start, with a slash at the end
    entries: Iterator[os.DirEntry[str]]


class _Walk:
    """Goes through a folder depth first, with a stack of its own: a tree may be deeper than Python
    recurses."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._visited: set[tuple[int, int]] = set()
        self._stack: list[_Folder] = []

    def find(self, start: Path) -> Iterator[FoundFile | Ignored | Skipped]:
        yield from self._enter(start, "")
        while self._stack:
            entry = next(self._stack[-1].entries, None)
            if entry is None:
                self._stack.pop()
            elif not entry.name.startswith("."):
                yield from self._look_at(entry, f"{self._stack[-1].below}{entry.name}")

    def _look_at(
        self, entry: os.DirEntry[str], relative: str
    ) -> Iterator[FoundFile | Ignored | Skipped]:
        path = Path(entry.path)
        try:
            is_folder = entry.is_dir()
        except OSError as error:
            yield Skipped(_printable(path), _reason(error))
            return
        if is_folder:
            if not any(fnmatchcase(relative, p) for p in self._selection.exclude):
                yield from self._enter(path, f"{relative}/")
        elif self._selection.wants(relative):
            is_known = path.suffix.lower() in ENDINGS
            yield _look_at(path, self._selection) if is_known else Ignored(path)

    def _enter(self, path: Path, below: str) -> Iterator[Skipped]:
        """Put a folder on the stack, unless it was entered already; yield why it cannot be."""
        try:
            info = path.stat()
            key = (info.st_dev, info.st_ino)
            if any(folder.key == key for folder in self._stack):
                raise CorpusError("a symlink loop: the folder contains itself")
            if self._selection.roots is not None:
                ensure_inside(self._selection.roots, path)
            if key in self._visited:
                return  # linked from two places: its files are found already
            with os.scandir(path) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except (*BAD_PATH, CorpusError) as error:
            yield Skipped(_printable(path), _reason(error))
            return
        self._visited.add(key)
        self._stack.append(_Folder(key, below, iter(entries)))


def _look_at(path: Path, selection: Selection) -> FoundFile | Skipped:
    try:
        resolved = path.resolve()
        if selection.roots is not None:
            resolved = ensure_inside(selection.roots, path)
        str(resolved).encode()  # it becomes a key in the catalogue
        return FoundFile(resolved, resolved.stat().st_size)
    except UnicodeEncodeError:
        return Skipped(_printable(path), "the file's name is not valid UTF-8; rename it")
    except (*BAD_PATH, CorpusError) as error:
        return Skipped(_printable(path), _reason(error))


def _printable(path: Path) -> str:
    """The text, escaped where it is not valid UTF-8 (a report may become JSON)."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return ascii(str(path))
    return str(path)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return error_words(error)
