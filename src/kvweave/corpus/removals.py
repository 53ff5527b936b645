"""Which chunks are no more, since when: for what is kept of them outside the catalogue.

A removal is noted in the transaction that makes it, so that nothing can come between the two. The
keeper of chunk KV on the disk works the notes off; servers whose memory holds something of chunks
that another process removed read what they have missed, and so does an index.

Notes go after a while (`Removals.prune`). A reader that comes later learns only that the catalogue
no longer knows what went: it compares all it has with what is there.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.corpus.database import Database, connect
from kvweave.errors import CorpusError
from kvweave.types import ChunkId

VectorIds = NDArray[np.int64]
KEEP_S = 7 * 24 * 3600.0  # a process that looks more often than this is told by name


class VectorChanges(NamedTuple):
    """What happened to the set of vectors since an older generation."""

    generation: int  # the state that `added` and `removed` lead to
    added: VectorIds  # ascending
    removed: VectorIds | None  # None: too long ago to say; compare all with what is there


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


class Removals:
    """The notes of a catalogue. Any thread; changes are for the holder of the writer lock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, db: sqlite3.Connection, chunks: Sequence[tuple[int, str]]) -> None:
        """Note chunks, by vector id and chunk id, in the transaction that removes them."""
        db.executemany(
            "INSERT INTO removals (generation, vector_id, chunk_id, removed_at)"
            " SELECT generation, ?, ?, ? FROM state",
            [(*row, time.time()) for row in chunks],
        )

    def vector_changes(self, generation: int, last_vector_id: int) -> VectorChanges:
        """What an index at `generation`, whose highest id is `last_vector_id`, has missed."""
        with self._database.snapshot() as db:
            now, pruned = db.execute("SELECT generation, pruned FROM state").fetchone()
            added = db.execute(
                "SELECT vector_id FROM chunks WHERE vector_id > ? ORDER BY vector_id",
                (last_vector_id,),
            ).fetchall()
            removed = db.execute(
                "SELECT vector_id FROM removals WHERE generation > ? AND vector_id <= ?",
                (generation, last_vector_id),
            ).fetchall()
        is_told = generation >= pruned or not last_vector_id  # an empty index has missed nothing
        return VectorChanges(now, read_ids(added), read_ids(removed) if is_told else None)

    def pending_kv(self) -> tuple[ChunkId, ...] | None:
        """Chunks that went since `settle_kv`, less those that are back: their KV may still be on
        the disk. None: nothing went."""
        (is_pending,) = self._database.connection.execute(
            "SELECT EXISTS (SELECT 1 FROM state JOIN removals"
            " ON removals.generation > kv_generation WHERE chunk_id IS NOT NULL)"
        ).fetchone()
        if not is_pending:
            return None
        with self._database.snapshot() as db:
            (settled,) = db.execute("SELECT kv_generation FROM state").fetchone()
            pending = removed_since(db, settled).chunk_ids
        assert pending is not None, "notes of what is pending are kept"
        return pending

    def chunk_ids(self) -> tuple[ChunkId, ...]:
        """Chunks that went, as far as that is still noted, and are not back."""
        with self._database.snapshot() as db:
            (pruned,) = db.execute("SELECT pruned FROM state").fetchone()
            return removed_since(db, pruned).chunk_ids or ()

    def settle_kv(self, generation: int) -> None:
        """The KV of what went up to this generation is deleted, wherever it was."""
        with self._database.transaction() as db:
            db.execute("UPDATE state SET kv_generation = ?", (generation,))

    def prune(self, keep_s: float = KEEP_S) -> int:
        """Drop notes older than `keep_s`, all up to some generation; none whose KV may still be
        there. Returns how many."""
        with self._database.transaction() as db:
            (last,) = db.execute(
                "SELECT max(generation) FROM removals"
                " WHERE generation <= (SELECT kv_generation FROM state) AND generation < coalesce("
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
        self._db = connect(path)

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


def read_ids(rows: Sequence[Sequence[object]]) -> VectorIds:
    return np.array([row[0] for row in rows], dtype=np.int64)
