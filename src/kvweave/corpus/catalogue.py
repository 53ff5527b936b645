"""What the knowledge base holds: documents, chunks, vectors, and who uses what. The truth.

SQLite in WAL mode: one writer (the facade holds the lock), any number of readers, in this process
and in others. Every change to documents is one transaction that also moves `generation`, so an
index that remembers its generation knows exactly what it has missed. A killed process leaves whole
documents; power loss may cost the last transactions but never a torn one.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.corpus.embedder import Vectors
from kvweave.corpus.migrations import migrate
from kvweave.errors import CorpusError
from kvweave.types import Chunk, ChunkId, Document, DocumentId, PlacedChunk

VectorIds = NDArray[np.int64]
BUSY_TIMEOUT_S = 30.0
AMONG = "(SELECT value FROM json_each(?))"  # a list of any length as one parameter


class DocumentInfo(NamedTuple):
    """A document as a list shows it."""

    id: DocumentId
    source: str
    title: str
    num_chars: int
    num_chunks: int
    num_tokens: int
    added_at: float  # seconds since 1970


class Totals(NamedTuple):
    num_documents: int
    num_chunks: int
    num_tokens: int  # of distinct chunks


class Changes(NamedTuple):
    """What happened to the set of vectors since an older generation."""

    generation: int  # the state that `added` and `removed` lead to
    added: VectorIds  # ascending
    removed: VectorIds


class Written(NamedTuple):
    """What putting or removing documents did to the chunks."""

    new: tuple[ChunkId, ...]
    orphaned: tuple[ChunkId, ...]  # no document uses them any more: their KV may go


class Catalogue:
    """One catalogue file. Methods may be called from any thread; each thread has a connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._writing = threading.RLock()
        try:
            with self._writing:
                self._use_wal()
                migrate(self._db)
        except sqlite3.DatabaseError as error:
            raise CorpusError(
                f"{path} is not a usable catalogue ({error}); move it away and ingest again"
            ) from error

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        self._opened.clear()
        self._local = threading.local()

    def checkpoint(self) -> None:
        """Everything committed so far is on the disk itself when this returns."""
        with self._writing:
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    # ── documents ────────────────────────────────────────────────────────────

    def source_fingerprint(self, source: str) -> str | None:
        """Of the bytes at the last complete ingest; None when it never completed."""
        row = self._db.execute(
            "SELECT fingerprint FROM sources WHERE source = ?", (source,)
        ).fetchone()
        return None if row is None else str(row[0])

    def finish_source(self, source: str, fingerprint: str) -> None:
        """All documents of a source are in: the next run may skip it."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?)", (source, fingerprint))

    def sources(self) -> list[str]:
        rows = self._db.execute(
            "SELECT source FROM documents UNION SELECT source FROM sources ORDER BY 1"
        )
        return [source for (source,) in rows]

    def fingerprints(self, source: str) -> dict[DocumentId, str]:
        """Of the documents that a source has brought so far."""
        rows = self._db.execute(
            "SELECT document_id, fingerprint FROM documents WHERE source = ?", (source,)
        )
        return {DocumentId(document_id): fingerprint for document_id, fingerprint in rows}

    def put(self, document: Document, fingerprint: str, placed: Sequence[PlacedChunk]) -> Written:
        """Add a document, or replace it, in one transaction. Its vectors must be there already.

        Chunks that the old version shares with the new one stay as they are. Vectors of chunks
        that nobody uses now stay until `drop_unused_vectors`: a document that comes next in the
        same run may bring such a chunk back, and it was told that the vector is there.
        """
        with self._transaction() as db:
            old = self._release(db, [document.id])
            ids = [p.chunk.id for p in placed]
            known = self._vector_ids(db, ids)
            new: list[ChunkId] = []
            for chunk, _, _ in placed:
                if chunk.id in known:
                    continue
                row = (
                    chunk.id,
                    chunk.title,
                    chunk.text,
                    np.array(chunk.token_ids, "<u4").tobytes(),
                )
                cursor = db.execute(
                    "INSERT INTO chunks (chunk_id, title, text, token_ids) VALUES (?, ?, ?, ?)", row
                )
                assert cursor.lastrowid is not None, "an insert without a row id"
                known[chunk.id] = cursor.lastrowid
                new.append(chunk.id)
            db.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    document.id,
                    document.source,
                    document.title,
                    fingerprint,
                    len(document.text),
                    len(placed),
                    sum(len(p.chunk.token_ids) for p in placed),
                    time.time(),
                ),
            )
            db.executemany(
                "INSERT INTO document_chunks VALUES (?, ?, ?, ?, ?)",
                [
                    (document.id, ordinal, known[p.chunk.id], p.start, p.end)
                    for ordinal, p in enumerate(placed)
                ],
            )
            have = self.with_vectors(new)
            assert have == set(new), f"{document.source}: vectors are missing for its chunks"
            orphaned = self._bury(db, old, keep_vectors=True)
        return Written(tuple(new), orphaned)

    def remove(self, document_ids: Sequence[DocumentId], *, keep_vectors: bool = False) -> Written:
        """Drop documents, and the chunks and vectors that only they used, in one transaction."""
        with self._transaction() as db:
            db.execute(
                "DELETE FROM sources WHERE source IN"
                f" (SELECT source FROM documents WHERE document_id IN {AMONG})",
                (json.dumps(document_ids),),
            )
            released = self._release(db, document_ids)
            orphaned = self._bury(db, released, keep_vectors=keep_vectors)
        return Written((), orphaned)

    def forget_source(self, source: str) -> Written:
        """Drop a source with all its documents."""
        with self._transaction() as db:
            released = self._release(db, list(self.fingerprints(source)))
            db.execute("DELETE FROM sources WHERE source = ?", (source,))
            orphaned = self._bury(db, released, keep_vectors=False)
        return Written((), orphaned)

    def documents(self) -> list[DocumentInfo]:
        rows = self._db.execute(
            "SELECT document_id, source, title, num_chars, num_chunks, num_tokens, added_at"
            " FROM documents ORDER BY source, added_at, document_id"
        )
        return [DocumentInfo(*row) for row in rows]

    def num_chunks(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM chunks").fetchone()
        return int(count)

    def totals(self) -> Totals:
        """Reads every chunk's row: for people, not for the hot path."""
        row = self._db.execute(
            "SELECT (SELECT count(*) FROM documents), count(*),"
            " coalesce(sum(length(token_ids)), 0) / 4 FROM chunks"
        ).fetchone()
        return Totals(*row)

    # ── chunks and vectors ───────────────────────────────────────────────────

    def document_chunks(self, document_id: DocumentId) -> list[PlacedChunk]:
        rows = self._db.execute(
            "SELECT chunk_id, title, text, token_ids, char_start, char_end"
            " FROM document_chunks JOIN chunks USING (vector_id)"
            " WHERE document_id = ? ORDER BY ordinal",
            (document_id,),
        )
        return [PlacedChunk(_chunk(row[:4]), row[4], row[5]) for row in rows]

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """Those that exist, by id."""
        rows = self._db.execute(
            f"SELECT chunk_id, title, text, token_ids FROM chunks WHERE chunk_id IN {AMONG}",
            (json.dumps(chunk_ids),),
        )
        return {ChunkId(row[0]): _chunk(row) for row in rows}

    def chunks_of_vectors(self, vector_ids: Sequence[int]) -> dict[int, Chunk]:
        """Those that exist, by vector id: a hit of an index that lags behind may be gone."""
        rows = self._db.execute(
            "SELECT vector_id, chunk_id, title, text, token_ids FROM chunks"
            f" WHERE vector_id IN {AMONG}",
            (json.dumps([int(i) for i in vector_ids]),),
        )
        return {row[0]: _chunk(row[1:]) for row in rows}

    def all_chunks(self, batch: int) -> Iterator[list[Chunk]]:
        """Every chunk in order of arrival, `batch` at a time. Holds no lock between batches."""
        last = 0
        while True:
            rows = self._db.execute(
                "SELECT vector_id, chunk_id, title, text, token_ids FROM chunks"
                " WHERE vector_id > ? ORDER BY vector_id LIMIT ?",
                (last, batch),
            ).fetchall()
            if not rows:
                return
            yield [_chunk(row[1:]) for row in rows]
            last = rows[-1][0]

    def with_vectors(self, chunk_ids: Sequence[ChunkId]) -> set[ChunkId]:
        """Which of these are embedded already."""
        rows = self._db.execute(
            f"SELECT chunk_id FROM vectors WHERE chunk_id IN {AMONG}", (json.dumps(chunk_ids),)
        )
        return {ChunkId(chunk_id) for (chunk_id,) in rows}

    def put_vectors(self, chunk_ids: Sequence[ChunkId], vectors: Vectors) -> None:
        """Keep vectors before their document is complete: a killed run does not embed twice."""
        rows = zip(chunk_ids, (v.astype("<f4").tobytes() for v in vectors), strict=True)
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)

    def drop_unused_vectors(self) -> int:
        """Of documents that never completed or that changed. Only at the end of an ingest."""
        with self._transaction() as db:
            cursor = db.execute(  # both sides are read from indexes alone
                "DELETE FROM vectors WHERE chunk_id IN"
                " (SELECT chunk_id FROM vectors EXCEPT SELECT chunk_id FROM chunks)"
            )
        return cursor.rowcount

    # ── for the index ────────────────────────────────────────────────────────

    def generation(self) -> int:
        (generation,) = self._db.execute("SELECT generation FROM state").fetchone()
        return int(generation)

    def uid(self) -> str:
        """Random, and its own: generations and vector ids of another catalogue mean nothing."""
        (uid,) = self._db.execute("SELECT uid FROM state").fetchone()
        return str(uid)

    def changes_since(self, generation: int, last_vector_id: int) -> Changes:
        """What an index at `generation`, whose highest id is `last_vector_id`, has missed."""
        with self._snapshot() as db:
            (now,) = db.execute("SELECT generation FROM state").fetchone()
            added = db.execute(
                "SELECT vector_id FROM chunks WHERE vector_id > ? ORDER BY vector_id",
                (last_vector_id,),
            ).fetchall()
            removed = db.execute(
                "SELECT vector_id FROM removals WHERE generation > ? AND vector_id <= ?",
                (generation, last_vector_id),
            ).fetchall()
        return Changes(now, _int64(added), _int64(removed))

    def vectors(self, vector_ids: VectorIds, dim: int) -> tuple[VectorIds, Vectors]:
        """Ids (those that still exist, ascending) and their vectors [N, D]."""
        rows = self._db.execute(
            "SELECT vector_id, vector FROM chunks JOIN vectors USING (chunk_id)"
            f" WHERE vector_id IN {AMONG} ORDER BY vector_id",
            (json.dumps(vector_ids.tolist()),),
        ).fetchall()
        data = b"".join(blob for _, blob in rows)
        found = np.frombuffer(data, dtype="<f4").reshape(len(rows), dim)
        return _int64(rows), found.astype(np.float32, copy=False)

    def match_words(self, expression: str, k: int) -> list[tuple[int, float]]:
        """(vector id, BM25 score) of the best chunks for an FTS5 expression, best first."""
        rows = self._db.execute(
            "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?",
            (expression, k),
        )
        return [(int(vector_id), float(score)) for vector_id, score in rows]

    def problems(self) -> list[str]:
        """Every broken promise of this file, in words; empty when all hold."""
        promises = {
            "chunks without a vector": "SELECT count(*) FROM chunks WHERE chunk_id NOT IN"
            " (SELECT chunk_id FROM vectors)",
            "chunks with a wrong use count": "SELECT count(*) FROM chunks c WHERE num_uses !="
            " (SELECT count(*) FROM document_chunks d WHERE d.vector_id = c.vector_id)",
            "chunks that no document uses": "SELECT count(*) FROM chunks WHERE num_uses < 1",
            "documents with missing chunks": "SELECT count(*) FROM documents d WHERE num_chunks !="
            " (SELECT count(*) FROM document_chunks c WHERE c.document_id = d.document_id)",
            "chunk rows without a document": "SELECT count(*) FROM document_chunks WHERE"
            " document_id NOT IN (SELECT document_id FROM documents)",
        }
        found = [
            f"{count} {name}"
            for name, query in promises.items()
            if (count := self._db.execute(query).fetchone()[0])
        ]
        (report,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        return found if report == "ok" else [*found, str(report)]

    # ── inside a transaction ─────────────────────────────────────────────────

    def _release(self, db: sqlite3.Connection, document_ids: Sequence[DocumentId]) -> list[int]:
        """Delete documents; return the vector ids they used. Use counts follow by trigger."""
        ids = json.dumps(document_ids)
        rows = db.execute(
            f"SELECT DISTINCT vector_id FROM document_chunks WHERE document_id IN {AMONG}", (ids,)
        ).fetchall()
        db.execute(f"DELETE FROM document_chunks WHERE document_id IN {AMONG}", (ids,))
        db.execute(f"DELETE FROM documents WHERE document_id IN {AMONG}", (ids,))
        return [vector_id for (vector_id,) in rows]

    def _bury(
        self, db: sqlite3.Connection, vector_ids: Sequence[int], *, keep_vectors: bool
    ) -> tuple[ChunkId, ...]:
        """Delete those chunks that nobody uses now, note them for the index, move on in time."""
        db.execute("UPDATE state SET generation = generation + 1")
        dead = db.execute(
            f"SELECT vector_id, chunk_id FROM chunks WHERE num_uses = 0 AND vector_id IN {AMONG}",
            (json.dumps(vector_ids),),
        ).fetchall()
        db.executemany(
            "INSERT INTO removals SELECT generation, ? FROM state", [(row[0],) for row in dead]
        )
        db.executemany("DELETE FROM chunks WHERE vector_id = ?", [(row[0],) for row in dead])
        if not keep_vectors:
            db.executemany("DELETE FROM vectors WHERE chunk_id = ?", [(row[1],) for row in dead])
        return tuple(ChunkId(row[1]) for row in dead)

    def _vector_ids(self, db: sqlite3.Connection, ids: Iterable[ChunkId]) -> dict[ChunkId, int]:
        rows = db.execute(
            f"SELECT chunk_id, vector_id FROM chunks WHERE chunk_id IN {AMONG}",
            (json.dumps(list(ids)),),
        )
        return {ChunkId(chunk_id): vector_id for chunk_id, vector_id in rows}

    def _use_wal(self) -> None:
        """SQLite answers "locked" at once when two processes switch a new file: wait ourselves."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, whatever interrupts it."""
        with self._writing:
            db = self._db
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except sqlite3.OperationalError as error:
                raise CorpusError(f"{self._path}: {error}") from error
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    @contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        """Several reads of one state."""
        db = self._db
        db.execute("BEGIN")
        try:
            yield db
        finally:
            db.execute("COMMIT")

    @property
    def _db(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            # check_same_thread off: close() may come from another thread than the one that opened
            connection = sqlite3.connect(
                self._path,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA cache_size = -32000")  # KiB
            self._local.connection = connection
            self._opened.append(connection)
        return connection


def _chunk(row: Sequence[object]) -> Chunk:
    chunk_id, title, text, token_ids = row
    assert isinstance(token_ids, bytes), "token_ids is a blob"
    ids = np.frombuffer(token_ids, "<u4").tolist()
    return Chunk(ChunkId(str(chunk_id)), str(title), str(text), tuple(ids))


def _int64(rows: Sequence[Sequence[object]]) -> VectorIds:
    return np.array([row[0] for row in rows], dtype=np.int64)
