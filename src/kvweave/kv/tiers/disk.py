"""Chunk objects as files.

    root/objects/<context>/<xx>/<key>.kv    xx: the first byte of the content id, 256 folders
    root/tmp/                               being written; swept at the next start
    root/quarantine/                        damaged objects, the newest up to a byte bound

A file appears under its name only when it is complete and on the medium: written under a temporary
name, fsync, rename, fsync of the folder. Killed at any moment, a writer leaves at most a temporary
file. Each is locked while its writer lives, so the sweep of one process never takes the file of
another. An unreadable folder below the root is skipped with a warning: its objects are misses.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.checksum import Buffer
from kvweave.kv.config import DiskTierConfig
from kvweave.kv.keys import ChunkKey, context_of, parse_key
from kvweave.kv.tiers.base import StoredObject

log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAX_PARTS = 1024  # IOV_MAX on Linux


class DiskReader:
    """One open file. The open descriptor keeps a deleted file readable."""

    def __init__(self, path: str, descriptor: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._path = path
        self._descriptor: int | None = descriptor
        self._lock = threading.Lock()

    def read(self, offset: int, out: memoryview) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            raise TierError(f"{self._path} was closed")
        done = 0
        while done < len(out):
            try:
                got = os.preadv(descriptor, [out[done:]], offset + done)
            except OSError as error:
                raise TierError(f"cannot read {self._path}: {error.strerror}") from error
            if got == 0:
                raise TierCorrupt(f"{self._path} ends at {offset + done}, wanted {len(out) - done}")
            done += got

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class DiskTier:
    """A folder of objects. Several processes may share it.

    A folder that can be read but not written serves reads; each write raises TierError.
    """

    durable: ClassVar[bool] = True
    remote: ClassVar[bool] = False
    # what a core reads and then checks out of its own cache; larger reads leave one of two threads
    # idle at the end of a chunk (bench/tiers.py)
    best_read_bytes: ClassVar[int] = 1 << 20

    def __init__(self, cfg: DiskTierConfig, *, sweep: bool = True) -> None:
        """`sweep=False` leaves what dead writers left: for those who only look."""
        self.name = "disk"
        self._cfg = cfg
        self._objects = cfg.root / "objects"
        self._tmp = cfg.root / "tmp"
        self._quarantine = cfg.root / "quarantine"
        self._known_folders: set[Path] = set()
        self._skipped: set[Path] = set()  # unreadable folders that the log has named
        self._flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            for folder in (self._objects, self._tmp):
                self._make_folder(folder)
            os.listdir(self._objects)
        except OSError as error:
            if not _readable(self._objects):
                raise TierError(
                    f"cannot use {cfg.root} as a store: {error.strerror}; "
                    "give a folder this user can read and write"
                ) from error
            log.warning("%s cannot be written (%s): reading only", cfg.root, error.strerror)
        if sweep:
            self._sweep()
        if cfg.direct_io:
            self._flags |= self._direct_flag()

    def size(self, key: ChunkKey) -> int | None:
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._trouble("look at", key, error) from error

    def open(self, key: ChunkKey) -> DiskReader | None:
        path = self._name(key)
        try:
            descriptor = os.open(path, self._flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._trouble("open", key, error) from error
        return DiskReader(path, descriptor, os.fstat(descriptor).st_size)

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        final = self._path(key)
        temporary = self._tmp / f"{key.hex()}.{os.urandom(8).hex()}.tmp"
        try:
            self._ensure_folder(final.parent)
            self._write_file(temporary, final, parts)
            if self._cfg.fsync:
                _sync_folder(final.parent)
        except OSError as error:
            with suppress(OSError):  # it may be the disk itself that is gone
                temporary.unlink(missing_ok=True)
            self._known_folders.discard(final.parent)
            if error.errno in _NO_ROOM:
                return False
            raise self._trouble("write", key, error) from error
        return True

    def delete(self, key: ChunkKey) -> bool:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._trouble("delete", key, error) from error
        return True

    def quarantine(self, key: ChunkKey) -> bool:
        try:
            self._quarantine.mkdir(exist_ok=True)
            aside = self._quarantine / f"{key.hex()}.{time.time_ns()}{_SUFFIX}"
            os.replace(self._path(key), aside)
            self._trim_quarantine()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._trouble("quarantine", key, error) from error
        return True

    def scan(self) -> Iterator[StoredObject]:
        for entry in self._files(self._objects):
            key = parse_key(entry.name.removesuffix(_SUFFIX))
            if key is None or not entry.name.endswith(_SUFFIX):
                continue  # not ours: leave it alone
            try:
                stat = entry.stat()
            except FileNotFoundError:  # deleted since it was listed
                continue
            except OSError as error:
                self._skip(Path(entry.path).parent, error)
                continue
            yield StoredObject(key, stat.st_size, stat.st_mtime)

    def close(self) -> None:
        """Nothing is held between calls."""

    def quarantined(self) -> list[Path]:
        """Files put aside, oldest first."""
        return sorted(Path(e.path) for e in self._files(self._quarantine))

    def clear_quarantine(self) -> int:
        """Delete what was put aside; returns how many bytes that freed."""
        freed = 0
        for path in self.quarantined():
            freed += path.stat().st_size
            path.unlink()
        return freed

    def temporaries(self) -> list[Path]:
        """Files being written now, or left by a dead writer until the next sweep."""
        return sorted(Path(e.path) for e in self._files(self._tmp))

    def _path(self, key: ChunkKey) -> Path:
        return Path(self._name(key))

    def _name(self, key: ChunkKey) -> str:
        """Where an object lies, as a string: a Path takes longer to make than a file to open."""
        name = key.hex()
        context = context_of(key).hex()
        shard = name[len(context) : len(context) + 2]
        return f"{self._objects}/{context}/{shard}/{name}{_SUFFIX}"

    def _write_file(self, path: Path, final: Path, parts: Sequence[Buffer]) -> None:
        """Write under one name, then give it the other. Locked until it has it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # tells the sweep that the writer lives
            _write_all(descriptor, parts)
            if self._cfg.fsync:
                os.fsync(descriptor)
            os.replace(path, final)
        finally:
            os.close(descriptor)

    def _ensure_folder(self, folder: Path) -> None:
        """Make a shard folder that survives a power cut, and those above it up to the root."""
        if folder in self._known_folders:
            return
        self._make_folder(folder)
        if self._cfg.fsync:  # whoever made them may not have synced them yet
            for parent in (folder.parent, self._objects, self._cfg.root):
                _sync_folder(parent)
        self._known_folders.add(folder)

    def _make_folder(self, folder: Path) -> None:
        """mkdir -p, with an fsync of every folder that got a new entry."""
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if self._cfg.fsync:
            for each in made:
                _sync_folder(each.parent)

    def _files(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        """Every file below a folder; none if it does not exist (any more)."""
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._skip(folder, error)
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(Path(entry.path))
            else:
                yield entry

    def _skip(self, folder: Path, error: OSError) -> None:
        """Say once that a folder is left out. A root that cannot be listed is no store at all."""
        if folder == self._objects:
            raise TierError(f"cannot list {folder}: {error.strerror}") from error
        if folder not in self._skipped:
            self._skipped.add(folder)
            log.warning("%s is left out: %s; make it readable", folder, error.strerror)

    def _sweep(self) -> None:
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

    def _trim_quarantine(self) -> None:
        newest_first = sorted(self.quarantined(), key=lambda p: p.stat().st_mtime, reverse=True)
        kept = 0
        for path in newest_first:
            kept += path.stat().st_size
            if kept > self._cfg.quarantine_bytes:
                path.unlink()

    def _direct_flag(self) -> int:
        """O_DIRECT where this filesystem takes it, 0 with a log line where it does not."""
        probe = self._tmp / f"direct.{os.getpid()}.tmp"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
            return os.O_DIRECT
        except OSError as error:
            log.warning("direct_io: %s refuses it (%s); buffered", self._cfg.root, error.strerror)
            return 0
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def _trouble(self, verb: str, key: ChunkKey, error: OSError) -> TierError:
        return TierError(
            f"disk cannot {verb} {key.hex()[:16]}… in {self._cfg.root}: {error.strerror}"
        )


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


def _readable(folder: Path) -> bool:
    try:
        os.listdir(folder)
    except OSError:
        return False
    return True
