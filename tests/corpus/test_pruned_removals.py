"""Notes of removals go after a while, and who comes later than that compares everything."""

import sqlite3
import time
from pathlib import Path

import pytest

from kvweave.corpus import removals
from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.migrations import MIGRATIONS
from kvweave.corpus.removals import RemovalReader
from kvweave.ingest import ingest
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import WordEmbedder, open_kb

WORDS = ["drain", "taint", "volume", "quota"]


@pytest.fixture
def kb(tmp_path: Path, tokenizer: Tokenizer) -> KnowledgeBase:
    kb = open_kb(tmp_path / "kb", tokenizer)
    ingest(kb, [(word, f"The {word} of a node.") for word in WORDS])
    return kb


def remove(kb: KnowledgeBase, title: str) -> None:
    kb.remove_documents([d.id for d in kb.documents() if d.title == title])


def settle(kb: KnowledgeBase) -> None:
    """The KV of all that went is deleted."""
    kb.catalogue.removals.settle_kv(kb.catalogue.generation())


def num_notes(kb: KnowledgeBase) -> int:
    (count,) = kb.catalogue.database.connection.execute("SELECT count(*) FROM removals").fetchone()
    return int(count)


def age(kb: KnowledgeBase, seconds: float) -> None:
    """All notes are that much older."""
    with kb.catalogue.database.transaction() as db:
        db.execute("UPDATE removals SET removed_at = removed_at - ?", (seconds,))


def test_a_publish_drops_notes_that_are_old_and_no_others(kb: KnowledgeBase) -> None:
    remove(kb, "drain")
    settle(kb)
    age(kb, removals.KEEP_S + 1)
    remove(kb, "taint")  # publishes
    assert num_notes(kb) == 1, "the young one"
    settle(kb)
    with kb.writing():
        kb.publish()
    assert num_notes(kb) == 1
    age(kb, removals.KEEP_S + 1)
    with kb.writing():
        kb.publish()
    assert num_notes(kb) == 0
    assert kb.check() == []


def test_a_note_stays_while_the_kv_of_what_went_may_be_there(kb: KnowledgeBase) -> None:
    remove(kb, "drain")
    assert kb.catalogue.removals.prune(keep_s=0) == 0
    assert kb.catalogue.removals.pending_kv()
    settle(kb)
    assert kb.catalogue.removals.prune(keep_s=0) == 1
    assert kb.catalogue.removals.pending_kv() is None


def test_an_old_note_stays_with_younger_ones_that_came_before_it(kb: KnowledgeBase) -> None:
    for title in ("drain", "taint", "volume"):
        remove(kb, title)
    settle(kb)
    with kb.catalogue.database.transaction() as db:  # its clock was wrong
        db.execute("UPDATE removals SET removed_at = 1 WHERE vector_id = 2")
    assert kb.catalogue.removals.prune(keep_s=3600) == 0, "who is told by name is told of all"
    assert kb.catalogue.removals.prune(keep_s=0) == 3


def test_a_reader_is_told_by_name_as_long_as_there_are_notes(kb: KnowledgeBase) -> None:
    reader = RemovalReader(kb.catalogue.path)
    first = reader.generation()
    remove(kb, "drain")
    settle(kb)
    second = reader.generation()
    kb.catalogue.removals.prune(keep_s=0)
    remove(kb, "taint")
    assert reader.since(first).chunk_ids is None, "nobody knows any more"
    told = reader.since(second)
    assert told.chunk_ids is not None
    assert len(told.chunk_ids) == 1
    assert told.generation == reader.since(first).generation == kb.catalogue.generation()
    reader.close()


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw"])
def test_an_index_in_memory_that_slept_too_long_drops_what_went(
    tmp_path: Path, tokenizer: Tokenizer, index: str
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer, index=index)
    ingest(kb, [(word, f"The {word} of a node.") for word in WORDS])
    asleep = KnowledgeBase.open(kb.folder, embedder=WordEmbedder())
    assert asleep.search("drain", 1)[0].chunk.title == "drain"
    remove(kb, "drain")
    settle(kb)
    kb.catalogue.removals.prune(keep_s=0)
    ingest(kb, [("ingress", "The ingress of a node.")])
    assert "drain" not in [hit.chunk.title for hit in asleep.search("drain", 9)]
    assert asleep.search("ingress", 1)[0].chunk.title == "ingress"
    assert asleep.check() == []


def test_an_index_file_that_is_older_than_the_notes_is_caught_up(kb: KnowledgeBase) -> None:
    path = kb.folder / "index" / "vectors.index"
    old = path.read_bytes()
    remove(kb, "drain")
    settle(kb)
    kb.catalogue.removals.prune(keep_s=0)
    path.write_bytes(old)  # from a backup
    again = KnowledgeBase.open(kb.folder, embedder=WordEmbedder())
    assert "drain" not in [hit.chunk.title for hit in again.search("drain", 9)]
    assert again.check() == []


def test_notes_of_an_older_schema_are_as_old_as_the_day_it_grew(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    with sqlite3.connect(path) as db:
        for step in MIGRATIONS[:4]:
            db.executescript(step)
        db.execute("PRAGMA user_version = 4")
        db.execute("INSERT INTO removals VALUES (1, 7, 'gone')")
        db.execute("UPDATE state SET generation = 1, kv_generation = 1")
    db.close()
    catalogue = Catalogue(path)
    (removed_at,) = catalogue.database.connection.execute(
        "SELECT removed_at FROM removals"
    ).fetchone()
    assert abs(time.time() - removed_at) < 3600
    assert catalogue.removals.prune() == 0
    catalogue.close()
