"""The facade: opens what fits, refuses what does not, finds and removes."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.catalogue_index import load_index
from kvweave.corpus.embedder import Vectors
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import WORD, SearchOptions
from kvweave.errors import ConfigError, CorpusDamaged, CorpusError, CorpusMismatch, RequestError
from kvweave.ingest import ingest
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import WordEmbedder, make_folder, make_text, open_kb

PAIRS = [
    ("Drain", "Cordon the node, then evict its pods."),
    ("Taints", "A taint keeps pods away unless they tolerate it."),
    ("Volumes", "A claim binds to a volume of the storage class."),
    ("Quota", "The budget of a namespace limits its replicas."),
]


@pytest.fixture
def kb(tmp_path: Path, tokenizer: Tokenizer) -> KnowledgeBase:
    kb = open_kb(tmp_path / "kb", tokenizer)
    ingest(kb, PAIRS)
    return kb


@pytest.mark.parametrize("mode", ["vector", "words", "hybrid"])
def test_a_question_finds_its_document(kb: KnowledgeBase, mode: str) -> None:
    (best, *_) = kb.search("evict the pods of a node", 2, SearchOptions(mode))  # type: ignore[arg-type]
    assert best.chunk.title == "Drain"


@pytest.mark.parametrize("mode", ["vector", "words", "hybrid"])
@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw", ":memory:"])
def test_a_staged_search_ends_with_the_plain_answer(
    tmp_path: Path, tokenizer: Tokenizer, index: str, mode: str
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer, index=index)
    ingest(kb, [(f"Note {n}", make_text(50, n)) for n in range(20)])
    for query in ("drain node", "quota registry probe"):
        *_, final = kb.search_staged(query, 5, 4, SearchOptions(mode))  # type: ignore[arg-type]
        assert final == kb.search(query, 5, SearchOptions(mode))  # type: ignore[arg-type]
        assert len(final) == 5


def test_words_are_never_read_as_operators(kb: KnowledgeBase) -> None:
    for query in ('"', "AND OR NOT", "a* NEAR(b)", "-pods", "text:pods", "", "?!", "the of"):
        asked = set(WORD.findall(query.lower()))
        for hit in kb.search(query, 3, SearchOptions("words")):
            assert asked & set(WORD.findall(hit.chunk.text.lower())), query
    plain = kb.search("pods", 3, SearchOptions("words"))
    assert plain
    assert kb.search("-pods", 3, SearchOptions("words")) == plain


def test_a_removed_document_is_gone_from_every_search_at_once(kb: KnowledgeBase) -> None:
    other = KnowledgeBase.open(kb.folder, embedder=WordEmbedder())
    assert other.search("evict pods node", 1)[0].chunk.title == "Drain"
    (drain,) = [d for d in kb.documents() if d.title == "Drain"]
    orphaned = kb.remove(drain.id[:8]).orphaned
    for reader in (kb, other):  # the second one had its index in memory already
        for mode in ("vector", "words", "hybrid"):
            hits = reader.search("evict pods node", 10, SearchOptions(mode))  # type: ignore[arg-type]
            assert "Drain" not in [hit.chunk.title for hit in hits]
    assert len(orphaned) == 1
    assert kb.check() == []


def test_a_reader_sees_what_a_writer_added_meanwhile(
    kb: KnowledgeBase, tokenizer: Tokenizer
) -> None:
    reader = KnowledgeBase.open(kb.folder, embedder=WordEmbedder())
    reader.search("pods", 1)
    ingest(kb, [("Ingress", "An ingress routes hosts to services.")])
    assert reader.search("ingress routes hosts", 1)[0].chunk.title == "Ingress"
    assert reader.check() == []


def test_chunks_come_back_in_the_order_asked_for(kb: KnowledgeBase) -> None:
    ids = [hit.chunk.id for hit in kb.search("pods", 4)]
    assert [chunk.id for chunk in kb.chunks(ids[::-1])] == ids[::-1]
    with pytest.raises(CorpusError, match="has no chunk feed"):
        kb.chunks(["feed"])  # type: ignore[list-item]


@pytest.mark.parametrize("damage", ["missing", "torn", "flipped", "older"])
def test_an_index_file_that_is_not_right_is_built_again(
    tmp_path: Path, tokenizer: Tokenizer, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    ingest(kb, PAIRS[:2])
    path = tmp_path / "kb" / "index" / "vectors.index"
    first = path.read_bytes()
    ingest(kb, PAIRS)
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "torn":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
        case "older":
            path.write_bytes(first)
    again = KnowledgeBase.open(tmp_path / "kb", embedder=WordEmbedder())
    assert again.check() == []
    assert again.search("claim volume storage", 1)[0].chunk.title == "Volumes"
    assert ("building it again" in caplog.text) == (damage in ("torn", "flipped"))


@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_an_index_of_another_catalogue_is_built_again(
    tmp_path: Path, tokenizer: Tokenizer, index: str
) -> None:
    with open_kb(tmp_path / "kb", tokenizer, index=index) as kb:
        ingest(kb, PAIRS)
    for path in (tmp_path / "kb").glob("catalogue*"):
        path.unlink()
    Catalogue(tmp_path / "kb" / "catalogue.sqlite").close()
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        ingest(kb, PAIRS[::-1])  # as many vectors, the same ids, another order
        for title, text in PAIRS:
            assert kb.search(text, 1)[0].chunk.title == title
        assert kb.check() == []


def test_the_saved_index_needs_no_catching_up(kb: KnowledgeBase) -> None:
    loaded = load_index(kb.folder / "index" / "vectors.index")
    assert loaded is not None
    assert loaded.generation == kb.catalogue.generation()
    assert len(loaded.vectors) == kb.totals().num_chunks


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw"])
def test_many_removals_end_in_a_compact_index(
    tmp_path: Path, tokenizer: Tokenizer, index: str
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer, index=index)
    folder = make_folder(tmp_path / "docs", 12)
    ingest(kb, [folder])
    for path in sorted(folder.iterdir())[:6]:
        kb.remove(str(path))
    loaded = load_index(tmp_path / "kb" / "index" / "vectors.index")
    assert loaded is not None
    assert loaded.vectors.rows.num_dead <= 0.25 * loaded.vectors.rows.num_rows
    assert kb.check() == []


def test_the_kind_of_index_can_be_changed_later(kb: KnowledgeBase, tokenizer: Tokenizer) -> None:
    assert kb._index.kind == "flat"
    again = open_kb(kb.folder, tokenizer, index="hnsw")
    ingest(again, PAIRS)
    assert KnowledgeBase.open(kb.folder)._index.kind == "hnsw"
    assert again.check() == []


def test_searches_run_beside_an_ingest(tmp_path: Path, tokenizer: Tokenizer) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    ingest(kb, PAIRS)
    failures: list[BaseException] = []
    done = threading.Event()

    def search() -> None:
        try:
            while not done.is_set():
                assert kb.search("evict pods node", 1)[0].chunk.title == "Drain"
                list(kb.search_staged("volume", 3, 4, SearchOptions("hybrid")))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(5):
        ingest(kb, [(f"{round_}-{n}", make_text(40, 100 * round_ + n)) for n in range(10)])
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert kb.check() == []


def test_another_tokenizer_embedder_or_size_is_refused_with_the_way_out(
    kb: KnowledgeBase, tokenizer: Tokenizer
) -> None:
    class Other(WordEmbedder):
        fingerprint = "0123456789abcdef"

    with pytest.raises(
        CorpusError, match=r"another tokenizer.*--model smollm2.*ingest into a new folder"
    ):
        KnowledgeBase.open(kb.folder, tokenizer=Other())  # type: ignore[arg-type]
    with pytest.raises(CorpusError, match=r"embedded with 'words'.*ingest into a new folder"):
        KnowledgeBase.open(kb.folder, embedder=WordEmbedder(identity="words-2"))
    with pytest.raises(CorpusError, match="at most 48 tokens, not 64"):
        open_kb(kb.folder, tokenizer, chunk_tokens=64)


def write_old_identity(folder: Path) -> None:
    """As kvweave wrote it when the time of download was in it."""
    settings = json.loads((folder / "kb.json").read_text())
    (folder / "kb.json").write_text(json.dumps({**settings, "embedder_identity": "7460" * 8}))


def test_an_old_identity_is_renewed_where_the_embedder_gives_the_stored_vectors(
    kb: KnowledgeBase,
) -> None:
    write_old_identity(kb.folder)
    with KnowledgeBase.open(kb.folder, embedder=WordEmbedder()) as again:
        assert again.search("pods", 1)
    assert json.loads((kb.folder / "kb.json").read_text())["embedder_identity"] == "words-1"


def test_an_old_identity_of_another_embedder_is_refused(kb: KnowledgeBase) -> None:
    class Mirrored(WordEmbedder):
        def embed_passages(self, texts: Sequence[str]) -> Vectors:
            return super().embed_passages([text[::-1] for text in texts])

    class Renamed(WordEmbedder):
        name = "e5-words"  # reads other words in front of a question, perhaps

    write_old_identity(kb.folder)
    for other in (Mirrored(), Renamed(), WordEmbedder(dim=32)):
        with pytest.raises(CorpusMismatch, match=r"embedded with 'words'.*into a new folder"):
            KnowledgeBase.open(kb.folder, embedder=other)
    assert json.loads((kb.folder / "kb.json").read_text())["embedder_identity"] == "7460" * 8


def test_a_second_writer_is_refused_and_a_reader_is_not(kb: KnowledgeBase) -> None:
    other = KnowledgeBase.open(kb.folder, embedder=WordEmbedder())
    with kb.writing():
        with pytest.raises(CorpusError, match="being written by another process"), other.writing():
            pass
        assert other.search("pods", 1)


def test_a_folder_that_is_no_knowledge_base_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(CorpusError, match=r"no knowledge base in .*kvweave ingest PATH"):
        KnowledgeBase.open(tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(CorpusError, match="exists and is no knowledge base"):
        open_kb(tmp_path / "full", tokenizer)
    with pytest.raises(ConfigError, match="no index kind 'tree'; known: auto, flat"):
        open_kb(tmp_path / "new", tokenizer, index="tree")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["{", '{"version": 9}', '{"version": 1}', "[]"])
def test_a_broken_kb_json_is_one_line_with_a_way_out(kb: KnowledgeBase, content: str) -> None:
    (kb.folder / "kb.json").write_text(content)
    with pytest.raises(CorpusError, match=r"kb\.json .*(ingest into a new folder)"):
        KnowledgeBase.open(kb.folder)


def test_bad_searches_are_refused_by_name(kb: KnowledgeBase) -> None:
    with pytest.raises(RequestError, match="k and stages"):
        kb.search("pods", 0)
    with pytest.raises(RequestError, match="retrieval 'magic' is unknown"):
        kb.search("pods", 1, SearchOptions("magic"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="needs the query's words"):
        kb.search(np.zeros(64, np.float32), 1, SearchOptions("hybrid"))
    with pytest.raises(ConfigError, match="without an embedder"):
        KnowledgeBase.open(kb.folder).search("pods", 1)


def test_a_qdrant_server_that_is_down_is_one_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer, index="http://127.0.0.1:9/things")
    with pytest.raises(CorpusError, match=r"http://127\.0\.0\.1:9/things does not answer"):
        ingest(kb, PAIRS)
    assert kb.totals().num_documents == len(PAIRS)  # the catalogue has them; the next run goes on


@pytest.mark.parametrize("reference", ["~nobody-of-that-name/notes.md", "no\0file", "x" * 5000])
def test_a_document_that_no_file_could_be_named_like_is_not_there(
    kb: KnowledgeBase, reference: str
) -> None:
    with pytest.raises(CorpusError, match="has no document"):
        kb.find(reference)


def test_a_lock_that_cannot_be_taken_is_one_line_with_a_way_out(kb: KnowledgeBase) -> None:
    (kb.folder / "writer.lock").unlink(missing_ok=True)
    (kb.folder / "writer.lock").mkdir()
    with pytest.raises(CorpusError, match=r"cannot write .*; make it writable"):
        kb.remove_documents([])
    with kb.writing_if_free() as is_free:
        assert not is_free


def test_trouble_of_the_writer_itself_is_not_taken_for_the_lock(kb: KnowledgeBase) -> None:
    with pytest.raises(FileNotFoundError), kb.writing():
        raise FileNotFoundError("a file of the writer")


def test_a_knowledge_base_whose_maker_was_killed_can_be_made_again(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "kb"
    folder.mkdir()
    (folder / "kb.json.4242.tmp").write_text('{"tokeni')
    kb = open_kb(folder, tokenizer)
    with kb.writing():
        pass
    assert kb.check() == []


def test_what_is_being_written_beside_the_knowledge_base_was_not_left_behind(
    kb: KnowledgeBase,
) -> None:
    (kb.folder / "kv" / "tmp").mkdir(parents=True)
    (kb.folder / "kv" / "tmp" / "0123.tmp").touch()  # a store that lives has such
    assert kb.check() == []
    (kb.folder / "index").mkdir(exist_ok=True)
    for folder in (kb.folder, kb.folder / "index"):
        (folder / "dead.tmp").touch()
    assert kb.check() == ["dead.tmp was left behind"] * 2
    with kb.writing():
        assert kb.check() == [], "the next writer sweeps what check speaks of"


def damage(kb: KnowledgeBase, statement: str) -> None:
    db = sqlite3.connect(kb.catalogue.path)
    with db:
        db.execute(statement)
    db.close()


def test_tokens_that_were_changed_on_the_disk_are_refused(kb: KnowledgeBase) -> None:
    """They gave other answers, silently, although the id is their hash."""
    assert kb.check() == []
    ((_, chunk),) = kb.catalogue.chunks_after(0, 1)
    chunk_id = chunk.id
    damage(kb, "UPDATE chunks SET token_ids = x'01000000' WHERE vector_id = 1")
    for read in (
        lambda: kb.catalogue.chunks([chunk_id]),
        lambda: kb.catalogue.chunks_of_vectors([1]),
        lambda: list(kb.catalogue.all_chunks(8)),
        lambda: kb.search("drain the node", 50),
    ):
        with pytest.raises(CorpusDamaged, match="are not those that were stored"):
            read()
    assert "1 chunks whose tokens were changed" in kb.check()


def test_a_catalogue_that_is_gone_is_no_empty_one(kb: KnowledgeBase, tokenizer: Tokenizer) -> None:
    folder = kb.folder
    kb.close()
    for file in folder.glob("catalogue.sqlite*"):
        file.unlink()
    for create in (False, True):
        with pytest.raises(CorpusDamaged, match=r"is gone, and the documents with it; restore it"):
            open_kb(folder, tokenizer) if create else KnowledgeBase.open(folder)
    assert not list(folder.glob("catalogue.sqlite*")), "none was made"


def test_a_catalogue_that_is_taken_away_while_it_is_open_acknowledges_nothing(
    kb: KnowledgeBase,
) -> None:
    for file in kb.folder.glob("catalogue.sqlite*"):
        file.unlink()
    (document, *_) = kb.documents()
    with pytest.raises(CorpusDamaged, match="is gone"):
        kb.remove(document.id)
    assert not (kb.folder / "catalogue.sqlite").exists()


def test_settings_that_are_gone_do_not_make_another_knowledge_base(
    kb: KnowledgeBase, tokenizer: Tokenizer
) -> None:
    folder, documents = kb.folder, kb.documents()
    settings = (folder / "kb.json").read_bytes()
    kb.close()
    (folder / "kb.json").unlink()
    with pytest.raises(CorpusError):
        open_kb(folder, tokenizer)
    (folder / "kb.json").write_bytes(settings)
    with open_kb(folder, tokenizer) as again:
        assert again.documents() == documents


def test_a_folder_that_was_left_half_made_is_made_again(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with open_kb(tmp_path / "new", tokenizer):
        pass
    (tmp_path / "new" / "kb.json").unlink()  # as if killed before it was written
    for leftover in ("index", "kv"):
        shutil.rmtree(tmp_path / "new" / leftover, ignore_errors=True)
    with open_kb(tmp_path / "new", tokenizer) as kb:
        assert kb.documents() == []
        assert kb.check() == []
