"""Which chunks are no more, since when: for what is kept of them outside the catalogue.

A removal is noted in the transaction that makes it, so that nothing can come between the two. The
keeper of chunk KV on the disk works the notes off; servers whose memory holds something of chunks
that another process removed read what they have missed, and so does an index.

Notes go after a while (`prune`). A reader that comes later than that is not told what went but that
the catalogue does not know: it compares all it has with what is there.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvweave.errors import CorpusError
from kvweave.types import ChunkId

BUSY_TIMEOUT_S = 30.0
KEEP_S = 7 * 24 * 3600.0  # a process that looks more often than this is told by name


class Removed(NamedTuple):
    """Chunks that went since an older generation and are not back."""

    generation: int  # the state that this is true of
    chunk_ids: tuple[ChunkId, ...] | None  # each once; None: too long ago to say


def removed_since(db: sqlite3.Connection, generation: int) -> Removed:
    """What went after `generation`. The caller sees to it that both reads see one state."""
    now, pruned = db.execute("SELECT generation, pruned FROM state").fetchone()
    if generation < pruned:
        return Removed(int(now), None)
    rows = db.execute(
        "SELECT DISTINCT chunk_id FROM removals AS gone"
        " WHERE generation > ? AND chunk_id IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM chunks WHERE chunks.chunk_id = gone.chunk_id)",
        (generation,),
    ).fetchall()
    return Removed(int(now), tuple(ChunkId(chunk_id) for (chunk_id,) in rows))


def prune(db: sqlite3.Connection, keep_s: float) -> int:
    """Drop notes older than `keep_s`, all up to some generation; none whose KV may still be there.
    Returns how many. In a transaction of the caller."""
    (last,) = db.execute(
        "SELECT max(generation) FROM removals WHERE generation <= (SELECT kv_generation FROM state)"
        " AND generation < coalesce("
        "(SELECT min(generation) FROM removals WHERE removed_at > ?), 1 + generation)",
        (time.time() - keep_s,),
    ).fetchone()
    if last is None:
        return 0
    db.execute("UPDATE state SET pruned = ?", (last,))
    return db.execute("DELETE FROM removals WHERE generation <= ?", (last,)).rowcount


class RemovalReader:
    """Reads removals of any process, often: one connection for all threads, which take turns. A
    catalogue would open one for each of them."""

    def __init__(self, path: Path) -> None:
        """`path` is the file of a catalogue that was opened before."""
        self._path = path
        self._lock = threading.Lock()
        # check_same_thread off: the lock does that
        self._db = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=rw",  # never makes another
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )

    def generation(self) -> int:
        """Another one after every change of the documents. Microseconds."""
        with self._turn():
            (generation,) = self._db.execute("SELECT generation FROM state").fetchone()
        return int(generation)

    def since(self, generation: int) -> Removed:
        """What went after `generation`."""
        with self._turn():
            self._db.execute("BEGIN")
            try:
                return removed_since(self._db, generation)
            finally:
                self._db.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Trouble in one line."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise CorpusError(f"{self._path}: {error}") from error
