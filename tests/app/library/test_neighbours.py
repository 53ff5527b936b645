"""A knowledge base with chunk KV behind neighbours: ingest, ask, change, delete, be killed."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvweave.app.library.kv_sync import KVSync, remove_with_kv
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import CODEC, KVOptions
from kvweave.app.library.stored_kv import StoredKV
from kvweave.config import StoreSettings
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import ConfigError
from kvweave.fuse.encode.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.fuse.prefill import PromptFrame
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.request import PromptChunk, State
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.kv.format.header import parse_header
from kvweave.kv.format.keys import parse_key
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk_files import Quarantine
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, ChunkId
from worlds import killed_removal
from worlds.fuse import prefill_stored
from worlds.killing import kill_at
from worlds.permissions import closed_folder, plain_user
from worlds.running import Run, run  # noqa: F401  (a fixture)
from worlds.tiny_corpus import WordEmbedder
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import library_over

SIZE = 2
TEXTS = {
    "drain": "To drain a node, cordon the node and evict each pod on the node.",
    "cordon": "A cordon keeps a new pod off the node; drain the node later.",
    "evict": "To evict a pod from the node respects its budget.",
    "volume": "A volume claim binds a volume of its size.",
    "claim": "A claim for a volume waits until a volume of that size is there.",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def decoder(model_folder: Path) -> Decoder:
    return load_decoder(model_folder, device="cpu", dtype="float32")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / f"{name}.txt").write_text(text)
    return tmp_path / "docs"


Open = Callable[..., "contextmanager[Library]"]


@pytest.fixture
def opened(tmp_path: Path, model_folder: Path, decoder: Decoder) -> Open:
    @contextmanager
    def opened(
        encoding: str = f"neighbours:{SIZE}", index: str | None = None, codec: str = CODEC
    ) -> Iterator[Library]:
        folder, tokenizer = tmp_path / "kb", Tokenizer(model_folder)
        kb = KnowledgeBase.open(
            folder,
            tokenizer=tokenizer,
            embedder=WordEmbedder(),
            chunk_tokens=64,
            index=index,
            create=True,
        )
        library = library_over(
            kb, decoder, tokenizer, KVOptions(encoding, store=StoreSettings(codec=codec))
        )
        try:
            library.repair()
            yield library
        finally:
            library.close()

    return opened


def ingest(library: Library, docs: Path, **options: bool) -> None:
    """With the isolated KV that chunks get once they have stood in front."""
    library.ingest([docs], chunk_kv=True, **options)
    library.encoder.encode_isolated(list(chunks_of(library).values()))
    assert library.store.flush()


def chunks_of(library: Library) -> dict[str, Chunk]:
    found = [c for batch in library.kb.catalogue.all_chunks(64) for c in batch]
    return {chunk.title: chunk for chunk in found}


def entries_of(library: Library) -> dict[str, tuple[str, ...] | None]:
    """Titles of each chunk's neighbours."""
    chunks = chunks_of(library)
    titles = {chunk.id: title for title, chunk in chunks.items()}
    entries = {title: table_of(library).get(SIZE, chunk.id) for title, chunk in chunks.items()}
    return {
        title: None if entry is None else tuple(titles[each] for each in entry)
        for title, entry in entries.items()
    }


def table_of(library: Library) -> NeighbourTable:
    table = library.kv.table
    assert table is not None
    return table


def is_stored(library: Library, chunk: Chunk) -> bool:
    (peek,) = library.store.peek([library.encoder.key(chunk.token_ids)])
    return peek.residency is not Residency.ABSENT


def prefill(
    library: Library, decoder: Decoder, chunks: list[Chunk], strategy: str, ratio: float
) -> tuple[torch.Tensor, FuseRecord, list[int]]:
    encoder = library.encoder
    question = [5, 6, 7, 8]
    prompt = [
        PromptChunk(c.token_ids, encoder.key(c.token_ids), encoder.exact_key(c.token_ids))
        for c in chunks
    ]
    opened = open_strategy(strategy, ModelFacts(decoder.spec.num_layers))
    frame = PromptFrame(encoder.preamble, question)
    made = prefill_stored(decoder, library.store, prompt, frame, opened, ratio)
    ids = [*encoder.preamble_ids, *(i for c in chunks for i in c.token_ids), *question]
    return made.logits, made.record, ids


def kv_files(library_folder: Path) -> dict[Path, bytes]:
    """Everything below kv/ that could hold KV, quarantine and temporaries included."""
    files = [p for p in (library_folder / "kv").rglob("*") if p.is_file()]
    return {p: p.read_bytes() for p in files if "sqlite" not in p.name}


# ── encoding ─────────────────────────────────────────────────────────────────


def test_ingest_gives_every_chunk_its_nearest_others_and_kv_behind_them(
    opened: Open, docs: Path
) -> None:
    with opened() as library:
        ingest(library, docs)
        entries = entries_of(library)
        chunks = chunks_of(library)
        assert entries["drain"] is not None
        assert set(entries["drain"]) == {"cordon", "evict"}
        assert entries["claim"] is not None
        assert entries["claim"][0] == "volume"
        for title, others in entries.items():
            assert others is not None
            vectors = WordEmbedder().embed_passages([chunks[t].text for t in (title, *TEXTS)])
            nearness = dict(zip(TEXTS, (vectors[1:] @ vectors[0]).tolist(), strict=True))
            del nearness[title]
            assert list(others) == sorted(nearness, key=lambda t: -nearness[t])[:SIZE]
            assert is_stored(library, chunks[title])
            exact = library.encoder.exact_key(chunks[title].token_ids)
            assert library.store.peek([exact])[0].residency is not Residency.ABSENT


def test_nothing_is_embedded_or_computed_twice(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as library:
        ingest(library, docs)
        assert library.kb.embedder.num_embedded == len(TEXTS)  # type: ignore[attr-defined]

    def compute(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("kvweave.fuse.encode.neighbour_encoder.encode_chunks", compute)
    with opened() as library:
        ingest(library, docs)
        assert library.kb.embedder.num_embedded == 0  # type: ignore[attr-defined]


def test_an_interrupted_second_pass_goes_on_where_it_stopped(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.app.library.neighbours.BATCH", 2)
    encode = NeighbourEncoder.encode
    computed: list[int] = []

    def interrupted(self: NeighbourEncoder, *args: object) -> int:
        if sum(computed) >= 2:
            raise KeyboardInterrupt
        computed.append(encode(self, *args))  # type: ignore[arg-type]
        return computed[-1]

    monkeypatch.setattr(NeighbourEncoder, "encode", interrupted)
    with opened() as library, pytest.raises(KeyboardInterrupt):
        ingest(library, docs)
    with opened() as library:
        before = entries_of(library)
        assert 0 < sum(entry is not None for entry in before.values()) < len(TEXTS)
        stored = [is_stored(library, chunk) for chunk in chunks_of(library).values()]
        assert sum(stored) == 2
        monkeypatch.setattr(
            NeighbourEncoder, "encode", lambda *args: computed.append(encode(*args)) or computed[-1]
        )
        ingest(library, docs)
        assert sum(computed) == len(TEXTS)
        assert all(is_stored(library, chunk) for chunk in chunks_of(library).values())
        now = entries_of(library)
        assert all(now[title] == entry for title, entry in before.items() if entry is not None)


def test_a_second_model_takes_the_same_neighbours(opened: Open, docs: Path, tmp_path: Path) -> None:
    with opened() as library:
        ingest(library, docs)
        entries = entries_of(library)
        other = load_decoder(
            make_chat_model_folder(tmp_path / "other", seed=1, max_position_embeddings=2048),
            device="cpu",
            dtype="float32",
        )
        tokenizer = Tokenizer(tmp_path / "other" / "llama")
        encoding = str(library.encoder.preparation.variant)
        second = library_over(library.kb, other, tokenizer, KVOptions(encoding))
        encoder = second.encoder
        ingest(second, docs)
        assert entries_of(second) == entries
        for chunk in chunks_of(library).values():
            assert library.encoder.key(chunk.token_ids) != encoder.key(chunk.token_ids)
            assert is_stored(library, chunk)
            assert is_stored(second, chunk)


def test_the_chunk_itself_and_its_copies_leave_their_places_to_others(
    opened: Open, docs: Path
) -> None:
    for number in range(6):  # more than the first search brings
        (docs / f"copy{number}.txt").write_text(TEXTS["drain"])
    with opened() as library:
        ingest(library, docs)
        entries = entries_of(library)
        assert entries["drain"] is not None
        assert set(entries["drain"]) == {"cordon", "evict"}
        assert entries["cordon"] is not None
        others = [title for title in entries["cordon"] if title not in TEXTS]
        assert len(others) + ("drain" in entries["cordon"]) == 1  # once, under some name


@pytest.mark.parametrize("num_texts", [1, 2])
def test_fewer_chunks_than_neighbours_is_fine(
    opened: Open, docs: Path, num_texts: int, decoder: Decoder
) -> None:
    for name in list(TEXTS)[num_texts:]:
        (docs / f"{name}.txt").unlink()
    with opened() as library:
        ingest(library, docs)
        entries = entries_of(library)
        assert all(e is not None and len(e) == num_texts - 1 for e in entries.values())
        chunks = list(chunks_of(library).values())
        assert all(is_stored(library, chunk) for chunk in chunks)
        _, record, _ = prefill(library, decoder, chunks, "reuse", 0.0)
        assert State.COMPUTED not in {chunk.state for chunk in record.chunks}


@pytest.mark.filterwarnings("ignore:Local mode performs exact")
def test_a_qdrant_index_finds_the_same_neighbours(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qdrant_client import QdrantClient

    client = QdrantClient(":memory:", force_disable_check_same_thread=True)
    monkeypatch.setattr("qdrant_client.QdrantClient", lambda **_: client)
    with opened() as library:
        ingest(library, docs)
        local = entries_of(library)
        table_of(library).drop([chunk.id for chunk in chunks_of(library).values()])
    with opened(index="qdrant://vectors.example:6333/notes") as library:
        ingest(library, docs)
        assert library.kb._index.kind == "qdrant"
        assert entries_of(library) == local
        library.remove(str(docs / "evict.txt"))
        (docs / "evict.txt").unlink()
        ingest(library, docs)
        assert all(e is not None and "evict" not in e for e in entries_of(library).values())


# ── asking ───────────────────────────────────────────────────────────────────


def test_ratio_one_over_kv_behind_neighbours_is_full_prefill(
    opened: Open, docs: Path, decoder: Decoder
) -> None:
    with opened() as library:
        ingest(library, docs)
        chunks = list(chunks_of(library).values())
        logits, record, ids = prefill(library, decoder, chunks, "random", 1.0)
        assert State.COMPUTED not in {chunk.state for chunk in record.chunks}
        want = decoder.forward([Rows(ids, range(len(ids)), decoder.new_kv(1), [len(ids) - 1])])[0]
        # the first chunk is taken as it is stored, which is exact up to the rounding of its codec
        torch.testing.assert_close(logits, want, atol=5e-2, rtol=5e-2)
        _, alone, _ = prefill(library, decoder, chunks, "reuse", 0.0)
        assert [c.state for c in alone.chunks] == [State.REUSED] * 5, "int8 is not exact"


def test_ratio_one_is_full_prefill_to_the_last_bit_that_floats_have(
    opened: Open, docs: Path, decoder: Decoder
) -> None:
    with opened(codec="raw") as library:
        ingest(library, docs)
        chunks = list(chunks_of(library).values())
        for strategy in ("random", "epic", "cacheblend", "fusionrag", "weave"):
            logits, record, ids = prefill(library, decoder, chunks, strategy, 1.0)
            kv = decoder.new_kv(1)
            want = decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])[0]
            assert record.counts["recomputed"] > 0
            assert record.chunks[0].state is State.EXACT
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


def test_a_chunk_without_an_entry_is_computed(opened: Open, docs: Path, decoder: Decoder) -> None:
    with opened() as library:
        ingest(library, docs)
        chunks = chunks_of(library)
        table_of(library).drop([chunks["evict"].id])
        asked = [chunks["drain"], chunks["evict"], chunks["claim"]]
        _, record, _ = prefill(library, decoder, asked, "reuse", 0.0)
        states = [chunk.state for chunk in record.chunks]
        assert states == [State.REUSED, State.COMPUTED, State.REUSED]


def test_an_answer_over_neighbours_comes_from_the_store(
    opened: Open, docs: Path, decoder: Decoder
) -> None:
    with opened() as library:
        ingest(library, docs)
    with opened() as library:  # from the disk
        chunks = chunks_of(library)
        asked = [chunks["claim"], chunks["drain"]]
        _, record, _ = prefill(library, decoder, asked, "reuse", 0.0)
        assert [chunk.tier for chunk in record.chunks] == ["disk", "disk"]


# ── documents that go, change and come ───────────────────────────────────────


def bytes_that_saw(library: Library, title: str) -> list[bytes]:
    """Part of the last layer of each object that carries a chunk's text, its own included."""
    chunks = chunks_of(library)
    encoder = library.encoder
    ids = chunks[title].token_ids
    keys = [encoder.exact_key(ids), encoder.key(ids), encoder.filled_key(ids)]
    users = [t for t, entry in entries_of(library).items() if entry and title in entry]
    assert users
    keys += [encoder.key(chunks[user].token_ids) for user in users]
    found = []
    for path, data in kv_files(library.kb.folder).items():
        key = parse_key(path.stem)
        if key in keys:
            section = parse_header(memoryview(data), key, len(data)).layers[-1]
            found.append(data[section.offset :][: min(section.size_bytes, 256)])
    assert len(found) == len(keys)
    return found


def assert_forgotten(library: Library, title: str, saw: list[bytes], gone: ChunkId) -> None:
    for path, data in kv_files(library.kb.folder).items():
        assert not any(part in data for part in saw), f"{path} still has KV that saw {title}"
    assert gone not in table_of(library).mentioned_chunks()


STEPS = {
    "before anything of KV is touched": (KVSync, "forget"),
    "before the entries are dropped": (NeighbourTable, "drop"),
    "before KV is deleted": (StoredKV, "delete"),
    "halfway through KV": (KVStore, "delete"),
    "before it is settled": (NeighbourTable, "settle"),
}


def test_a_removal_beside_writes_that_never_end_is_not_settled(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"]
        saw = bytes_that_saw(library, "evict")
        (late,) = [path for path, data in kv_files(library.kb.folder).items() if saw[0] in data]
        written = late.read_bytes()
        with monkeypatch.context() as slow:
            slow.setattr(KVStore, "flush", lambda *_: False)
            library.remove(str(docs / "evict.txt"))
        assert "too slow" in caplog.text
        late.write_bytes(written)  # what was on its way lands now
        library.repair()
        assert_forgotten(library, "evict", saw, gone.id)


@pytest.mark.parametrize("killed", [None, *STEPS])
def test_a_removed_document_leaves_no_byte_of_kv_that_saw_it(
    opened: Open, docs: Path, killed: str | None
) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"].id
        saw = bytes_that_saw(library, "evict")
        spared = {t for t, e in entries_of(library).items() if e and "evict" not in e} - {"evict"}
        if killed is None:
            library.remove(str(docs / "evict.txt"))
        else:
            kill_at(
                *STEPS[killed],
                lambda: library.remove(str(docs / "evict.txt")),
                halfway=killed == "halfway through KV",
            )
            # still open, as a server would be: what saw the deleted chunk is not served
            for title, chunk in chunks_of(library).items():
                assert is_stored(library, chunk) == (title in spared)
    with opened() as library:  # repairs
        assert_forgotten(library, "evict", saw, gone)
        chunks = chunks_of(library)
        assert spared
        assert all(is_stored(library, chunks[title]) for title in spared)
        (docs / "evict.txt").unlink()
        ingest(library, docs)
        entries = entries_of(library)
        assert all(e is not None and "evict" not in e for e in entries.values())
        assert all(is_stored(library, chunk) for chunk in chunks.values())


def test_a_removal_killed_at_any_moment_removes_all_or_nothing(
    opened: Open, docs: Path, tmp_path: Path
) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"].id
        saw = bytes_that_saw(library, "evict")
    parts = random.Random(7).sample(range(1, 99), 12)
    for part in parts:
        shutil.copytree(tmp_path / "kb", tmp_path / str(part))
    script = Path(killed_removal.__file__)
    arguments = [tmp_path, docs / "evict.txt", *parts]
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
        with opened() as library:  # repairs
            chunks = chunks_of(library)
            was_gone.add("evict" not in chunks)
            if "evict" not in chunks:
                assert_forgotten(library, "evict", saw, gone)
            else:
                assert all(is_stored(library, chunk) for chunk in chunks.values())
    assert was_gone == {True, False}


def test_kv_in_host_memory_goes_too(opened: Open, docs: Path, decoder: Decoder) -> None:
    with opened() as library:
        ingest(library, docs)
        chunks = chunks_of(library)
        prefill(library, decoder, list(chunks.values()), "reuse", 0.0)
        users = [t for t, e in entries_of(library).items() if e and "evict" in e]
        keys = [library.encoder.key(chunks[title].token_ids) for title in users]
        assert all(peek.tier == "host" for peek in library.store.peek(keys))
        library.remove(str(docs / "evict.txt"))
        assert all(peek.residency is Residency.ABSENT for peek in library.store.peek(keys))


@contextmanager
def unusable(objects: Path, how: str) -> Iterator[None]:
    if how == "closed":
        with plain_user(), closed_folder(objects):
            yield
    else:
        shutil.rmtree(objects)
        objects.write_text("in the way")
        yield


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("how", ["a file", "closed"])
@pytest.mark.parametrize("encoding", ["isolated", "filler:1", f"neighbours:{SIZE}"])
def test_kv_goes_from_memory_where_the_disk_tier_cannot_be_used(
    opened: Open,
    docs: Path,
    tmp_path: Path,
    encoding: str,
    how: str,
    killed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened(encoding):
        pass
    objects = tmp_path / "kb" / "kv" / "objects"
    with unusable(objects, how), opened(encoding) as library:
        assert "give a folder this user can read and write" in caplog.text
        ingest(library, docs)
        encoder, chunks = library.encoder, chunks_of(library)
        evict = chunks["evict"].token_ids
        keys = {encoder.exact_key(evict), encoder.key(evict)}
        if library.kv.table is not None:
            keys.add(encoder.filled_key(evict))
            users = [t for t, e in entries_of(library).items() if e and "evict" in e]
            keys |= {encoder.key(chunks[user].token_ids) for user in users}
        spared = encoder.exact_key(chunks["volume"].token_ids)
        peeks = library.store.peek([*keys, spared])
        assert all(peek.residency is not Residency.ABSENT for peek in peeks)
        if killed:
            kill_at(KVSync, "forget", lambda: library.remove(str(docs / "evict.txt")))
            library.repair()
        else:
            library.remove(str(docs / "evict.txt"))
        *gone, left = library.store.peek([*keys, spared])
        assert all(peek.residency is Residency.ABSENT for peek in gone)
        assert left.residency is not Residency.ABSENT


def test_damaged_and_half_written_kv_goes_with_the_next_document_that_goes(
    opened: Open, docs: Path
) -> None:
    with opened() as library:
        ingest(library, docs)
        folder = library.kb.folder / "kv"
        key = library.encoder.key(chunks_of(library)["drain"].token_ids)
        (victim,) = (p for p in kv_files(library.kb.folder) if key.hex() in p.name)
    whole = victim.read_bytes()
    last = parse_header(memoryview(whole), key, len(whole)).layers[-1]
    part = whole[last.offset :][:256]
    victim.write_bytes(whole[:40] + b"?" + whole[41:])
    (folder / "quarantine").mkdir(exist_ok=True)
    (folder / "quarantine" / f"{key.hex()}.1.kv").write_bytes(whole)
    (folder / "tmp" / "dead.tmp").write_bytes(whole)
    with KnowledgeBase.open(library.kb.folder) as kb:
        remove_with_kv(kb, [kb.find(str(docs / "evict.txt"))[0].id])
    assert not any(part in data for data in kv_files(library.kb.folder).values())


def test_a_removal_waits_for_no_disk_that_hangs_and_is_made_good_later(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lay in quarantine was deleted on the thread of the request, however long that took."""
    monkeypatch.setattr("kvweave.kv.removal.DELETE_S", 0.2)
    go_on, real = threading.Event(), Quarantine.clear

    def clear(self: Quarantine) -> int:
        assert go_on.wait(60)
        return real(self)

    with opened() as library:
        ingest(library, docs)
        folder = library.kb.folder / "kv"
        evict = chunks_of(library)["evict"]
        key = library.encoder.key(evict.token_ids)
        (folder / "quarantine").mkdir()
        (folder / "quarantine" / f"{key.hex()}.1.kv").write_bytes(b"damaged")
        monkeypatch.setattr(Quarantine, "clear", clear)
        began_s = time.monotonic()
        library.remove(str(docs / "evict.txt"))
        assert time.monotonic() - began_s < 30, "nobody else waits"
        assert "evict" not in chunks_of(library)
        assert library.store.metrics.value("kv_tier_errors_total", verb="remove") == 1
        go_on.set()
        library.repair()
        assert library.kv.sync().is_settled
        assert not any(key.hex() in path.name for path in folder.rglob("*.kv"))


def test_a_changed_document_leaves_no_kv_of_its_old_text_and_new_neighbours_are_found(
    opened: Open, docs: Path
) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"].id
        saw = bytes_that_saw(library, "evict")
        (docs / "evict.txt").write_text("A registry holds each image.")
        ingest(library, docs)  # the same run that forgets gives new neighbours
        assert_forgotten(library, "evict", saw, gone)
        assert all(entry is not None for entry in entries_of(library).values())
        assert all(is_stored(library, chunk) for chunk in chunks_of(library).values())


def test_an_ingest_killed_before_it_forgets_is_repaired_at_the_next_open(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"].id
        saw = bytes_that_saw(library, "evict")
        (docs / "evict.txt").write_text("A registry holds each image.")

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(library.encoder, "missing", die)  # documents are committed by then
            with pytest.raises(KeyboardInterrupt):
                ingest(library, docs)
        assert gone in table_of(library).mentioned_chunks()
    with opened() as library:
        assert_forgotten(library, "evict", saw, gone)


def test_while_another_writes_an_open_leaves_the_repair_to_it(opened: Open, docs: Path) -> None:
    with opened() as library:
        ingest(library, docs)
        table_of(library).settle("another state")
        with library.kb.writing():
            library.repair()
        assert table_of(library).settled_state() == "another state"
        library.repair()
        assert table_of(library).settled_state() != "another state"
        assert all(is_stored(library, chunk) for chunk in chunks_of(library).values())


def test_an_ingest_without_kv_forgets_too(opened: Open, docs: Path) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"].id
        saw = bytes_that_saw(library, "evict")
        (docs / "evict.txt").write_text("A registry holds each image.")
        library.ingest([docs], chunk_kv=False)
        assert_forgotten(library, "evict", saw, gone)
        assert entries_of(library)["evict"] is None


def test_another_encoding_still_forgets_kv_behind_neighbours(opened: Open, docs: Path) -> None:
    with opened() as library:
        ingest(library, docs)
        gone = chunks_of(library)["evict"].id
        saw = bytes_that_saw(library, "evict")
    with opened("isolated") as library:
        library.remove(str(docs / "evict.txt"))
        assert_forgotten(library, "evict", saw, gone)


def test_what_another_process_removed_is_not_served_from_memory(opened: Open, docs: Path) -> None:
    with opened() as library:
        ingest(library, docs)
        chunks = chunks_of(library)
        users = [t for t, e in entries_of(library).items() if e and "evict" in e]
        with KnowledgeBase.open(library.kb.folder) as other:  # it does not even know of KV
            other.remove(str(docs / "evict.txt"))
        assert not any(is_stored(library, chunks[title]) for title in users)


def test_documents_that_come_later_change_old_neighbours_only_when_asked(
    opened: Open, docs: Path
) -> None:
    with opened() as library:
        ingest(library, docs)
        before = entries_of(library)
        old_key = library.encoder.key(chunks_of(library)["drain"].token_ids)
        (docs / "again.txt").write_text(TEXTS["drain"].replace("each pod", "every pod"))
        ingest(library, docs)
        now = entries_of(library)
        assert {title: now[title] for title in before} == before
        assert now["again"] is not None
        assert now["again"][0] == "drain"
        untouched = library.encoder.key(chunks_of(library)["claim"].token_ids)
        ingest(library, docs, refresh_neighbours=True)
        fresh = entries_of(library)
        assert fresh["drain"] is not None
        assert fresh["drain"][0] == "again"
        assert all(is_stored(library, chunk) for chunk in chunks_of(library).values())
        assert not any(old_key.hex() in p.name for p in kv_files(library.kb.folder))
        assert library.encoder.key(chunks_of(library)["claim"].token_ids) == untouched


def test_a_refresh_that_is_interrupted_leaves_a_miss_and_is_done_by_the_next(
    opened: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as library:
        ingest(library, docs)
        (docs / "again.txt").write_text(TEXTS["drain"].replace("each pod", "every pod"))
        ingest(library, docs)

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        drop = NeighbourTable.drop
        with monkeypatch.context() as patch:
            patch.setattr(
                NeighbourTable, "drop", lambda self, ids, *size: (die if size else drop)(self, ids)
            )
            with pytest.raises(KeyboardInterrupt):
                ingest(library, docs, refresh_neighbours=True)
        assert not is_stored(library, chunks_of(library)["drain"])
    with opened() as library:
        ingest(library, docs, refresh_neighbours=True)
        drain = entries_of(library)["drain"]
        assert drain is not None
        assert drain[0] == "again"
        assert is_stored(library, chunks_of(library)["drain"])


# ── refusals and the command line ────────────────────────────────────────────


def test_more_neighbours_than_positions_are_refused_before_any_work(
    opened: Open, docs: Path
) -> None:
    with opened("neighbours:40") as library:
        with pytest.raises(
            ConfigError, match=r"neighbours:40 and chunks of 64 tokens do not fit .* or less"
        ):
            library.ingest([docs], chunk_kv=True)
        assert library.kb.totals().num_documents == 0


def test_only_neighbours_can_be_refreshed(opened: Open, docs: Path) -> None:
    with opened("isolated") as library, pytest.raises(ConfigError, match="encoding neighbours:"):
        library.ingest([docs], chunk_kv=True, refresh_neighbours=True)


def test_the_command_line_encodes_asks_refreshes_and_removes(
    run: Run,  # noqa: F811
    tmp_path: Path,
    docs: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("ingest", "docs"):
        monkeypatch.setattr(f"kvweave.cli.{module}.find_embedder", lambda *_: WordEmbedder())
    monkeypatch.setattr(
        "kvweave.app.library.library.SentenceEmbedder", lambda *_, **__: WordEmbedder()
    )
    monkeypatch.setattr("kvweave.app.library.library.locate", Path)
    where = ["--kb", tmp_path / "kb"]
    ingest = ["ingest", docs, *where, "--model", model_folder, "--chunk-tokens", "64"]
    refused = run(*ingest, "--refresh-neighbours")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "add --kv" in refused.err
    done = run(*ingest, "--kv", "--encoding", f"neighbours:{SIZE}")
    assert done.code == 0, done.err
    ask = ["ask", "How do I drain a node?", *where, "--model", model_folder, "--max-tokens", "2"]
    asked = run(*ask, "--reuse", "reuse", "--json", "--chunks", "4")
    assert asked.code == 0, asked.err
    explain = json.loads(asked.out)["explain"]
    assert explain["encoding"] == f"neighbours:{SIZE}"
    assert [chunk["state"] for chunk in explain["chunks"]] == ["computed", *["reused"] * 3]
    assert run(*ingest, "--kv", "--refresh-neighbours").code == 0  # the encoding is remembered
    removed = run("docs", "rm", docs / "evict.txt", *where)
    assert removed.code == 0, removed.err
    asked = run(*ask, "--reuse", "reuse", "--json", "--chunks", "4")
    states = [chunk["state"] for chunk in json.loads(asked.out)["explain"]["chunks"]]
    assert "computed" in states
    (docs / "evict.txt").unlink()
    assert run(*ingest, "--kv").code == 0
    asked = run(*ask, "--reuse", "reuse", "--json", "--chunks", "4")
    states = [chunk["state"] for chunk in json.loads(asked.out)["explain"]["chunks"]]
    # reused where an earlier process made isolated KV of the chunk in front before it ended
    assert states[0] in {"computed", "reused"}
    assert states[1:] == ["reused"] * 3
