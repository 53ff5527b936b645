"""Which chunks stand in front of which: the neighbours that chunk KV was computed behind.

    <knowledge base>/kv/neighbours.sqlite

An entry is written before any KV that follows it and dropped before that KV is deleted. So a chunk
with KV behind neighbours has an entry, KV that saw a deleted chunk has none, and a kill in between
leaves at worst an entry without KV (a miss) or KV that nothing names. The table remembers up to
which generation of the catalogue KV and documents agree; a process that finds another generation
cleans up first (app/library/kv_sync.py).
"""

import json
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvweave.errors import CorpusError
from kvweave.types import ChunkId

FILE = "neighbours.sqlite"
BUSY_TIMEOUT_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    size INTEGER NOT NULL,          -- how many neighbours were asked for
    chunk_id TEXT NOT NULL,
    neighbours TEXT NOT NULL,       -- JSON list of chunk ids, nearest first
    PRIMARY KEY (chunk_id, size)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uses (   -- the same, turned round
    neighbour_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    chunk_id TEXT NOT NULL,
    PRIMARY KEY (neighbour_id, size, chunk_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_of_chunk ON uses (chunk_id, size);
CREATE TABLE IF NOT EXISTS settled (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), state TEXT);
"""  # json_each below: a list of any length as one parameter


class NeighbourTable:
    """Entries of one knowledge base, for every model alike: neighbours follow from its vectors.

    Any thread may call; calls take turns. Other processes may read while one writes, which is the
    holder of the knowledge base's writer lock. Every change is one transaction and on the disk when
    the call returns.
    """

    def __init__(self, path: Path) -> None:
        """Open the table, or make it."""
        self._path = path
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # check_same_thread off: the lock does that
        self._db = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        with self._translate_errors():
            self._db.execute("PRAGMA journal_mode = WAL")
            # the promise above: an entry must not vanish in a power cut that KV survives
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # ── reading ──────────────────────────────────────────────────────────────

    def get(self, size: int, chunk_id: ChunkId) -> tuple[ChunkId, ...] | None:
        """The neighbours of a chunk, nearest first; None if it has no entry. May be empty."""
        return self.get_many(size, [chunk_id]).get(chunk_id)

    def get_many(
        self, size: int, chunk_ids: Sequence[ChunkId]
    ) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Entries of those chunks that have one."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT chunk_id, neighbours FROM entries"
                " WHERE size = ? AND chunk_id IN (SELECT value FROM json_each(?))",
                (size, json.dumps([*chunk_ids])),
            ).fetchall()
        return {ChunkId(chunk_id): tuple(json.loads(stored)) for chunk_id, stored in rows}

    def users_of(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Chunks whose KV has seen one of these, at any size."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT DISTINCT chunk_id FROM uses"
                " WHERE neighbour_id IN (SELECT value FROM json_each(?))",
                (json.dumps([*chunk_ids]),),
            ).fetchall()
        return {ChunkId(chunk_id) for (chunk_id,) in rows}

    def mentioned_chunks(self) -> set[ChunkId]:
        """Return every chunk that has an entry or stands in one."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT chunk_id FROM entries UNION SELECT neighbour_id FROM uses"
            ).fetchall()
        return {ChunkId(chunk_id) for (chunk_id,) in rows}

    def settled_state(self) -> str | None:
        """Return the state of the documents that KV was last known to agree with."""
        with self._translate_errors():
            row = self._db.execute("SELECT state FROM settled").fetchone()
        return None if row is None else str(row[0])

    # ── changing ─────────────────────────────────────────────────────────────

    def put(self, size: int, entries: Mapping[ChunkId, Sequence[ChunkId]]) -> None:
        """Note neighbours, in the place of earlier ones if there are. Before their KV is saved."""
        with self._transaction() as db:
            self._drop(db, entries.keys(), size)
            db.executemany(
                "INSERT INTO entries VALUES (?, ?, ?)",
                [(size, chunk_id, json.dumps([*ids])) for chunk_id, ids in entries.items()],
            )
            db.executemany(
                "INSERT OR IGNORE INTO uses VALUES (?, ?, ?)",
                [(other, size, chunk_id) for chunk_id, ids in entries.items() for other in ids],
            )

    def drop(self, chunk_ids: Collection[ChunkId], size: int | None = None) -> None:
        """Forget the entries of these chunks, of one size or of all. Before their KV is deleted."""
        with self._transaction() as db:
            self._drop(db, chunk_ids, size)

    def settle(self, state: str) -> None:
        """Note that KV agrees with this state of the documents from now on."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO settled VALUES (1, ?)", (state,))

    def _drop(
        self, db: sqlite3.Connection, chunk_ids: Collection[ChunkId], size: int | None
    ) -> None:
        which = (json.dumps([*chunk_ids]), size)
        db.execute(
            "DELETE FROM entries WHERE chunk_id IN (SELECT value FROM json_each(?))"
            " AND size = coalesce(?, size)",
            which,
        )
        db.execute(
            "DELETE FROM uses WHERE chunk_id IN (SELECT value FROM json_each(?))"
            " AND size = coalesce(?, size)",
            which,
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction: all of it is written, or nothing."""
        with self._translate_errors():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Take the table's turn, and raise errors of the database as one line."""
        with self._lock:
            try:
                yield
            except sqlite3.DatabaseError as error:
                raise CorpusError(
                    f"{self._path}: {error}; if it is damaged, delete {self._path.parent} "
                    "and run `kvweave ingest --kv` again"
                ) from error
