"""Chunk KV of a removed document goes, however its removal ended: killed, too early, elsewhere."""

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvweave.app.library.kv_sync import remove_with_kv
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.stored_kv import StoredKV
from kvweave.config import StoreSettings
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.removals import Removals
from kvweave.ingest.pipeline import ingest
from kvweave.ingest.sources import TextSource
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds import killed_removal
from worlds.killing import kill_at
from worlds.syncs import watched_disk
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import library_over

Open = Callable[[str], AbstractContextManager[Library]]
ENCODINGS = ["isolated", "filler:1"]
WORDS = ["node", "pod", "volume"]


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu", dtype="float32")


@pytest.fixture
def opened(tmp_path: Path, chat_model_folder: Path, decoder: Decoder) -> Open:
    @contextmanager
    def opened(encoding: str) -> Iterator[Library]:
        folder, tokenizer = tmp_path / "kb", Tokenizer(chat_model_folder)
        kb = KnowledgeBase.open(
            folder, tokenizer=tokenizer, embedder=WordEmbedder(), chunk_tokens=64, create=True
        )
        options = KVOptions(encoding, store=StoreSettings(host_bytes=1 << 24))
        library = library_over(kb, decoder, tokenizer, options)
        try:
            library.repair()
            yield library
        finally:
            library.close()

    return opened


def source(word: str, name: str | None = None) -> TextSource:
    return TextSource(word, f"A {word} near another {word} has its own.", name or word)


def fill(library: Library) -> dict[str, Chunk]:
    """Documents with their KV on the disk; chunks by title."""
    library.ingest([source(word) for word in WORDS], chunk_kv=True)
    assert library.store.flush()
    found = [c for batch in library.kb.catalogue.all_chunks(64) for c in batch]
    assert len(objects(library)) >= len(WORDS)
    return {chunk.title: chunk for chunk in found}


def objects(library: Library) -> list[str]:
    return [p.name for p in (library.kb.folder / "kv" / "objects").rglob("*.kv")]


def has_kv(library: Library, chunk: Chunk) -> bool:
    """Of a chunk, in some tier or as a file."""
    encoder = library.encoder
    keys = [encoder.exact_key(chunk.token_ids), encoder.key(chunk.token_ids)]
    in_tier = any(p.residency is not Residency.ABSENT for p in library.store.peek(keys))
    return in_tier or any(key.hex() in name for key in keys for name in objects(library))


def document_of(library: Library, title: str) -> str:
    (found,) = [d.id for d in library.kb.documents() if d.title == title]
    return found


STEPS: dict[str, tuple[type, str]] = {
    "before KV is waited for": (StoredKV, "flush"),
    "before KV is looked for": (StoredKV, "of_chunks"),
    "before KV": (StoredKV, "delete"),
    "halfway through KV": (KVStore, "delete"),
    "before it is settled": (Removals, "settle_kv"),
}


def kill_while(act: Callable[[], object], step: str) -> None:
    kill_at(*STEPS[step], act, halfway=step == "halfway through KV")


def assert_only_pod_went(library: Library, chunks: dict[str, Chunk]) -> None:
    assert [title for title, chunk in chunks.items() if has_kv(library, chunk)] == [
        "node",
        "volume",
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("killed", STEPS)
def test_a_removal_that_was_killed_is_finished_at_the_next_open(
    opened: Open, encoding: str, killed: str
) -> None:
    with opened(encoding) as library:
        chunks = fill(library)
        document = document_of(library, "pod")
        kill_while(lambda: library.remove(document), killed)
    with opened(encoding) as library:  # repairs
        assert_only_pod_went(library, chunks)
        assert library.kv.sync().is_settled


def test_a_removal_killed_at_any_moment_leaves_no_kv_of_what_went(
    opened: Open, tmp_path: Path
) -> None:
    with opened("isolated") as library:
        chunks = fill(library)
        document = document_of(library, "pod")
    parts = random.Random(3).sample(range(1, 99), 10)
    for part in parts:
        shutil.copytree(tmp_path / "kb", tmp_path / str(part))
    script = Path(killed_removal.__file__)
    arguments = [tmp_path, document, *parts]
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    killed = [int(code) == -signal.SIGKILL for code in done.stdout.split()]
    assert sum(killed) >= len(parts) - 2  # a late one may find the work already done
    was_gone = set()
    for part in parts:
        shutil.rmtree(tmp_path / "kb")
        (tmp_path / str(part)).rename(tmp_path / "kb")
        with opened("isolated") as library:  # repairs
            is_gone = library.kb.totals().num_documents < len(WORDS)
            was_gone.add(is_gone)
            assert has_kv(library, chunks["pod"]) == (not is_gone)
            assert has_kv(library, chunks["node"])
    assert was_gone == {True, False}


@pytest.mark.parametrize("by", ["an ingest", "a removal", "a removal without a model"])
def test_whoever_writes_next_finishes_a_killed_removal(opened: Open, by: str) -> None:
    with opened("isolated") as library:
        chunks = fill(library)
        document, other = document_of(library, "pod"), document_of(library, "volume")
        kill_while(lambda: library.remove(document), "before KV")
        assert has_kv(library, chunks["pod"])
        if by == "an ingest":
            library.ingest([source("quota")], chunk_kv=False)
        elif by == "a removal":
            library.remove(other)
        else:
            with KnowledgeBase.open(library.kb.folder) as kb:
                remove_with_kv(kb, [kb.find(other)[0].id])
        key = library.encoder.exact_key(chunks["pod"].token_ids)
        assert not any(key.hex() in name for name in objects(library))
        assert has_kv(library, chunks["node"])


def test_an_ingest_killed_before_it_forgets_what_changed_is_made_good(opened: Open) -> None:
    with opened("isolated") as library:
        chunks = fill(library)
        changed = TextSource("pod", "A registry holds each image.", "pod")
        kill_while(lambda: library.ingest([changed], chunk_kv=True), "before KV")
        assert has_kv(library, chunks["pod"])
        library.repair()
        assert_only_pod_went(library, chunks)


def test_kv_that_lands_behind_its_own_deletion_is_found_the_next_time(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("isolated") as library:
        chunks = fill(library)
        key = library.encoder.exact_key(chunks["pod"].token_ids)
        (late,) = (library.kb.folder / "kv").rglob(f"{key.hex()}.kv")
        written = late.read_bytes()
        with monkeypatch.context() as slow:
            slow.setattr(KVStore, "flush", lambda *_: False)
            library.remove(document_of(library, "pod"))
            assert not library.kv.sync().is_settled
            library.repair()
            assert not library.kv.sync().is_settled, "still too slow: nobody knows"
        late.write_bytes(written)  # what was on its way lands now
        library.repair()
        assert_only_pod_went(library, chunks)
        assert library.kv.sync().is_settled


def test_a_chunk_that_came_back_before_the_repair_keeps_its_kv(opened: Open) -> None:
    with opened("isolated") as library:
        chunks = fill(library)
        document = document_of(library, "pod")
        kill_while(lambda: library.remove(document), "before KV")
        ingest(library.kb, [source("pod", "again")])  # by one who knows of no KV
        library.repair()
        assert all(has_kv(library, chunk) for chunk in chunks.values())
        assert library.kv.sync().is_settled


def test_kv_that_requests_brought_outlives_a_repair(opened: Open) -> None:
    with opened("isolated") as library:
        chunks = fill(library)
        ids = tuple(chunks["pod"].token_ids[::-1])
        brought = Chunk(make_chunk_id(ids), "", "", ids)  # no document has it
        library.encoder.encode([brought])
        assert library.store.flush()
        document = document_of(library, "pod")
        kill_while(lambda: library.remove(document), "before KV")
        library.repair()
        assert_only_pod_went(library, chunks)
        assert has_kv(library, brought)


def test_what_went_before_there_was_kv_costs_no_scan(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("isolated") as library:
        library.ingest([source("pod")], chunk_kv=False)
        library.kb.remove_documents([library.kb.documents()[0].id])
        library.ingest([source("node")], chunk_kv=True)
        assert library.kv.sync().is_settled
        assert library.store.flush()
        monkeypatch.setattr(StoredKV, "of_chunks", None)  # whoever scans fails
        library.repair()
        library.ingest([source("volume")], chunk_kv=True)


@pytest.mark.parametrize("is_open", [True, False], ids=["by a server", "without a model"])
def test_kv_of_a_removed_document_is_off_the_disk_for_good_before_that_is_noted(
    opened: Open, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """Else a power cut could bring the files back, and nobody would look for them again."""
    settle = Removals.settle_kv
    synced: list[set[Path]] = []

    def noted(self: Removals, generation: int) -> None:
        synced.append({path for word, path in events if word == "sync"})
        settle(self, generation)

    monkeypatch.setattr(Removals, "settle_kv", noted)
    with opened("isolated") as library:
        fill(library)
        document, folder = document_of(library, "pod"), library.kb.folder
        if is_open:
            with watched_disk() as events:
                library.remove(document)
    if not is_open:
        with KnowledgeBase.open(folder) as kb, watched_disk() as events:
            remove_with_kv(kb, [d.id for d in kb.find(document)])
    gone = {path.parent for word, path in events if word == "unlink" and path.suffix == ".kv"}
    assert gone
    assert len(synced) == 1
    assert gone <= synced[0]
