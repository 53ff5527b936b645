"""The file behind a catalogue: SQLite in WAL mode, a connection per thread, transactions.

One writer (`KnowledgeBase` holds the lock), any number of readers, in this process and in others.
Power loss may cost the last transactions but never tears one.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvweave.corpus.disk_files import as_corpus_error
from kvweave.corpus.migrations import migrate
from kvweave.errors import CorpusDamaged, CorpusError, CorpusFull
from kvweave.paths import sync

BUSY_TIMEOUT_S = 30.0


def connect(path: Path) -> sqlite3.Connection:
    """Open the file of a catalogue; never makes one. Any thread may have the connection, one at a
    time: another than the one that opened it closes it."""
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )


class Database:
    """One catalogue file. Methods may be called from any thread; each thread has a connection."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Raises CorpusDamaged for a file that is no catalogue, or is not there unless `create`
        says that it may be made."""
        self.path = path
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._writing = threading.RLock()
        if not create and not path.is_file():
            raise _lost_file_error(path)
        try:
            with self._writing:
                if not path.exists():
                    path.touch()  # connections open what is there, and never make another
                self._identity = _identity(path)
                self._use_wal()
                migrate(self.connection)
        except OSError as error:
            raise as_corpus_error(error, f"{path} cannot be opened") from error
        except sqlite3.DatabaseError as error:
            raise _opening_error(error, path) from error

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        self._opened.clear()
        self._local = threading.local()

    def checkpoint(self) -> None:
        """Everything committed so far is on the disk itself when this returns. Raises CorpusError.

        What was committed is in the log, so the log is synced. That it also gets into the file is
        another matter, which a reader may delay for as long as it likes: tried, not waited for.
        """
        with self._writing:
            try:
                self._sync_log()
                self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except (OSError, sqlite3.OperationalError) as error:
                failure = as_corpus_error(error, f"{self.path} is not on the disk")
                if isinstance(error, OSError) or not isinstance(failure, CorpusFull):
                    raise failure from error
            self._check_identity()

    def _sync_log(self) -> None:
        """Not by SQLite, which syncs it before it moves it into the file and may find that it
        cannot. It holds no lock on the log that closing our handle would drop."""
        with suppress(FileNotFoundError):  # all of it is in the file: synced before the log went
            sync(Path(f"{self.path}-wal"))
        sync(self.path.parent)  # the names themselves

    def _use_wal(self) -> None:
        """SQLite answers "locked" at once when two processes switch a new file: wait ourselves."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, whatever interrupts it. One at a time; others wait."""
        with self._writing:
            db = self.connection
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except (OSError, sqlite3.OperationalError) as error:
                raise as_corpus_error(error, str(self.path)) from error
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Several reads of one state."""
        db = self.connection
        db.execute("BEGIN")
        try:
            yield db
        finally:
            db.execute("COMMIT")

    def _check_identity(self) -> None:
        """What is written to a file that has lost its name is lost with the process."""
        if _identity(self.path) != self._identity:
            raise _lost_file_error(self.path)

    @property
    def connection(self) -> sqlite3.Connection:
        """The calling thread's own, opened on first use."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            self._check_identity()
            connection = connect(self.path)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA cache_size = -32000")  # KiB
            self._local.connection = connection
            self._opened.append(connection)
        return connection


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None: it is not there."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _lost_file_error(path: Path) -> CorpusDamaged:
    return CorpusDamaged(
        f"{path} is gone, and the documents with it; restore it (kvweave kb restore), or remove "
        "its folder and ingest again"
    )


def _opening_error(error: sqlite3.DatabaseError, path: Path) -> CorpusError:
    found = as_corpus_error(error, f"{path} cannot be opened")
    if type(found) is not CorpusError:
        return found
    return CorpusDamaged(
        f"{path} is not a usable catalogue ({error}); restore it (kvweave kb restore), or move it "
        "away and ingest again"
    )
