"""The files of a store on disk: listed, written whole or not at all, put aside when damaged.

A file appears under its name only when it is complete and on the medium: written under a temporary
name, fsync, rename, fsync of the folder. Killed at any moment, a writer leaves at most a temporary
file. Each is locked while its writer lives, so the sweep of one process never takes the file of
another. Several processes may share a folder, so a file may be gone by the time it is looked at.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvweave.errors import TierError
from kvweave.kv.format.header import Buffer
from kvweave.paths import sync

log = logging.getLogger(__name__)


class Listing:
    """Thread-safe: two threads that meet the same closed folder name it twice at worst."""

    def __init__(self, needed: Path) -> None:
        """Without `needed` there is no store at all: if it cannot be listed, TierError."""
        self._needed = needed
        self._skipped: set[Path] = set()

    def files(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        """Every file below a folder; none if it does not exist (any more)."""
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.skip(folder, error)
            return
        for entry in entries:
            try:
                is_folder = entry.is_dir(follow_symlinks=False)
            except OSError as error:  # on a file system that does not tell what a name stands for
                self.skip(folder, error)
                return
            if is_folder:
                yield from self.files(Path(entry.path))
            else:
                yield entry

    def skip(self, folder: Path, error: OSError) -> None:
        """Leave a folder out, and say so the first time."""
        if folder == self._needed:
            raise TierError(f"cannot list {folder}: {error.strerror}") from error
        if folder not in self._skipped:
            self._skipped.add(folder)
            log.warning("%s is left out: %s; make it readable", folder, error.strerror)


class Quarantine:
    """One folder. Any thread; OSErrors are the caller's to word."""

    def __init__(self, folder: Path, max_bytes: int, listing: Listing) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._listing = listing

    def put(self, path: Path) -> None:
        """Take a file in, and let the oldest go. FileNotFoundError: it is not there."""
        self.folder.mkdir(exist_ok=True)
        os.replace(path, self.folder / f"{path.stem}.{time.time_ns()}{path.suffix}")
        self._trim()

    def files(self) -> list[Path]:
        """What was put aside, oldest first."""
        found = [Path(entry.path) for entry in self._listing.files(self.folder)]
        return sorted(found, key=lambda path: (_put_aside_ns(path), path.name))

    def size_bytes(self) -> int:
        return sum(_size_bytes(path) for path in self.files())

    def clear(self) -> int:
        """Delete all of it; returns how many bytes that freed."""
        return sum(_delete(path) for path in self.files())

    def _trim(self) -> None:
        kept_bytes = 0
        for path in reversed(self.files()):
            kept_bytes += _size_bytes(path)
            if kept_bytes > self._max_bytes:
                _delete(path)


def _put_aside_ns(path: Path) -> int:
    """When a file was put aside, read from its name; its own times are those of its writing."""
    digits = path.stem.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


def _size_bytes(path: Path) -> int:
    """Size of a file; 0 for one that is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _delete(path: Path) -> int:
    """Delete a file and return the bytes freed; 0 where another process was faster."""
    size_bytes = _size_bytes(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return size_bytes


_MAX_PARTS = 1024  # IOV_MAX on Linux


class DurableFiles:
    """Writes below `root`, by way of `root/tmp`. Any thread; OSErrors are the caller's to word."""

    def __init__(self, root: Path, listing: Listing, *, fsync: bool) -> None:
        """`fsync=False`: whole, but a power cut may take them."""
        self.tmp = root / "tmp"
        self._root = root
        self._listing = listing
        self._fsync = fsync
        self._known_folders: set[Path] = set()

    def write(self, final: Path, parts: Sequence[Buffer]) -> None:
        """The concatenation of `parts` as a file. After an OSError nothing of it is left."""
        temporary = self.tmp / f"{final.stem}.{os.urandom(8).hex()}.tmp"
        try:
            self._ensure_folder(final.parent)
            self._write_file(temporary, final, parts)
            if self._fsync:
                sync(final.parent)
        except OSError:
            with suppress(OSError):  # it may be the disk itself that is gone
                temporary.unlink(missing_ok=True)
            self._known_folders.discard(final.parent)
            raise

    def make_folder(self, folder: Path) -> None:
        """mkdir -p, with an fsync of every folder that got a new entry."""
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if self._fsync:
            for each in made:
                sync(each.parent)

    def sync_names(self, folders: Iterable[Path]) -> None:
        """The names in these folders are on the medium, and the absence of others; a folder that
        is not there has none."""
        if self._fsync:
            for folder in folders:
                with suppress(FileNotFoundError):
                    sync(folder)

    def temporaries(self) -> list[Path]:
        """Files being written now, or left by a dead writer until the next sweep."""
        return sorted(Path(entry.path) for entry in self._listing.files(self.tmp))

    def sweep(self) -> None:
        """Remove temporary files whose writer is dead."""
        for path in self.temporaries():
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # gone already, or not ours to touch
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                log.info("removed %s, left by a writer that died", path.name)
            except OSError:
                continue  # locked: its writer lives
            finally:
                os.close(descriptor)

    def _write_file(self, path: Path, final: Path, parts: Sequence[Buffer]) -> None:
        """Write under one name, then give it the other. Locked until it has it."""
        descriptor = _create_locked(path)
        try:
            _write_all(descriptor, parts)
            if self._fsync:
                os.fsync(descriptor)
            os.replace(path, final)
        finally:
            os.close(descriptor)

    def _ensure_folder(self, folder: Path) -> None:
        """Make a folder that survives a power cut, and those above it up to the root."""
        if folder in self._known_folders:
            return
        self.make_folder(folder)
        if self._fsync:  # the process that made them may not have synced them yet
            for parent in folder.parents:
                sync(parent)
                if parent == self._root:
                    break
        self._known_folders.add(folder)


def _create_locked(path: Path) -> int:
    """A new file whose lock tells the sweep that its writer lives. One that was swept before it was
    locked has no name any more: made again."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_named = os.fstat(descriptor).st_nlink > 0
        except BaseException:
            os.close(descriptor)
            raise
        if is_named:
            return descriptor
        os.close(descriptor)


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Gather-write; the kernel may take less than asked, most often just before it is full."""
    pending = [memoryview(part).cast("B") for part in parts if len(part)]
    while pending:
        done = os.writev(descriptor, pending[:_MAX_PARTS])
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]
