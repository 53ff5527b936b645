"""One transaction per document, use counts that hold, and a schema that grows by numbers."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvweave.corpus import migrations
from kvweave.corpus.catalogue import Catalogue, Written
from kvweave.corpus.chunker import make_chunk_id
from kvweave.errors import CorpusError
from kvweave.types import Chunk, DocumentId, ParsedDocument, PlacedChunk


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    opened = Catalogue(tmp_path / "catalogue.sqlite")
    yield opened
    opened.close()


def make_chunk(*token_ids: int) -> Chunk:
    return Chunk(make_chunk_id(token_ids), "T", f"text {token_ids}", token_ids)


def put(catalogue: Catalogue, name: str, *chunks: Chunk) -> Written:
    catalogue.put_vectors([c.id for c in chunks], np.eye(len(chunks), 4, dtype=np.float32))
    placed = [PlacedChunk(chunk, n, n + 1) for n, chunk in enumerate(chunks)]
    return catalogue.put(ParsedDocument(DocumentId(name), f"{name}.txt", "T", "x"), "f1", placed)


def test_a_chunk_in_two_documents_is_stored_once_and_goes_with_the_last(
    catalogue: Catalogue,
) -> None:
    shared, own = make_chunk(1, 2), make_chunk(3)
    put(catalogue, "a", shared, own)
    put(catalogue, "b", shared)
    assert catalogue.totals() == (2, 2, 3)
    assert catalogue.remove([DocumentId("a")]).orphaned == (own.id,)
    assert catalogue.remove([DocumentId("b")]).orphaned == (shared.id,)
    assert catalogue.totals() == (0, 0, 0)
    assert catalogue.problems() == []


def test_a_chunk_twice_in_one_document_counts_twice(catalogue: Catalogue) -> None:
    chunk = make_chunk(1)
    put(catalogue, "a", chunk, chunk)
    assert [p.chunk for p in catalogue.document_chunks(DocumentId("a"))] == [chunk, chunk]
    assert catalogue.problems() == []
    assert catalogue.remove([DocumentId("a")]).orphaned == (chunk.id,)


def test_replacing_a_document_keeps_the_chunks_that_stayed(catalogue: Catalogue) -> None:
    kept, old, new = make_chunk(1), make_chunk(2), make_chunk(3)
    put(catalogue, "a", kept, old)
    before = catalogue.removals.vector_changes(0, 0)
    written = put(catalogue, "a", kept, new)
    assert written == Written((new.id,), (old.id,))
    changes = catalogue.removals.vector_changes(before.generation, int(before.added[-1]))
    assert changes.added.tolist() == [3]
    assert changes.removed.tolist() == [2]


def test_a_document_that_fails_half_way_leaves_nothing(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(catalogue, "a", make_chunk(1))
    generation = catalogue.generation()

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "_bury", fail)
    with pytest.raises(KeyboardInterrupt):
        put(catalogue, "b", make_chunk(2))
    assert [d.id for d in catalogue.documents()] == ["a"]
    assert catalogue.generation() == generation
    assert catalogue.problems() == []


def test_a_chunk_comes_back_with_the_very_tokens_it_went_in_with(catalogue: Catalogue) -> None:
    chunk = make_chunk(0, 1, 2**31, 2**32 - 1)
    put(catalogue, "a", chunk)
    assert catalogue.chunks([chunk.id]) == {chunk.id: chunk}
    assert next(catalogue.all_chunks(10)) == [chunk]


def test_vectors_of_unfinished_documents_wait_and_can_be_dropped(catalogue: Catalogue) -> None:
    put(catalogue, "a", make_chunk(1))
    waiting = make_chunk(9)
    catalogue.put_vectors([waiting.id], np.ones((1, 4), np.float32))
    assert catalogue.with_vectors([waiting.id]) == {waiting.id}
    assert len(catalogue.removals.vector_changes(0, 0).added) == 1  # no search can find it
    assert catalogue.drop_unused_vectors() == 1
    assert catalogue.with_vectors([waiting.id]) == set()


def test_a_removed_chunk_never_gives_its_vector_id_to_another(catalogue: Catalogue) -> None:
    put(catalogue, "a", make_chunk(1))
    catalogue.remove([DocumentId("a")])
    put(catalogue, "a", make_chunk(1))
    assert catalogue.removals.vector_changes(0, 0).added.tolist() == [2]


def test_a_catalogue_of_schema_one_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(f"{migrations.MIGRATIONS[0]} PRAGMA user_version = 1;")
        db.execute("INSERT INTO chunks VALUES (7, 'id', 'T', 'drain the node', x'01000000', 1)")
    db.close()
    catalogue = Catalogue(path)
    assert [vector_id for vector_id, _ in catalogue.match_words('"draining"', 5)] == [7]
    catalogue.close()


def test_many_may_open_a_new_catalogue_at_once(tmp_path: Path) -> None:
    for round_ in range(8):
        path = tmp_path / f"{round_}.sqlite"
        start = threading.Barrier(4)

        def open_one(path: Path = path, start: threading.Barrier = start) -> str:
            start.wait()
            catalogue = Catalogue(path)
            try:
                return catalogue.uid()
            finally:
                catalogue.close()

        with ThreadPoolExecutor(4) as pool:
            uids = [f.result() for f in [pool.submit(open_one) for _ in range(4)]]
        assert len(set(uids)) == 1
        assert len(uids[0]) == 32


def test_a_step_of_the_schema_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalogue(tmp_path / "c.sqlite").close()
    broken = "CREATE TABLE half (x);\nINSERT INTO nowhere VALUES (1);\n"
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
    with pytest.raises(CorpusError, match="not a usable catalogue"):
        Catalogue(tmp_path / "c.sqlite")
    monkeypatch.undo()
    catalogue = Catalogue(tmp_path / "c.sqlite")
    catalogue.close()
    with sqlite3.connect(tmp_path / "c.sqlite") as db:
        assert db.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall() == []
    db.close()


def test_a_catalogue_from_the_future_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "c.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(CorpusError, match=r"schema 99.*newer kvweave"):
        Catalogue(tmp_path / "c.sqlite")


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "c.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorpusError, match=r"c\.sqlite is not a usable catalogue"):
        Catalogue(tmp_path / "c.sqlite")


def test_what_is_acknowledged_is_synced_though_a_reader_is_in_the_way(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited 30 s for the reader, and then nothing was synced."""
    put(catalogue, "a", make_chunk(1))
    reader = sqlite3.connect(catalogue.path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM chunks").fetchone() == (1,)
    put(catalogue, "b", make_chunk(2))
    log = Path(f"{catalogue.path}-wal")
    synced, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    began_s = time.monotonic()
    catalogue.checkpoint()
    assert time.monotonic() - began_s < 10.0
    assert (log.stat().st_ino, log.stat().st_size) in synced
    reader.close()


def test_what_cannot_be_synced_is_not_acknowledged(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(catalogue, "a", make_chunk(1))

    def fsync(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CorpusError, match="Input/output error"):
        catalogue.checkpoint()


def test_documents_come_in_pages_behind_one_another(catalogue: Catalogue) -> None:
    for name in "dacb":
        put(catalogue, name, make_chunk(ord(name)))
    whole = [d.id for d in catalogue.documents()]
    assert whole == ["a", "b", "c", "d"], "by source"
    assert [d.id for d in catalogue.documents(limit=2)] == ["a", "b"]
    assert [d.id for d in catalogue.documents(DocumentId("b"), 9)] == ["c", "d"]
    assert catalogue.documents(DocumentId("none"), 9) == []
    found = catalogue.document(DocumentId("c"))
    assert found is not None
    assert found.source == "c.txt"
    assert catalogue.document(DocumentId("none")) is None


def test_a_chunk_is_found_by_its_places_and_by_how_its_id_begins(catalogue: Catalogue) -> None:
    shared, own = make_chunk(1, 2), make_chunk(3)
    put(catalogue, "b", own, shared)
    put(catalogue, "a", shared)
    assert catalogue.places_of(shared.id) == [("a", 0), ("b", 1)]
    assert catalogue.chunk_at(DocumentId("b"), 0) == own.id
    assert catalogue.chunk_at(DocumentId("b"), 2) is None
    assert catalogue.chunk_at(DocumentId("b"), -1) is None
    beginning = shared.id[:8]
    assert catalogue.chunks_by_beginning([beginning, "no such"]) == {beginning: (shared.id, "T")}
    (vector_id,) = [v for v, chunk in catalogue.chunks_after(0, 9) if chunk.id == shared.id]
    assert catalogue.chunks_of_vectors([vector_id])[vector_id] == (shared, "a")
