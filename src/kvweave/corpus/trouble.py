"""What a disk says, as an error of ours: a full disk and a read-only one can be told apart."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.errors import CorpusBusy, CorpusError, CorpusFull, CorpusReadOnly

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
READ_ONLY = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))


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
        told = as_corpus_error(error, what)
        if type(told) is CorpusError:
            raise
        raise told from error


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
