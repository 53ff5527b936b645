"""What the knowledge base holds: documents, chunks, vectors, and who uses what. The truth.

Every change to documents is one transaction that also moves `generation`, so an index that
remembers its generation knows exactly what it has missed. A killed process leaves whole documents.
Files: `database` (the file), `catalogue_reads` (questions), this one (changes).
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvweave.corpus.catalogue_reads import AMONG, CatalogueReads
from kvweave.corpus.embedder import Vectors
from kvweave.corpus.removals import KEEP_S, prune, removed_since
from kvweave.types import ChunkId, DocumentId, ParsedDocument, PlacedChunk


class Written(NamedTuple):
    """What putting or removing documents did to the chunks."""

    new: tuple[ChunkId, ...]
    orphaned: tuple[ChunkId, ...]  # no document uses them any more: their KV may go


class Catalogue(CatalogueReads):
    """Everything `CatalogueReads` answers, and the changes. See `Database` for threads."""

    def finish_source(self, source: str, fingerprint: str) -> None:
        """All documents of a source are in: the next run may skip it."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?)", (source, fingerprint))

    def put(
        self, document: ParsedDocument, fingerprint: str, placed: Sequence[PlacedChunk]
    ) -> Written:
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

    # ── for whoever keeps chunk KV ───────────────────────────────────────────

    def kv_pending(self) -> tuple[ChunkId, ...] | None:
        """Chunks that went since `settle_kv`, less those that are back: their KV may still be on
        the disk. None: nothing went."""
        (is_pending,) = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM state JOIN removals"
            " ON removals.generation > kv_generation WHERE chunk_id IS NOT NULL)"
        ).fetchone()
        if not is_pending:
            return None
        with self._snapshot() as db:
            (settled,) = db.execute("SELECT kv_generation FROM state").fetchone()
            pending = removed_since(db, settled).chunk_ids
        assert pending is not None, "notes of what is pending are kept"
        return pending

    def settle_kv(self, generation: int) -> None:
        """The KV of what went up to this generation is deleted, wherever it was."""
        with self._transaction() as db:
            db.execute("UPDATE state SET kv_generation = ?", (generation,))

    def prune_removals(self, keep_s: float = KEEP_S) -> int:
        """Drop notes of what went long ago, wherever its KV was; returns how many."""
        with self._transaction() as db:
            return prune(db, keep_s)

    # ── the parts of a change ────────────────────────────────────────────────

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
        """Delete those chunks that nobody uses now, note them for the index and for those who keep
        KV of them, move on in time."""
        db.execute("UPDATE state SET generation = generation + 1")
        dead = db.execute(
            f"SELECT vector_id, chunk_id FROM chunks WHERE num_uses = 0 AND vector_id IN {AMONG}",
            (json.dumps(vector_ids),),
        ).fetchall()
        db.executemany(
            "INSERT INTO removals (generation, vector_id, chunk_id, removed_at)"
            " SELECT generation, ?, ?, ? FROM state",
            [(*row, time.time()) for row in dead],
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
