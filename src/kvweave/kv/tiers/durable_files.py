"""Files that appear whole or not at all.

A file appears under its name only when it is complete and on the medium: written under a temporary
name, fsync, rename, fsync of the folder. Killed at any moment, a writer leaves at most a temporary
file. Each is locked while its writer lives, so the sweep of one process never takes the file of
another.
"""

import fcntl
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvweave.kv.format.checksum import Buffer
from kvweave.kv.tiers.listing import Listing

log = logging.getLogger(__name__)

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
                _sync_folder(final.parent)
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
                _sync_folder(each.parent)

    def sync_names(self, folders: Iterable[Path]) -> None:
        """The names in these folders are on the medium, and the absence of others; a folder that
        is not there has none."""
        if self._fsync:
            for folder in folders:
                with suppress(FileNotFoundError):
                    _sync_folder(folder)

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
                _sync_folder(parent)
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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
