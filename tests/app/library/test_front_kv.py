"""Front copies: chunks that come first, or are likely to, stand there without being computed."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvweave import Weave
from kvweave.app.library.corpus_kv import FRONT_SHARE
from kvweave.app.library.front_kv import MOST_LOST, FrontKV
from kvweave.app.library.kv_maker import WantedKV
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import BackgroundKV
from kvweave.app.weave import Sampling
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Peek, Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk import DiskTier
from kvweave.types import Chunk, ChunkId
from worlds.made_kv import TEXTS, Model, chunks_of, model, opened
from worlds.tiny_corpus import make_text

GREEDY = Sampling(max_tokens=4)
MORE = [(f"More {i}", make_text(24, seed=20 + i)) for i in range(6)]
__all__ = ["model"]


def in_front(library: Library) -> set[str]:
    """Titles of chunks that have a front copy."""
    chunks = chunks_of(library)
    peeks = library.store.peek([library.encoder.exact_key(c.token_ids) for c in chunks.values()])
    there = zip(chunks, peeks, strict=True)
    return {title for title, peek in there if peek.residency is not Residency.ABSENT}


def num_in_front(weave: Weave) -> int:
    progress = weave.kv_progress()
    assert progress is not None
    return progress.chunks_in_front


def comes_true(holds: Callable[[], bool], within_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return holds()


def find(weave: Weave, *titles: str, times: int = 1) -> None:
    """Have questions find these chunks, all of them each time."""
    chunks = chunks_of(weave.library)
    for _ in range(times):
        weave.library.maker.note_question([chunks[title].id for title in titles])


def test_a_chunk_that_questions_found_gets_one_and_stands_first_exact(
    tmp_path: Path, model: Model
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        exact = weave.ask("How do I drain a node?", k=1, reuse="full", sampling=GREEDY)
        (hit,) = weave.search("How do I drain a node?", 1)
        find(weave, hit.chunk.title)
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert in_front(weave.library) == {hit.chunk.title}
        asked = weave.ask("How do I drain a node?", k=1, reuse="reuse", sampling=GREEDY)
        assert asked.explain is not None
        (front,) = asked.explain.chunks
        assert (front.state, front.recomputed) == ("reused", 0)
        assert asked.text == exact.text


def test_a_base_that_was_never_asked_is_computed_once_and_has_none(
    tmp_path: Path, model: Model
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert weave.library.store.metrics.value("kv_chunks_encoded_total") == len(TEXTS)
        assert in_front(weave.library) == set()


def test_those_made_ahead_take_a_bounded_share(tmp_path: Path, model: Model) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS, *MORE)
        find(weave, *chunks_of(weave.library))
        weave.library.start()
        assert weave.library.maker.wait(60)
        encoder = weave.library.encoder
        sizes = {
            title: encoder.plain_bytes(len(chunk.token_ids))
            for title, chunk in chunks_of(weave.library).items()
        }
        most = FRONT_SHARE * sum(sizes.values())
        taken = sum(sizes[title] for title in in_front(weave.library))
        assert most - max(sizes.values()) < taken <= most


def test_bytes_are_those_of_the_files_front_copies_too(tmp_path: Path, model: Model) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        find(weave, "Note 2")
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert weave.library.store.flush()
        progress = weave.kv_progress()
        assert progress is not None
        assert progress.chunks_in_front == 1
        files = [path.stat() for path in (tmp_path / "kb/kv").rglob("*.kv")]
        assert len(files) == len(TEXTS) + 1
        assert progress.num_bytes == sum(file.st_size for file in files)


def test_a_chunk_that_stood_in_front_is_copied_from_the_prompt_and_not_computed(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.runtime.client.pace.share = 0.0
        weave.ingest(*TEXTS)
        library = weave.library
        encoder, store = library.encoder, library.store
        monkeypatch.setattr(encoder, "encode", lambda *_, **__: None)
        monkeypatch.setattr(encoder, "encode_isolated", pytest.fail)
        with weave.runtime.client.answers.one():  # so that nothing is computed meanwhile
            weave.ask("How do I drain a node?", k=2, reuse="auto", sampling=GREEDY)
            assert comes_true(lambda: bool(in_front(library)))
        library.maker.close()
        monkeypatch.undo()
        (title,) = in_front(library)
        chunk = chunks_of(library)[title]
        key = encoder.exact_key(chunk.token_ids)
        taken = read_layers(store, key, encoder)
        store.delete([key])
        encoder.encode_isolated([chunk])
        assert store.flush()
        for ours, theirs in zip(taken, read_layers(store, key, encoder), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                step = 2 * b.abs().max() / 127  # of the codec
                assert (a - b).abs().max() <= step


def read_layers(store: KVStore, key: ChunkKey, encoder: ChunkEncoder) -> list[LayerKV]:
    """All layers of one stored chunk."""
    with store.acquire([key]) as lease:
        transfer = store.load(lease)
        num_layers = encoder.decoder.spec.num_layers
        return [transfer.wait_layer(layer)[key].decode() for layer in range(num_layers)]


def test_most_asked_first_and_only_once_all_chunks_have_kv(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        weave.ingest(*MORE)
        library, chunks = weave.library, chunks_of(weave.library)
        made: list[str] = []
        encode = library.encoder.encode_isolated

        def watched(some: list[Chunk], *args: object) -> None:
            keys = [library.encoder.key(chunk.token_ids) for chunk in chunks.values()]
            peeks = library.store.peek(keys)
            assert all(peek.residency is not Residency.ABSENT for peek in peeks)
            made.extend(library.kb.catalogue.chunks([c.id])[c.id].title for c in some)
            encode(some, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(library.encoder, "encode_isolated", watched)
        for title, times in (("Note 1", 1), ("Note 3", 3), ("Note 2", 2)):
            find(weave, title, times=times)
        library.start()
        assert library.maker.wait(60)
        assert made == ["Note 3", "Note 2", "Note 1"], "each once"


@pytest.mark.parametrize("bound", ["the tier's", "its own"])
def test_they_leave_room_for_as_much_again_and_then_give_way(
    tmp_path: Path, model: Model, bound: str
) -> None:
    folder = tmp_path / "kb"
    with opened(folder, model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS[:4])
        lengths = [len(c.token_ids) for c in chunks_of(weave.library).values()]
        size = max(map(weave.library.encoder.plain_bytes, lengths))
    room = 10 * size - size // 2  # four, as much again, one front copy; nine of their own later
    options = BackgroundKV() if bound == "the tier's" else BackgroundKV(room)
    disk_bytes = room if bound == "the tier's" else 1 << 30
    with opened(folder, model, options, disk_bytes=disk_bytes) as weave:
        library = weave.library
        find(weave, *chunks_of(library))
        library.start()
        assert library.maker.wait(60)
        assert num_in_front(weave) == len(in_front(library)) == 1
        weave.ingest(*TEXTS[4:], *MORE[:3])
        assert comes_true(lambda: weave.kv_progress()[1] == 9)  # type: ignore[index]
        assert library.maker.wait(60)
        progress = weave.kv_progress()
        assert progress is not None
        assert (progress.state, progress.chunks_in_front) == ("ready", 0)
        assert library.store.flush()
        assert in_front(library) == set(), "it went for a chunk's own KV"
        assert library.store.metrics.value("kv_evictions_total", tier="disk") == 0


def test_what_is_deleted_while_its_copy_is_in_the_making_leaves_none(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        library = weave.library
        documents = {d.title: d.id for d in library.kb.documents()}
        newest = chunks_of(library)["Note 5"]
        encode = library.encoder.encode_isolated

        def removing(some: list[Chunk], *args: object) -> None:
            if some[0].id == newest.id and library.kb.catalogue.existing([newest.id]):
                library.remove(documents["Note 5"])
            encode(some, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(library.encoder, "encode_isolated", removing)
        find(weave, "Note 5")
        library.start()
        assert comes_true(lambda: not library.kb.catalogue.existing([newest.id]))
        assert library.maker.wait(60)
        assert library.store.flush()
        assert not library.store.keys_at_hand(lambda of: of.chunk == newest.id)


def test_while_answers_are_made_what_questions_found_gets_one(tmp_path: Path, model: Model) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        library, answers = weave.library, weave.runtime.client.answers
        ended = threading.Event()

        def busy() -> None:
            with answers.one():
                ended.wait(60)

        beside = threading.Thread(target=busy)
        beside.start()
        try:
            library.start()
            assert comes_true(lambda: weave.kv_progress()[1] == len(TEXTS))  # type: ignore[index]
            find(weave, "Note 2")
            assert comes_true(lambda: num_in_front(weave) == 1)
            assert in_front(library) == {"Note 2"}
            weave.ingest(("Late", make_text(24, seed=9)))  # goes on with its share of the time
            assert comes_true(lambda: weave.kv_progress()[1] == len(TEXTS) + 1)  # type: ignore[index]
        finally:
            ended.set()
            beside.join()


def test_isolated_kv_needs_none(tmp_path: Path, model: Model) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV(), encoding="isolated") as weave:
        weave.ingest(*TEXTS)
        find(weave, "Note 2")
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert num_in_front(weave) == 0
        assert weave.library.store.metrics.value("kv_chunks_encoded_total") == len(TEXTS)


def test_one_that_is_half_made_when_answers_come_holds_nothing_up(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        library, answers = weave.library, weave.runtime.client.answers
        ended, is_busy, begun = threading.Event(), threading.Event(), threading.Event()

        def busy() -> None:
            with answers.one():
                is_busy.set()
                ended.wait(60)

        beside = threading.Thread(target=busy)
        encode = library.encoder.encode_isolated

        def begin_then_be_busy(some: list[Chunk], *args: object) -> None:
            if not begun.is_set():
                begun.set()
                beside.start()
                assert is_busy.wait(5)
            encode(some, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(library.encoder, "encode_isolated", begin_then_be_busy)
        find(weave, "Note 2")
        library.start()
        try:
            assert begun.wait(30)
            weave.ingest(("Late", make_text(24, seed=9)))
            assert comes_true(lambda: weave.kv_progress()[1] == len(TEXTS) + 1)  # type: ignore[index]
        finally:
            ended.set()
            beside.join()


def test_one_that_a_request_wanted_gives_way_too(tmp_path: Path, model: Model) -> None:
    folder = tmp_path / "kb"
    with opened(folder, model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS[:4])
        lengths = [len(c.token_ids) for c in chunks_of(weave.library).values()]
        size = max(map(weave.library.encoder.plain_bytes, lengths))
    with opened(folder, model, BackgroundKV(), disk_bytes=9 * size - size // 2) as weave:
        library = weave.library
        find(weave, *chunks_of(library))
        library.start()
        assert library.maker.wait(60)
        assert num_in_front(weave) == 0, "four more would not fit behind it"
        first = chunks_of(library)["Note 0"]
        library.maker.want(WantedKV(library.encoder, first, None, True))
        assert comes_true(lambda: num_in_front(weave) == 1)
        weave.ingest(*TEXTS[4:], *MORE[:2])
        assert comes_true(lambda: weave.kv_progress()[1] == 8)  # type: ignore[index]
        assert num_in_front(weave) == 0


def test_a_tier_that_others_share_gets_none(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "remote", True)
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        find(weave, "Note 2")
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert weave.library.store.metrics.value("kv_chunks_encoded_total") == len(TEXTS)
        assert num_in_front(weave) == 0


class OneTier:
    """A store that keeps what it is told to."""

    def __init__(self) -> None:
        self.has: set[bytes] = set()

    def peek(self, keys: list[bytes]) -> list[Peek]:
        here, gone = Peek(Residency.HERE, "disk", 10), Peek(Residency.ABSENT, None, None)
        return [here if key in self.has else gone for key in keys]

    def delete(self, keys: list[bytes]) -> None:
        self.has -= set(keys)


class NamedKV:
    """Names and sizes of chunk KV, and nothing else of an encoder."""

    def __init__(self) -> None:
        self.store = OneTier()
        self.has_neighbours = True

    def exact_key(self, ids: tuple[int, ...]) -> bytes:
        return b"front" + bytes(ids)

    def key(self, ids: tuple[int, ...]) -> bytes:
        return b"behind" + bytes(ids) if self.has_neighbours else self.exact_key(ids)

    def plain_bytes(self, _num_tokens: int) -> int:
        return 10


def fronts_of(num_chunks: int) -> tuple[Any, Any, list[Chunk]]:
    """Of some chunks that have KV; their encoder, and they."""
    encoder = NamedKV()
    chunks = [Chunk(ChunkId(f"c{i}"), f"t{i}", "", (i,)) for i in range(num_chunks)]
    known = {chunk.id: chunk for chunk in chunks}
    catalogue = SimpleNamespace(chunks=lambda ids: {i: known[i] for i in ids if i in known})
    kb: Any = SimpleNamespace(catalogue=catalogue)
    fronts: Any = FrontKV(kb, encoder, lambda: 1000)  # type: ignore[arg-type]
    fronts.add(chunks)
    return fronts, encoder, chunks


def test_the_most_asked_give_way_last_and_none_does_in_vain() -> None:
    fronts, encoder, _ = fronts_of(3)
    made = []
    while (chunk := fronts.next([ChunkId(name) for name in ("c1", "c0", "c2")])) is not None:
        encoder.store.has.add(encoder.exact_key(chunk.token_ids))
        fronts.done(chunk)
        made.append(chunk.id)
    assert made[0] == "c1"
    assert not fronts.give_way(1000)
    assert fronts.num_done() == len(encoder.store.has) == 3
    assert fronts.give_way(15)
    assert encoder.store.has == {encoder.exact_key((1,))}


def test_kv_that_became_isolated_is_no_front_copy() -> None:
    """Its last neighbour went: the copy is all the KV it has."""
    fronts, encoder, chunks = fronts_of(1)
    encoder.store.has.add(encoder.exact_key((0,)))
    fronts.add(chunks)
    assert fronts.num_done() == 1
    encoder.has_neighbours = False
    fronts.add(chunks)
    assert fronts.num_done() == 0
    assert not fronts.give_way(1)


def test_where_no_tier_keeps_them_it_stops() -> None:
    fronts, _, chunks = fronts_of(8)
    found = [chunk.id for chunk in chunks]
    made = 0
    while (chunk := fronts.next(found)) is not None:
        fronts.done(chunk)
        made += 1
    assert made == MOST_LOST
    assert fronts.nothing_left(found)
