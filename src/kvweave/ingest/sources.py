"""Finds what to ingest: files in folders, single files, texts from Python. Reads no content."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from kvweave.corpus.parsers import ENDINGS
from kvweave.errors import CorpusError
from kvweave.ingest.report import Skipped


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text handed over from Python. The same `key` later means an update of the same document.

    Without a key the content is the key: adding it again changes nothing.
    """

    title: str
    text: str
    key: str | None = None


Source = str | Path | tuple[str, str] | TextSource


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


def ensure_inside(roots: Sequence[Path], path: Path) -> Path:
    """The resolved path, if it lies in one of `roots` after following every symlink.

    Raises CorpusError otherwise, in the same words whether or not the file exists: a caller
    outside learns nothing about what is there.
    """
    try:
        resolved = path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL in the name
        raise CorpusError("outside the allowed folders") from error
    for root in roots:
        if resolved.is_relative_to(root.resolve()):
            return resolved
    raise CorpusError("outside the allowed folders")


def find_files(path: Path, selection: Selection) -> Iterator[FoundFile | Ignored | Skipped]:
    """The file itself, or the files below a folder in a stable order. Hidden ones are left out.

    Links are followed; a folder that is its own ancestor is reported once and not entered.
    """
    try:
        start = path.expanduser()
        if selection.roots is not None:
            ensure_inside(selection.roots, start)
        is_folder = start.is_dir()
        if not is_folder:
            start.stat()  # says what is wrong with a missing file or a link to itself
    except (OSError, ValueError, CorpusError) as error:  # ValueError: a NUL in the name
        yield Skipped(str(path), _reason(error))
        return
    if not is_folder:
        yield _look_at(start, selection)
        return
    yield from _walk(start, "", selection, ancestors=())


def _walk(
    folder: Path, below: str, selection: Selection, ancestors: tuple[tuple[int, int], ...]
) -> Iterator[FoundFile | Ignored | Skipped]:
    try:
        info = folder.stat()
        if (info.st_dev, info.st_ino) in ancestors:
            yield Skipped(str(folder), "a symlink loop: the folder contains itself")
            return
        if selection.roots is not None:
            ensure_inside(selection.roots, folder)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (OSError, CorpusError) as error:
        yield Skipped(str(folder), _reason(error))
        return
    ancestors = (*ancestors, (info.st_dev, info.st_ino))
    for entry in entries:
        if entry.name.startswith("."):
            continue
        relative, path = f"{below}{entry.name}", Path(entry.path)
        try:
            is_folder = entry.is_dir()
        except OSError as error:
            yield Skipped(str(path), _reason(error))
            continue
        if is_folder:
            if not any(fnmatchcase(relative, p) for p in selection.exclude):
                yield from _walk(path, f"{relative}/", selection, ancestors)
        elif not selection.wants(relative):
            continue
        elif path.suffix.lower() in ENDINGS:
            yield _look_at(path, selection)
        else:
            yield Ignored(path)


def _look_at(path: Path, selection: Selection) -> FoundFile | Skipped:
    try:
        resolved = path.resolve()
        if selection.roots is not None:
            resolved = ensure_inside(selection.roots, path)
        str(resolved).encode()  # it becomes a key in the catalogue
        return FoundFile(resolved, resolved.stat().st_size)
    except UnicodeEncodeError:
        return Skipped(ascii(str(path)), "the file's name is not valid UTF-8; rename it")
    except (OSError, RuntimeError, CorpusError) as error:
        return Skipped(str(path), _reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split())
