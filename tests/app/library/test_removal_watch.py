"""A document that another process removes leaves the memory of a running server as well."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvweave.app.answer.conversations import Conversations
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig, TextSource
from kvweave.app.library.kv_sync import KVSync, remove_with_kv
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Sampling, Weave
from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest.pipeline import ingest
from kvweave.kv.format.header import Buffer
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Residency
from kvweave.kv.provenance import carries
from kvweave.kv.tiers.disk import DiskTier
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds.kv_checks import check_store
from worlds.serving import Interrupted
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import plain_weave

GREEDY = Sampling(max_tokens=2)
DRAIN = ("Drain", "To drain a node, cordon it first.")
PAST = [
    {"role": "user", "content": "How do I drain?"},
    {"role": "assistant", "content": "Well."},
]
Over = Callable[[], AbstractContextManager[Weave]]


@pytest.fixture
def over(chat_model_folder: Path, tmp_path: Path) -> Iterator[Over]:
    """Opens the knowledge base with one engine and one memory of conversations, as a server does:
    again after it was closed for another."""
    decoder, conversations = load_decoder(chat_model_folder, device="cpu"), Conversations()
    with plain_weave(decoder, Tokenizer(chat_model_folder)) as whole:
        yield lambda: whole.over(
            tmp_path / "kb",
            KVOptions("isolated", system=whole.system),
            AnswerSettings(whole.system, conversations=conversations),
            open_embedder=lambda name: WordEmbedder(),
        )


def fill(weave: Weave) -> Chunk:
    """One document, known to tree, store and a conversation."""
    weave.ingest(DRAIN, chunk_kv=True)
    (hit,) = weave.search("drain", 1)
    for reuse in ("prefix", "reuse"):
        weave.ask(
            "How do I drain?", k=1, reuse=reuse, conversation_id="c", history=[], sampling=GREEDY
        )
    assert in_tree(weave, hit.chunk)
    assert in_host(weave, hit.chunk)
    return hit.chunk


def in_tree(weave: Weave, chunk: Chunk) -> bool:
    engine = weave.engine
    return engine.run_alone(lambda: any(n.chunk_id.endswith(chunk.id) for n in engine.tree))


def in_host(weave: Weave, chunk: Chunk) -> bool:
    (peek,) = weave.library.store.peek([weave.library.encoder.exact_key(chunk.token_ids)])
    return peek.residency is not Residency.ABSENT


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.01)


def history_has(weave: Weave, chunk: Chunk) -> bool:
    """Whether the next prompt of the conversation has the chunk, which it does not bring."""
    later = weave.ask(
        "And now?",
        documents=["A quota limits pods."],
        conversation_id="c",
        history=PAST,
        reuse="prefix",
        sampling=GREEDY,
    )
    assert later.explain is not None
    ids, width = tuple(later.explain.token_ids), len(chunk.token_ids)
    return any(ids[at : at + width] == chunk.token_ids for at in range(len(ids) - width + 1))


def test_a_removal_by_another_process_reaches_tree_store_and_conversations(
    over: Over, tmp_path: Path
) -> None:
    with over() as weave:
        chunk = fill(weave)
        assert history_has(weave, chunk)
        (document,) = weave.library.kb.documents()
        source = Path(__file__).parents[3] / "src"
        done = subprocess.run(
            [sys.executable, "-m", "kvweave", "docs", "rm", document.id, "--kb", tmp_path / "kb"],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert not history_has(weave, chunk)
        assert not in_tree(weave, chunk)
        assert not in_host(weave, chunk)
        for _ in range(2):  # the same text from the caller is the caller's own
            weave.ask("Well?", documents=[chunk.text], reuse="prefix", sampling=GREEDY)
        assert in_tree(weave, chunk)


def test_a_removal_by_another_process_reaches_copies_that_came_from_the_disk(
    over: Over, tmp_path: Path
) -> None:
    with over() as weave:  # never asked: a tree that has it may leave nothing to load
        weave.ingest(DRAIN, chunk_kv=True)
        (hit,) = weave.search("drain", 1)
        chunk = hit.chunk
    with over() as weave:  # nothing in host memory: the next request loads it, without extras
        store = weave.library.store
        weave.ask("How do I drain?", k=1, reuse="reuse", sampling=GREEDY)
        wait_until(lambda: store.metrics.value("kv_promotions_total") == 1, "it is kept at hand")
        with KnowledgeBase.open(tmp_path / "kb") as kb:
            remove_with_kv(kb, [kb.documents()[0].id])
        weave.ask("Well?", documents=["A quota limits pods."], reuse="full", sampling=GREEDY)
        assert not in_host(weave, chunk)
        assert store.used_bytes()["host"] == 0


def test_a_removal_while_the_knowledge_base_was_closed_is_heard_of_at_the_next_request(
    over: Over, tmp_path: Path
) -> None:
    with over() as weave:
        chunk = fill(weave)
    with KnowledgeBase.open(tmp_path / "kb") as kb:
        remove_with_kv(kb, [kb.documents()[0].id])
    with over() as weave:
        assert not history_has(weave, chunk)
        assert not in_tree(weave, chunk)


def test_a_chunk_that_another_process_brought_back_stays(over: Over, tmp_path: Path) -> None:
    with over() as weave:
        chunk = fill(weave)
        kb = weave.library.kb
        with KnowledgeBase.open(
            tmp_path / "kb", tokenizer=weave.runtime.tokenizer, embedder=WordEmbedder()
        ) as other:
            other.remove_documents([other.documents()[0].id])
            ingest(other, [DRAIN])
        assert kb.documents()
        assert history_has(weave, chunk)
        assert in_tree(weave, chunk)
        assert in_host(weave, chunk)


def test_a_document_that_comes_back_after_a_removal_elsewhere_gets_its_kv_again(
    over: Over, tmp_path: Path
) -> None:
    objects = tmp_path / "kb/kv/objects"
    with over() as weave:
        fill(weave)
    with over() as weave:  # its books have it on disk
        with KnowledgeBase.open(tmp_path / "kb") as kb:
            remove_with_kv(kb, [kb.documents()[0].id])
        assert not list(objects.rglob("*.kv"))
        weave.ingest(DRAIN, chunk_kv=True)
        assert weave.library.store.flush()
        assert list(objects.rglob("*.kv"))
        check_store(weave.library.store)


def test_a_plan_hears_of_it_too(over: Over, tmp_path: Path) -> None:
    with over() as weave:
        chunk = fill(weave)
        with KnowledgeBase.open(tmp_path / "kb") as kb:
            kb.remove_documents([kb.documents()[0].id])  # by one who knows of no KV
        weave.plan("Well?", documents=["A quota limits pods."])
        assert not in_tree(weave, chunk)


def test_a_chunk_removed_elsewhere_while_it_is_being_stored_is_not_left_behind(
    over: Over, tmp_path: Path
) -> None:
    with over() as weave:
        weave.ingest(DRAIN, chunk_kv=False)
        (hit,) = weave.search("drain", 1)
        seen, encoder = weave.library.promotion, weave.library.encoder
        assert seen is not None
        alone = encoder.run_alone

        def interrupted(job: Callable[[], object]) -> object:
            made = alone(job)
            with KnowledgeBase.open(tmp_path / "kb") as kb:
                if kb.documents():
                    remove_with_kv(kb, [kb.documents()[0].id])
            return made

        encoder.run_alone = interrupted  # type: ignore[assignment]
        now = weave.engine.tombstones.generation
        seen.saw(weave.library.encoder, [hit.chunk.token_ids], at_once={hit.chunk.id}, as_of=now)
        assert seen.wait(30)
        assert weave.library.store.flush()
        assert not in_host(weave, hit.chunk)


def test_a_request_that_searched_before_a_removal_elsewhere_brings_nothing_back(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    decoder, searches = load_decoder(chat_model_folder, device="cpu"), Interrupted()
    folder = tmp_path / "kb"
    with plain_weave(decoder, Tokenizer(chat_model_folder)) as whole:

        def opened() -> AbstractContextManager[Weave]:
            return whole.over(
                folder,
                KVOptions("isolated", system=whole.system),
                AnswerSettings(whole.system, look_up=searches),
                open_embedder=lambda name: WordEmbedder(),
            )

        with opened() as weave:
            chunk = fill(weave)
        with opened() as weave, KnowledgeBase.open(folder) as elsewhere:

            def removed_and_heard_of() -> None:
                elsewhere.remove_documents([elsewhere.documents()[0].id])  # its files are next
                weave.ask("Well?", documents=["A quota limits pods."], sampling=GREEDY)

            searches.then = removed_and_heard_of
            answer = weave.ask("How do I drain?", k=1, reuse="reuse", sampling=GREEDY)
            assert answer.completion_tokens > 0
            store = weave.library.store
            assert store.metrics.value("kv_loads_total") >= 1, "its file was still there"
            KVSync(elsewhere, None).before()  # now they go
            assert not list((folder / "kv/objects").rglob("*.kv"))
            assert store.used_bytes()["host"] == 0
            assert not store.keys_at_hand(carries([chunk.id]))
            for _ in range(2):  # the same text from the caller is the caller's own
                weave.ask("Well?", documents=[chunk.text], sampling=GREEDY)
            assert weave.library.promotion is not None
            assert weave.library.promotion.wait(30)
            assert store.keys_at_hand(carries([chunk.id]))


@pytest.fixture
def removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on documents are removed right before a file of theirs is written."""
    write = DiskTier.write

    def interrupted(self: DiskTier, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        with KnowledgeBase.open(tmp_path / "kb") as kb:
            if kb.documents():
                remove_with_kv(kb, [kb.documents()[0].id])  # and finds no file
        return write(self, key, parts)

    return lambda: monkeypatch.setattr(DiskTier, "write", interrupted)


def test_a_file_written_behind_a_removal_elsewhere_goes_before_the_store_is_closed(
    over: Over, tmp_path: Path, removed_first: Callable[[], None]
) -> None:
    with over() as weave:
        weave.ingest(DRAIN, chunk_kv=False)
        (hit,) = weave.search("drain", 1)
        removed_first()
        weave.library.encoder.encode([hit.chunk])
    assert not list((tmp_path / "kb/kv/objects").rglob("*.kv"))


def test_a_chunk_removed_elsewhere_while_its_file_is_being_written_is_not_left_behind(
    over: Over, tmp_path: Path, removed_first: Callable[[], None]
) -> None:
    with over() as weave:
        weave.ingest(DRAIN, chunk_kv=False)
        (hit,) = weave.search("drain", 1)
        seen = weave.library.promotion
        assert seen is not None
        removed_first()
        now = weave.engine.tombstones.generation
        seen.saw(weave.library.encoder, [hit.chunk.token_ids], at_once={hit.chunk.id}, as_of=now)
        assert seen.wait(30)
        assert weave.library.store.flush()
        assert not weave.library.kb.documents()
        assert not in_host(weave, hit.chunk)
        assert not list((tmp_path / "kb/kv/objects").rglob("*.kv"))


def test_a_chunk_that_came_back_elsewhere_is_kept_in_memory_again(
    over: Over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over() as weave:
        fill(weave)
    with over() as weave:
        store = weave.library.store
        with KnowledgeBase.open(
            tmp_path / "kb", tokenizer=weave.runtime.tokenizer, embedder=WordEmbedder()
        ) as other:
            other.remove_documents([other.documents()[0].id])  # by one who knows of no KV
            weave.plan("Well?", documents=["A quota limits pods."])
            ingest(other, [DRAIN])
        with monkeypatch.context() as broken:

            def fail(*_: object) -> None:
                raise sqlite3.OperationalError("disk I/O error")

            broken.setattr(Catalogue, "existing", fail)
            weave.ask("How do I drain?", k=1, reuse="reuse", sampling=GREEDY)
            assert not store.metrics.value("kv_promotions_total"), "nobody can say"
            assert not store.metrics.value("kv_misses_total"), "it was answered from all the same"
        weave.ask("How do I drain?", k=1, reuse="reuse", sampling=GREEDY)
        wait_until(lambda: store.metrics.value("kv_promotions_total") == 1, "it is kept at hand")


def test_a_server_that_slept_too_long_to_be_told_what_went_forgets_what_is_not_there(
    over: Over, tmp_path: Path
) -> None:
    with over() as weave:
        chunk = fill(weave)
        weave.ingest(("Quota", "A quota limits the pods."), chunk_kv=True)
        quota = next(h.chunk for h in weave.search("quota limits", 2) if h.chunk.title == "Quota")
        assert history_has(weave, chunk)
        with KnowledgeBase.open(tmp_path / "kb") as kb:
            remove_with_kv(kb, [d.id for d in kb.documents() if d.title == "Drain"])
            assert kb.catalogue.removals.prune(keep_s=0)
        assert not history_has(weave, chunk)
        assert not in_tree(weave, chunk)
        assert not in_host(weave, chunk)
        assert in_host(weave, quota)
        weave.ask("Which quota?", k=1, reuse="reuse", sampling=GREEDY)
        weave.engine.run_alone(weave.engine.check_integrity)
        for _ in range(2):  # the same text from the caller is the caller's own
            weave.ask("Well?", documents=[chunk.text], reuse="prefix", sampling=GREEDY)
        assert in_tree(weave, chunk)


def test_nothing_is_remembered_of_knowledge_bases_that_were_deleted(
    chat_model_folder: Path, tmp_path: Path
) -> None:
    """A few hundred bytes each, for as long as the server ran."""
    decoder = load_decoder(chat_model_folder, device="cpu")
    runtime = ModelRuntime(decoder, Tokenizer(chat_model_folder), "tiny")
    with Weave(runtime) as whole:
        config = LibrariesConfig(root=tmp_path, embedder="words", kv=KVOptions("isolated"))
        libraries = Libraries(whole, config, open_embedder=lambda name: WordEmbedder())
        for number in range(3):
            libraries.ingest("", f"kb{number}", [TextSource(*DRAIN)])
            with libraries.use("", f"kb{number}") as weave:
                weave.ask("drain?", sampling=GREEDY)
        client = runtime.client
        assert len({*client.heard, *client._askers}) == 3
        for number in range(3):
            libraries.delete("", f"kb{number}")
        assert not client.heard
        assert not client._askers
        libraries.close()
