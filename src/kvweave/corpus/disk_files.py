"""Writes files that outlive a power cut, and turns what a disk says into errors of ours.

A file's content is on the disk after an fsync of the file, its name after one of the folder it is
in. So is the absence of a name: what was removed may be back until its folder was synced.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvweave.errors import CorpusBusy, CorpusError, CorpusFull, CorpusReadOnly
from kvweave.paths import sync

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
READ_ONLY = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))


def make_folder(folder: Path) -> None:
    """mkdir -p. A folder that a power cut takes has lost what was acknowledged in it."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that appears whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)  # the new name itself


def sweep_temporaries(folder: Path) -> None:
    """Remove what killed writers left behind. Only for the holder of the writer lock."""
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)


def as_corpus_error(
    error: OSError | sqlite3.DatabaseError, what: str, otherwise: str = ""
) -> CorpusError:
    """`error` in one line that begins with `what`, of the kind it is; `otherwise` is the way out of
    what is neither a full nor a read-only disk."""
    kind, way_out = _kind_of(error)
    way_out = way_out or otherwise
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return kind(f"{what}: {reason}{way_out}")


@contextmanager
def disk_trouble(what: str) -> Iterator[None]:
    """Raise what a full or a read-only disk says as an error of ours, which begins with `what`.
    Everything else is raised as it is."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        failure = as_corpus_error(error, what)
        if type(failure) is CorpusError:
            raise
        raise failure from error


def _kind_of(error: OSError | sqlite3.DatabaseError) -> tuple[type[CorpusError], str]:
    if isinstance(error, OSError):
        if error.errno in FULL:
            return CorpusFull, "; free some room"
        if error.errno in READ_ONLY:
            return CorpusReadOnly, "; make it writable"
        return CorpusError, ""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):  # its index of the log has no room
        return CorpusFull, "; free some room"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return CorpusReadOnly, "; make it writable"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return CorpusBusy, "; try again"
    return CorpusError, ""
