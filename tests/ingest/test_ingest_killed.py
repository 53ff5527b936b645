"""kill -9 at any moment of an ingest; reopen; run again: catalogue, index and files agree."""

import multiprocessing
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvweave.corpus.catalogue_index import load_index
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import SearchOptions
from kvweave.text.tokenizer import Tokenizer
from worlds.killed_ingest import count_events, run, run_and_die
from worlds.tiny_corpus import WordEmbedder, make_folder, make_text, make_tokenizer

Kill = Callable[[int, Path], bool]
QUERIES = ["drain node", "quota budget", "image registry probe"]


class World(NamedTuple):
    before: Path  # a knowledge base with an older version of the documents
    docs: Path  # the documents as they are now
    after: list[object]  # what a run that nobody kills makes of them
    num_events: int  # how long that run is


def contents(folder: Path) -> list[object]:
    """All that counts: documents, their chunks, and what searches find."""
    with KnowledgeBase.open(folder, embedder=WordEmbedder()) as kb:
        documents = sorted((d.source, d.title, d.id) for d in kb.documents())
        chunks = [[p.chunk.id for p in kb.catalogue.document_chunks(d[2])] for d in documents]
        found = [{h.chunk.id for h in kb.search(q, 3, SearchOptions("hybrid"))} for q in QUERIES]
    return [documents, chunks, found]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> World:
    root = tmp_path_factory.mktemp("killed")
    docs = make_folder(root / "docs", 8)
    run(root / "before", tokenizer, docs)
    for number in (1, 4):
        (docs / f"doc{number:03}.md").write_text(f"# Changed {number}\n\n{make_text(90, number)}")
    (docs / "doc002.md").unlink()
    (docs / "rows.jsonl").write_text('{"text": "alpha beta"}\n{"text": "gamma delta"}\n')
    make_folder(docs / "more", 6, seed=50)
    shutil.copytree(root / "before", root / "after")
    num_events = count_events(lambda: run(root / "after", tokenizer, docs))
    return World(root / "before", docs, contents(root / "after"), num_events)


@pytest.fixture(scope="module")
def kill_at(world: World, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Kill:
    """A function that kills an ingest at an event and checks what is left."""
    tokenizer_folder = tmp_path_factory.mktemp("tokenizer")
    assert make_tokenizer(tokenizer_folder).fingerprint == tokenizer.fingerprint
    # a server that has imported everything and started no thread: each child is a cheap fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["worlds.killed_ingest", "faiss", "kvweave.corpus.catalogue_index"]
    )

    def kill(after_events: int, folder: Path) -> bool:
        shutil.copytree(world.before, folder)
        child = context.Process(
            target=run_and_die, args=(folder, tokenizer_folder, world.docs, after_events)
        )
        child.start()
        child.join(60)
        assert child.exitcode in (-signal.SIGKILL, 0)
        with KnowledgeBase.open(folder, embedder=WordEmbedder()) as kb:
            problems = [p for p in kb.check() if "left behind" not in p]  # swept by the next writer
            assert problems == []
            assert all(len(kb.search(query, 3)) == 3 for query in QUERIES)
        run(folder, tokenizer, world.docs)
        with KnowledgeBase.open(folder, embedder=WordEmbedder()) as kb:
            assert kb.check() == []
            loaded = load_index(folder / "index" / "vectors.index")
            assert loaded is not None
            assert loaded.generation == kb.catalogue.generation()
        assert contents(folder) == world.after
        shutil.rmtree(folder)
        return child.exitcode != 0

    return kill


@pytest.mark.parametrize("seed", range(3))
def test_an_ingest_killed_at_a_few_random_moments_is_finished_by_the_next(
    seed: int, kill_at: Kill, world: World, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    killed = [kill_at(rng.randrange(world.num_events), tmp_path / str(n)) for n in range(5)]
    assert sum(killed) >= 4  # a late one may find the run already over


@pytest.mark.slow
def test_an_ingest_killed_at_many_random_moments_is_finished_by_the_next(
    kill_at: Kill, world: World, tmp_path: Path
) -> None:
    rng = random.Random(1234)
    killed = [kill_at(rng.randrange(world.num_events), tmp_path / str(n)) for n in range(300)]
    assert sum(killed) >= 270
