"""A knowledge base whose vectors live on a server. The server is qdrant-client's own, in memory."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from kvweave.corpus.index import make_index
from kvweave.corpus.index.base import SEARCH_EFFORT, Ids, Vectors
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import ConfigError, CorpusError
from kvweave.ingest import ingest
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import WordEmbedder, make_folder, open_kb

URL = "qdrant://vectors.example:6333/notes"
pytestmark = pytest.mark.filterwarnings("ignore:Local mode performs exact")


class Server:
    """One QdrantClient for all who connect, and a count of what they send."""

    def __init__(self) -> None:
        self.client = QdrantClient(":memory:", force_disable_check_same_thread=True)
        self.num_sent = 0
        self._upsert = self.client.upsert
        self.client.upsert = self.upsert  # type: ignore[method-assign]

    def upsert(self, collection: str, batch: Any, **options: Any) -> Any:
        self.num_sent += len(batch.ids)
        return self._upsert(collection, batch, **options)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr("qdrant_client.QdrantClient", lambda **_: server.client)
    return server


def test_vectors_go_to_the_server_once_and_readers_find_them(
    server: Server, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = make_folder(tmp_path / "docs", 4)
    ingest(open_kb(tmp_path / "kb", tokenizer, index=URL), [folder])
    assert server.num_sent == server.client.count("notes").count > 0
    sent = server.num_sent
    (folder / "new.txt").write_text("An ingress routes hosts to services.")
    ingest(open_kb(tmp_path / "kb", tokenizer), [folder])
    assert server.num_sent == sent + 1
    reader = KnowledgeBase.open(tmp_path / "kb", embedder=WordEmbedder())
    assert reader.search("ingress routes hosts", 1)[0].chunk.title == "new"
    *_, final = reader.search_staged("ingress routes hosts", 3, 4)
    assert final == reader.search("ingress routes hosts", 3)
    assert not (tmp_path / "kb" / "index" / "vectors.index").exists()
    assert reader.check() == []


def test_a_removed_document_leaves_the_server(
    server: Server, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer, index=URL)
    ingest(kb, [("Kept", "volume claim"), ("Gone", "quota budget")])
    (gone,) = [d for d in kb.documents() if d.title == "Gone"]
    kb.remove(gone.id)
    assert server.client.count("notes").count == 1
    assert kb.check() == []


def test_a_server_that_lost_or_kept_too_much_is_put_right_by_the_next_writer(
    server: Server, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = [("A", "volume claim"), ("B", "quota budget"), ("C", "ingress host")]
    ingest(open_kb(tmp_path / "kb", tokenizer, index=URL), texts)
    server.client.delete("notes", [1, 2])
    stray = models.Batch(ids=[99], vectors=[[1.0] * 64])
    server.client.upsert("notes", stray)
    ingest(open_kb(tmp_path / "kb", tokenizer), texts)
    kb = KnowledgeBase.open(tmp_path / "kb", embedder=WordEmbedder())
    assert kb.check() == []
    assert server.client.count("notes").count == 3


def test_a_collection_of_another_width_is_refused(server: Server) -> None:
    make_index(URL, 64, collection="")
    with pytest.raises(ConfigError, match=r"holds vectors of 64 dimensions, the embedder makes 32"):
        make_index(URL, 32, collection="")


def test_a_collection_of_another_knowledge_base_is_left_alone(
    server: Server, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    first = open_kb(tmp_path / "first", tokenizer, index=URL)
    second = open_kb(tmp_path / "second", tokenizer, index=URL)
    assert second.search("quota", 1) == []  # connected while it was nobody's
    ingest(first, [("A", "volume claim"), ("B", "quota budget")])
    for kb in (second, open_kb(tmp_path / "third", tokenizer, index=URL)):
        with pytest.raises(ConfigError, match=r"not of this knowledge base; name another"):
            ingest(kb, [("C", "ingress host")])
    assert first.check() == []
    assert first.search("quota budget", 1)[0].chunk.title == "B"


def test_a_collection_that_others_filled_or_that_compares_otherwise_is_refused(
    server: Server,
) -> None:
    server.client.create_collection(
        "notes", models.VectorParams(size=64, distance=models.Distance.EUCLID)
    )
    with pytest.raises(ConfigError, match=r"compares by .*not by inner product"):
        make_index(URL, 64, collection="")
    server.client.delete_collection("notes")
    make_index(URL, 64, collection="")
    server.client.upsert("notes", models.Batch(ids=[1], vectors=[[1.0] * 64]))
    with pytest.raises(ConfigError, match="not of this knowledge base"):
        make_index(URL, 64, collection="", owner="me")


FULL = SEARCH_EFFORT  # of a walk; the short one before it makes a quarter
ASKED = 0  # no effort: the full walk was asked for


@pytest.fixture
def held_walks(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[int, threading.Event]:
    """Walks of these efforts are answered once their event is set, as by a server that is slow."""
    held = {ASKED: threading.Event()}
    query_points = server.client.query_points

    def answer(*arguments: Any, search_params: models.SearchParams, **options: Any) -> Any:
        effort = search_params.hnsw_ef or 0
        if effort == FULL:
            held[ASKED].set()
        if effort in held:
            assert held[effort].wait(10), "nobody let it through"
        return query_points(*arguments, **options)

    monkeypatch.setattr(server.client, "query_points", answer)
    return held


def make_vectors(num: int) -> tuple[Ids, Vectors]:
    vectors = np.random.default_rng(0).standard_normal((num, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.arange(1, num + 1, dtype=np.int64), vectors


def test_a_short_walk_is_told_while_the_full_one_is_under_way(
    held_walks: dict[int, threading.Event],
) -> None:
    index = make_index(URL, 64, collection="")
    ids, vectors = make_vectors(20)
    index.add(ids, vectors)
    held_walks[FULL] = threading.Event()
    stages = index.search_staged(vectors[3], 2, 8)
    assert next(stages).ids[0] == 4, "the full walk is not answered yet"
    assert held_walks[ASKED].wait(10), "it was asked for beside the short one"
    held_walks[FULL].set()
    assert [hits.ids[0] for hits in stages] == [4]


def test_a_short_walk_that_comes_late_is_not_waited_for(
    held_walks: dict[int, threading.Event],
) -> None:
    index = make_index(URL, 64, collection="")
    ids, vectors = make_vectors(20)
    index.add(ids, vectors)
    held_walks[FULL // 4] = threading.Event()
    got = [hits.ids.tolist() for hits in index.search_staged(vectors[3], 2, 8)]
    assert got == [index.search(vectors[3], 2).ids.tolist()] * 2
    assert len(got) == index.num_stages(2, 8)
    held_walks[FULL // 4].set()


def test_a_server_that_fails_in_a_stage_is_told_like_any_other(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index(URL, 64, collection="")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(server.client, "query_points", fail)
    with pytest.raises(CorpusError, match=r"does not answer .*gone"):
        list(index.search_staged(make_vectors(1)[1][0], 2, 8))
