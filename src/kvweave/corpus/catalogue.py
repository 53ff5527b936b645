"""What the knowledge base holds: documents, chunks, vectors, and who uses what. The truth.

Every change to documents is one transaction that also bumps `generation`, so an index that
remembers its generation knows exactly what it has missed. A killed process leaves whole documents.
`database.py` has the file, its connections and its transactions.
"""

import json
import re
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvweave.corpus.database import Database
from kvweave.corpus.embedder import Vectors
from kvweave.corpus.metadata import MetadataFilter, MetadataValue
from kvweave.corpus.removals import Removals, VectorIds, read_ids
from kvweave.errors import CorpusDamaged
from kvweave.types import Chunk, ChunkId, DocumentId, ParsedDocument, PlacedChunk

UID = re.compile("[0-9a-f]{32}")
CHUNK = "chunk_id, title, text, token_ids"  # what a Chunk is made of
PLACES = "document_chunks JOIN chunks USING (vector_id)"
# what is wrong → the rows that are, as `problems` counts them
PROMISES = {
    "chunks without a vector": "chunks WHERE chunk_id NOT IN (SELECT chunk_id FROM vectors)",
    "chunks with a wrong use count": "chunks c WHERE num_uses !="
    " (SELECT count(*) FROM document_chunks d WHERE d.vector_id = c.vector_id)",
    "chunks that no document uses": "chunks WHERE num_uses < 1",
    "documents with missing chunks": "documents d WHERE num_chunks !="
    " (SELECT count(*) FROM document_chunks c WHERE c.document_id = d.document_id)",
    "metadata without a document": "metadata WHERE"
    " document_id NOT IN (SELECT document_id FROM documents)",
    "chunk rows without a document": "document_chunks WHERE"
    " document_id NOT IN (SELECT document_id FROM documents)",
}
AMONG = "(SELECT value FROM json_each(?))"  # a list of any length as one parameter
# the fields of DocumentInfo
INFO = (
    "document_id, source, title, num_chars, num_chunks, num_tokens, added_at,"
    " (SELECT json_group_object(key, value) FROM metadata AS m"
    " WHERE m.document_id = documents.document_id)"
)


class DocumentInfo(NamedTuple):
    """A document as a list shows it."""

    id: DocumentId
    source: str
    title: str
    num_chars: int
    num_chunks: int
    num_tokens: int
    added_at: float  # seconds since 1970
    metadata: dict[str, MetadataValue]  # as its owner gave it


class FoundChunk(NamedTuple):
    """A chunk, and a document that holds it: of several the first by id."""

    chunk: Chunk
    document: DocumentId


class Totals(NamedTuple):
    num_documents: int
    num_chunks: int
    num_tokens: int  # of distinct chunks


class Written(NamedTuple):
    """What putting or removing documents did to the chunks."""

    new: tuple[ChunkId, ...]
    orphaned: tuple[ChunkId, ...]  # no document uses them any more: their KV may go


class Catalogue:
    """Reads and changes of one catalogue file. Any thread may call any method, as `Database` gives
    each its connection; changes are for the holder of the writer lock. Raises CorpusError."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """`create`: it is made where it is not there, else CorpusDamaged."""
        self.database = Database(path, create=create)
        self.removals = Removals(self.database)

    @property
    def path(self) -> Path:
        return self.database.path

    def close(self) -> None:
        self.database.close()

    def checkpoint(self) -> None:
        """Everything committed so far is on the disk itself when this returns."""
        self.database.checkpoint()

    # ── reading ──────────────────────────────────────────────────────────────

    def source_fingerprint(self, source: str) -> str | None:
        """The fingerprint of a source's bytes at the last complete ingest; None before one."""
        row = self._read("SELECT fingerprint FROM sources WHERE source = ?", source).fetchone()
        return None if row is None else str(row[0])

    def sources(self) -> list[str]:
        rows = self._read(
            "SELECT source FROM documents UNION SELECT source FROM sources ORDER BY 1"
        )
        return [source for (source,) in rows]

    def fingerprints(self, source: str) -> dict[DocumentId, str]:
        """Fingerprints of the documents that a source has brought so far."""
        return dict(
            self._read("SELECT document_id, fingerprint FROM documents WHERE source = ?", source)
        )

    def documents(
        self, after: DocumentId | None = None, limit: int | None = None
    ) -> list[DocumentInfo]:
        """Documents by source and age: all, or at most `limit` of those behind the document
        `after`, none if that is not there."""
        rows = self._read(
            f"SELECT {INFO} FROM documents WHERE ?1 IS NULL OR (source, added_at, document_id) >"
            " (SELECT source, added_at, document_id FROM documents WHERE document_id = ?1)"
            " ORDER BY source, added_at, document_id LIMIT ?2",
            after,
            -1 if limit is None else limit,
        )
        return [_info(row) for row in rows]

    def document(self, document_id: DocumentId) -> DocumentInfo | None:
        query = f"SELECT {INFO} FROM documents WHERE document_id = ?"
        row = self._read(query, document_id).fetchone()
        return None if row is None else _info(row)

    def places_of(self, chunk_id: ChunkId) -> list[tuple[DocumentId, int]]:
        """The documents that hold a chunk, by id, and the place it has in each."""
        rows = self._read(
            f"SELECT document_id, ordinal FROM {PLACES} WHERE chunk_id = ? ORDER BY 1, 2", chunk_id
        )
        return [(DocumentId(document_id), ordinal) for document_id, ordinal in rows]

    def chunk_at(self, document_id: DocumentId, ordinal: int) -> ChunkId | None:
        """The chunk that stands at some place of a document; None: there is no such place."""
        query = f"SELECT chunk_id FROM {PLACES} WHERE document_id = ? AND ordinal = ?"
        row = self._read(query, document_id, ordinal).fetchone()
        return None if row is None else ChunkId(row[0])

    def chars_of(self, document_id: DocumentId, chunk_id: ChunkId) -> tuple[int, int] | None:
        """The characters of a document that a chunk covers, [start, end); of several places the
        first. None: it is not there."""
        row = self._read(
            f"SELECT char_start, char_end FROM {PLACES}"
            " WHERE document_id = ? AND chunk_id = ? ORDER BY ordinal LIMIT 1",
            document_id,
            chunk_id,
        ).fetchone()
        return None if row is None else (int(row[0]), int(row[1]))

    def num_chunks(self) -> int:
        (count,) = self._read("SELECT count(*) FROM chunks").fetchone()
        return int(count)

    def totals(self) -> Totals:
        """Reads every chunk's row: for people, not for the hot path."""
        row = self._read(
            "SELECT (SELECT count(*) FROM documents), count(*),"
            " coalesce(sum(length(token_ids)), 0) / 4 FROM chunks"
        ).fetchone()
        return Totals(*row)

    def document_chunks(self, document_id: DocumentId) -> list[PlacedChunk]:
        rows = self._read(
            f"SELECT {CHUNK}, char_start, char_end FROM {PLACES}"
            " WHERE document_id = ? ORDER BY ordinal",
            document_id,
        )
        return [PlacedChunk(_chunk(row[:4]), row[4], row[5]) for row in rows]

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """The chunks of these ids that exist, by id."""
        query = f"SELECT {CHUNK} FROM chunks WHERE chunk_id IN {AMONG}"
        return {ChunkId(row[0]): _chunk(row) for row in self._read(query, json.dumps(chunk_ids))}

    def chunks_by_beginning(self, beginnings: Collection[str]) -> dict[str, tuple[ChunkId, str]]:
        """Id and title of the chunk whose id begins so, for each that exists; of several the first.
        For a handful of them."""
        query = (  # ids are hexadecimal: g is behind all of them
            "SELECT chunk_id, title FROM chunks WHERE chunk_id >= ?1 AND chunk_id < ?1 || 'g'"
            " ORDER BY chunk_id LIMIT 1"
        )
        rows = {beginning: self._read(query, beginning).fetchone() for beginning in beginnings}
        return {beginning: row for beginning, row in rows.items() if row is not None}

    def chunk_ids(self) -> list[ChunkId]:
        return [chunk_id for (chunk_id,) in self._read("SELECT chunk_id FROM chunks")]

    def existing(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """The ids among these whose chunks exist."""
        query = f"SELECT chunk_id FROM chunks WHERE chunk_id IN {AMONG}"
        return {chunk_id for (chunk_id,) in self._read(query, json.dumps([*chunk_ids]))}

    def vectors_of_chunks(self, chunk_ids: Sequence[ChunkId], dim: int) -> dict[ChunkId, Vectors]:
        """The stored vector [D] of each chunk that exists."""
        rows = self._read(
            "SELECT chunk_id, vector FROM chunks JOIN vectors USING (chunk_id)"
            f" WHERE chunk_id IN {AMONG}",
            json.dumps(chunk_ids),
        )
        found = {ChunkId(chunk_id): np.frombuffer(blob, "<f4") for chunk_id, blob in rows}
        assert all(vector.shape == (dim,) for vector in found.values()), "of another embedder"
        return {chunk_id: v.astype(np.float32, copy=False) for chunk_id, v in found.items()}

    def chunks_of_vectors(
        self, vector_ids: Sequence[int], among: MetadataFilter | None = None
    ) -> dict[int, FoundChunk]:
        """Chunks that exist, by vector id: a hit of an index that lags behind may be gone. With a
        filter, only chunks of documents that it holds for."""
        query, parameters = among.documents_query() if among else ("", [])
        rows = self._read(
            f"SELECT vector_id, {CHUNK}, (SELECT min(document_id)"
            " FROM document_chunks AS d WHERE d.vector_id = chunks.vector_id"
            f"{f' AND document_id IN ({query})' if query else ''}) AS holder FROM chunks"
            f" WHERE vector_id IN {AMONG} AND holder IS NOT NULL",
            *parameters,
            json.dumps([int(i) for i in vector_ids]),
        )
        return {row[0]: FoundChunk(_chunk(row[1:5]), DocumentId(row[5])) for row in rows}

    def vectors_where(self, among: MetadataFilter) -> VectorIds:
        """Ids of the vectors of documents that a filter holds for, ascending."""
        query, parameters = among.documents_query()
        rows = self._read(
            f"SELECT DISTINCT vector_id FROM document_chunks WHERE document_id IN ({query})"
            " ORDER BY vector_id",
            *parameters,
        )
        return read_ids(rows.fetchall())

    def all_chunks(self, batch: int) -> Iterator[list[Chunk]]:
        """Every chunk in order of arrival, `batch` at a time. Holds no lock between batches."""
        last = 0
        while rows := self.chunks_after(last, batch):
            yield [chunk for _, chunk in rows]
            last = rows[-1][0]

    def chunks_after(self, vector_id: int, most: int) -> list[tuple[int, Chunk]]:
        """The next chunks in order of arrival, each with its vector id; [] behind the last."""
        rows = self._read(
            f"SELECT vector_id, {CHUNK} FROM chunks WHERE vector_id > ? ORDER BY 1 LIMIT ?",
            vector_id,
            most,
        )
        return [(int(row[0]), _chunk(row[1:])) for row in rows]

    def some_chunks(self, chunk_ids: Sequence[ChunkId], batch: int) -> Iterator[list[Chunk]]:
        """The chunks of these ids that exist, each once, in order, at most `batch` at a time."""
        unique = list(dict.fromkeys(chunk_ids))
        for start in range(0, len(unique), batch):
            part = unique[start : start + batch]
            found = self.chunks(part)
            if found:
                yield [found[chunk_id] for chunk_id in part if chunk_id in found]

    def with_vectors(self, chunk_ids: Sequence[ChunkId]) -> set[ChunkId]:
        """Which of these are embedded already."""
        query = f"SELECT chunk_id FROM vectors WHERE chunk_id IN {AMONG}"
        return {chunk_id for (chunk_id,) in self._read(query, json.dumps(chunk_ids))}

    def generation(self) -> int:
        (generation,) = self._read("SELECT generation FROM state").fetchone()
        return int(generation)

    def uid(self) -> str:
        """Random, and its own: generations and vector ids of another catalogue mean nothing. It
        names a folder of chunk KV, so one that this class did not make is CorpusDamaged."""
        (uid,) = self._read("SELECT uid FROM state").fetchone()
        if not UID.fullmatch(str(uid)):
            raise CorpusDamaged(f"{self.path} has a uid that is none; restore it from a backup")
        return str(uid)

    def renew_uid(self) -> None:
        """Give it another uid, for a catalogue that was copied: the two go separate ways."""
        with self.database.transaction() as db:
            db.execute("UPDATE state SET uid = lower(hex(randomblob(16)))")

    def vectors(self, vector_ids: VectorIds, dim: int) -> tuple[VectorIds, Vectors]:
        """Ids (those that still exist, ascending) and their vectors [N, D]."""
        rows = self._read(
            "SELECT vector_id, vector FROM chunks JOIN vectors USING (chunk_id)"
            f" WHERE vector_id IN {AMONG} ORDER BY vector_id",
            json.dumps(vector_ids.tolist()),
        ).fetchall()
        data = b"".join(blob for _, blob in rows)
        found = np.frombuffer(data, dtype="<f4").reshape(len(rows), dim)
        return read_ids(rows), found.astype(np.float32, copy=False)

    def match_words(
        self, expression: str, k: int, among: MetadataFilter | None = None
    ) -> list[tuple[int, float]]:
        """(vector id, BM25 score) of the best chunks for an FTS5 expression, best first; of
        documents that a filter holds for."""
        query, parameters = among.documents_query() if among else ("", [])
        holders = f"(SELECT vector_id FROM document_chunks WHERE document_id IN ({query}))"
        rows = self._read(
            f"SELECT rowid, -rank FROM words WHERE words MATCH ?"
            f"{f' AND rowid IN {holders}' if query else ''} ORDER BY rank, rowid LIMIT ?",
            expression,
            *parameters,
            k,
        )
        return [(int(vector_id), float(score)) for vector_id, score in rows]

    def problems(self) -> list[str]:
        """Every broken promise of this file, in words; empty when all hold."""
        damaged = sum(
            not isinstance(ids, bytes) or not _is_intact(chunk_id, ids)
            for chunk_id, ids in self._read("SELECT chunk_id, token_ids FROM chunks")
        )
        lengths = self._read("SELECT DISTINCT length(vector) FROM vectors").fetchall()
        found = [f"{damaged} chunks whose tokens were changed"] if damaged else []
        found += [f"vectors of {len(lengths)} lengths"] if len(lengths) > 1 else []
        for name, where in PROMISES.items():
            (count,) = self._read(f"SELECT count(*) FROM {where}").fetchone()
            found += [f"{count} {name}"] if count else []
        (report,) = self._read("PRAGMA quick_check(1)").fetchone()
        return found if report == "ok" else [*found, str(report)]

    # ── changing ─────────────────────────────────────────────────────────────

    def finish_source(self, source: str, fingerprint: str) -> None:
        """All documents of a source are in: the next run may skip it."""
        with self.database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?)", (source, fingerprint))

    def put(
        self, document: ParsedDocument, fingerprint: str, placed: Sequence[PlacedChunk]
    ) -> Written:
        """Add a document, or replace it, in one transaction. Its vectors must be there already.

        Chunks that the old version shares with the new one stay as they are. Vectors of chunks
        that no document uses now stay until `drop_unused_vectors`: a document that comes next in
        the same run may bring such a chunk back, and it was told that the vector is there.
        """
        with self.database.transaction() as db:
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
                "INSERT INTO metadata VALUES (?, ?, ?)",
                [(document.id, key, value) for key, value in document.metadata.items()],
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
        with self.database.transaction() as db:
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
        with self.database.transaction() as db:
            released = self._release(db, list(self.fingerprints(source)))
            db.execute("DELETE FROM sources WHERE source = ?", (source,))
            orphaned = self._bury(db, released, keep_vectors=False)
        return Written((), orphaned)

    def put_vectors(self, chunk_ids: Sequence[ChunkId], vectors: Vectors) -> None:
        """Keep vectors before their document is complete: a killed run does not embed twice."""
        rows = zip(chunk_ids, (v.astype("<f4").tobytes() for v in vectors), strict=True)
        with self.database.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)

    def drop_unused_vectors(self) -> int:
        """Drop vectors of documents that never completed or that changed; return how many. Only at
        the end of an ingest."""
        with self.database.transaction() as db:
            cursor = db.execute(  # both sides are read from indexes alone
                "DELETE FROM vectors WHERE chunk_id IN"
                " (SELECT chunk_id FROM vectors EXCEPT SELECT chunk_id FROM chunks)"
            )
        return cursor.rowcount

    # ── the parts of a change ────────────────────────────────────────────────

    def _read(self, query: str, *parameters: object) -> sqlite3.Cursor:
        return self.database.connection.execute(query, parameters)

    def _release(self, db: sqlite3.Connection, document_ids: Sequence[DocumentId]) -> list[int]:
        """Delete documents; return the vector ids they used. Use counts follow by trigger."""
        ids = json.dumps(document_ids)
        rows = db.execute(
            f"SELECT DISTINCT vector_id FROM document_chunks WHERE document_id IN {AMONG}", (ids,)
        ).fetchall()
        db.execute(f"DELETE FROM document_chunks WHERE document_id IN {AMONG}", (ids,))
        db.execute(f"DELETE FROM metadata WHERE document_id IN {AMONG}", (ids,))
        db.execute(f"DELETE FROM documents WHERE document_id IN {AMONG}", (ids,))
        return [vector_id for (vector_id,) in rows]

    def _bury(
        self, db: sqlite3.Connection, vector_ids: Sequence[int], *, keep_vectors: bool
    ) -> tuple[ChunkId, ...]:
        """Delete those chunks that no document uses now, note them for the index and for the
        keepers of their KV, and bump the generation."""
        db.execute("UPDATE state SET generation = generation + 1")
        dead = db.execute(
            f"SELECT vector_id, chunk_id FROM chunks WHERE num_uses = 0 AND vector_id IN {AMONG}",
            (json.dumps(vector_ids),),
        ).fetchall()
        self.removals.note(db, dead)
        db.executemany("DELETE FROM chunks WHERE vector_id = ?", [(row[0],) for row in dead])
        if not keep_vectors:
            db.executemany("DELETE FROM vectors WHERE chunk_id = ?", [(row[1],) for row in dead])
        return tuple(ChunkId(row[1]) for row in dead)

    def _vector_ids(self, db: sqlite3.Connection, ids: Iterable[ChunkId]) -> dict[ChunkId, int]:
        query = f"SELECT chunk_id, vector_id FROM chunks WHERE chunk_id IN {AMONG}"
        return dict(db.execute(query, (json.dumps(list(ids)),)))


def _info(row: Sequence[Any]) -> DocumentInfo:
    *plain, metadata = row
    return DocumentInfo._make([*plain, json.loads(metadata)])


def _chunk(row: Sequence[object]) -> Chunk:
    chunk_id, title, text, token_ids = row
    if not isinstance(token_ids, bytes) or not _is_intact(chunk_id, token_ids):
        raise CorpusDamaged(
            f"the tokens of chunk {chunk_id} are not those that were stored; see kvweave kb check"
        )
    ids = np.frombuffer(token_ids, "<u4").tolist()
    return Chunk(ChunkId(str(chunk_id)), str(title), str(text), tuple(ids))


def _is_intact(chunk_id: object, token_ids: bytes) -> bool:
    """A chunk's id is the hash of these very bytes: what was changed cannot pass for what was
    stored. Microseconds."""
    return blake2b(token_ids, digest_size=16).hexdigest() == chunk_id
