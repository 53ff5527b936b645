"""What can be asked of a catalogue. Nothing in here changes it."""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.corpus.database import Database
from kvweave.corpus.embedder import Vectors
from kvweave.types import Chunk, ChunkId, DocumentId, PlacedChunk

VectorIds = NDArray[np.int64]
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
    removed: VectorIds | None  # None: too long ago to say; compare all with what is there


class CatalogueReads(Database):
    """Documents, chunks, vectors and their state, as of now."""

    def source_fingerprint(self, source: str) -> str | None:
        """Of the bytes at the last complete ingest; None when it never completed."""
        row = self._db.execute(
            "SELECT fingerprint FROM sources WHERE source = ?", (source,)
        ).fetchone()
        return None if row is None else str(row[0])

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

    def chunk_ids(self) -> list[ChunkId]:
        return [ChunkId(each) for (each,) in self._db.execute("SELECT chunk_id FROM chunks")]

    def known(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Which of these exist."""
        rows = self._db.execute(
            f"SELECT chunk_id FROM chunks WHERE chunk_id IN {AMONG}", (json.dumps([*chunk_ids]),)
        )
        return {ChunkId(chunk_id) for (chunk_id,) in rows}

    def vectors_of_chunks(self, chunk_ids: Sequence[ChunkId], dim: int) -> dict[ChunkId, Vectors]:
        """The stored vector [D] of each chunk that exists."""
        rows = self._db.execute(
            "SELECT chunk_id, vector FROM chunks JOIN vectors USING (chunk_id)"
            f" WHERE chunk_id IN {AMONG}",
            (json.dumps(chunk_ids),),
        )
        found = {ChunkId(chunk_id): np.frombuffer(blob, "<f4") for chunk_id, blob in rows}
        assert all(vector.shape == (dim,) for vector in found.values()), "of another embedder"
        return {chunk_id: v.astype(np.float32, copy=False) for chunk_id, v in found.items()}

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

    def some_chunks(self, chunk_ids: Sequence[ChunkId], batch: int) -> Iterator[list[Chunk]]:
        """Those of these that exist, each once, in their order, at most `batch` at a time."""
        unique = list(dict.fromkeys(chunk_ids))
        for start in range(0, len(unique), batch):
            part = unique[start : start + batch]
            found = self.chunks(part)
            if found:
                yield [found[each] for each in part if each in found]

    def with_vectors(self, chunk_ids: Sequence[ChunkId]) -> set[ChunkId]:
        """Which of these are embedded already."""
        rows = self._db.execute(
            f"SELECT chunk_id FROM vectors WHERE chunk_id IN {AMONG}", (json.dumps(chunk_ids),)
        )
        return {ChunkId(chunk_id) for (chunk_id,) in rows}

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
        return Changes(now, _int64(added), _int64(removed) if is_told else None)

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


def _chunk(row: Sequence[object]) -> Chunk:
    chunk_id, title, text, token_ids = row
    assert isinstance(token_ids, bytes), "token_ids is a blob"
    ids = np.frombuffer(token_ids, "<u4").tolist()
    return Chunk(ChunkId(str(chunk_id)), str(title), str(text), tuple(ids))


def _int64(rows: Sequence[Sequence[object]]) -> VectorIds:
    return np.array([row[0] for row in rows], dtype=np.int64)
