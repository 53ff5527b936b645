"""Chunk objects as files.

    root/objects/<context>/<xx>/<key>.kv    xx: the first byte of the content id, 256 folders
    root/tmp/                               being written, swept at the next start
    root/quarantine/                        damaged objects, the newest of them

An unreadable folder below the root is skipped with a warning: its objects are misses.
"""

import errno
import logging
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.format.header import Buffer
from kvweave.kv.format.keys import ChunkKey, ChunkTag, context_of, parse_key
from kvweave.kv.tiers.base import StoredObject, among
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk_files import DurableFiles, Listing, Quarantine

log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
        if (size := os.fstat(descriptor).st_size) != self.size_bytes:
            raise TierCorrupt(f"{self._path} went from {self.size_bytes} to {size} bytes")
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

    A folder that can be read but not written serves reads; each write raises TierError. One that
    cannot be read either is opened all the same: `check` and `scan` try it again.
    """

    durable: ClassVar[bool] = True
    remote: ClassVar[bool] = False
    # what a core reads and then checks out of its own cache; larger reads leave one of two threads
    # idle at the end of a chunk (bench/tiers/run.py)
    writes_at_once: ClassVar[int] = 8  # each waits for the medium several times
    best_read_bytes: ClassVar[int] = 1 << 20

    def __init__(self, cfg: DiskTierConfig, *, sweep: bool = True) -> None:
        """`sweep=False` leaves what dead writers left: for a caller that only looks."""
        self.name = "disk"
        self.place = str(cfg.root.absolute())
        self._cfg = cfg
        self._objects = cfg.root / "objects"
        self._listing = Listing(needed=self._objects)
        self._files = DurableFiles(cfg.root, self._listing, fsync=cfg.fsync)
        self._aside = Quarantine(cfg.root / "quarantine", cfg.quarantine_bytes, self._listing)
        self._flags = os.O_RDONLY | os.O_CLOEXEC
        self._sweeps = sweep
        self._is_ready = False
        with suppress(TierError):
            self.check()

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
        try:
            self._files.write(self._path(key), parts)
        except OSError as error:
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

    def sync_deletions(self, keys: Iterable[ChunkKey]) -> None:
        """What was deleted of these so far, out of quarantine and of temporaries stays so after a
        power cut. Not part of `delete`: an object that was evicted may come back. Raises
        TierError."""
        folders = {self._path(key).parent for key in keys}
        try:
            self._files.sync_names(folders | {self._files.tmp, self._aside.folder})
        except OSError as error:
            raise TierError(
                f"deletions in {self._cfg.root} are not on the disk: {error.strerror}"
            ) from error

    def quarantine(self, key: ChunkKey) -> bool:
        try:
            self._aside.put(self._path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._trouble("quarantine", key, error) from error
        return True

    def scan(self) -> Iterator[StoredObject]:
        if not self._is_ready:
            self.check()
        for entry in self._listing.files(self._objects):
            key = parse_key(entry.name.removesuffix(_SUFFIX))
            if key is None or not entry.name.endswith(_SUFFIX):
                continue  # not ours: leave it alone
            try:
                stat = entry.stat()
            except FileNotFoundError:  # deleted since it was listed
                continue
            except OSError as error:
                self._listing.skip(Path(entry.path).parent, error)
                continue
            yield StoredObject(key, stat.st_size, stat.st_mtime)

    def tagged_keys(self, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        return among((each.key for each in self.scan()), tags)

    def check(self) -> None:
        try:
            if not self._is_ready:
                for folder in (self._objects, self._files.tmp):
                    self._files.make_folder(folder)
            os.listdir(self._objects)
        except OSError as error:
            if not _readable(self._objects):
                raise TierError(
                    f"cannot use {self._cfg.root} as a store: {error.strerror}; "
                    "give a folder this user can read and write"
                ) from error
            log.warning("%s cannot be written (%s): reading only", self._cfg.root, error.strerror)
        if self._is_ready:
            return
        if self._sweeps:
            self._files.sweep()
        if self._cfg.direct_io:
            self._flags |= self._direct_flag()
        self._is_ready = True

    def close(self) -> None:
        """Nothing is held between calls."""

    def quarantined_files(self) -> list[Path]:
        """Files put aside, oldest first."""
        return self._aside.files()

    def quarantined_bytes(self) -> int:
        return self._aside.size_bytes()

    def clear_quarantine(self) -> int:
        """Delete what was put aside; returns how many bytes that freed."""
        return self._aside.clear()

    def temporaries(self) -> list[Path]:
        """Files being written now, or left by a dead writer until the next sweep."""
        return self._files.temporaries()

    def _path(self, key: ChunkKey) -> Path:
        return Path(self._name(key))

    def _name(self, key: ChunkKey) -> str:
        """Where an object lies, as a string: a Path takes longer to make than a file to open."""
        name = key.hex()
        context = context_of(key).hex()
        shard = name[len(context) : len(context) + 2]
        return f"{self._objects}/{context}/{shard}/{name}{_SUFFIX}"

    def _direct_flag(self) -> int:
        """O_DIRECT where this filesystem takes it, 0 with a log line where it does not."""
        probe = self._files.tmp / f"direct.{os.getpid()}.tmp"
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


def _readable(folder: Path) -> bool:
    try:
        os.listdir(folder)
    except OSError:
        return False
    return True
