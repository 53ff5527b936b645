"""Chunk KV appears by itself: asked for first, beside answers, over kills and deletions."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.app.library import corpus_kv, kv_maker
from kvweave.app.library.kv_progress import KVProgress, progress_on_disk
from kvweave.app.library.kv_sync import remove_with_kv
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import BackgroundKV
from kvweave.app.weave import Sampling
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.background import (
    SLICE_S,
    ActiveAnswers,
    BackgroundPace,
    BackgroundTurn,
    GaveUp,
)
from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey, ChunkTag
from kvweave.kv.lookup import Residency
from kvweave.kv.tiers.disk import DiskTier
from kvweave.kv.tiers.host import HostTier
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds import killed_maker
from worlds.made_kv import TEXTS, Model, chunks_of, model, opened
from worlds.tiny_corpus import make_text

GREEDY = Sampling(max_tokens=4)
__all__ = ["model"]


@pytest.fixture
def weave(tmp_path: Path, model: Model) -> Iterator[Weave]:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        yield weave


def test_nothing_is_made_that_no_answer_would_use(tmp_path: Path, model: Model) -> None:
    """The tiny model was never calibrated: with a bound nothing is made, without one all is."""
    with opened(tmp_path / "kb", model, BackgroundKV(bound=0.02)) as weave:
        weave.ingest(*TEXTS)
        library = weave.library
        library.start()
        while not progress_of(weave).why:
            time.sleep(0.01)
        progress = progress_of(weave)
        assert (progress.state, progress.chunks_done) == ("unused", 0)
        assert progress.why == "the model is not calibrated, so nothing would be fused"
        assert library.maker.wait(10.0)
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.library.start()
        assert weave.library.maker.wait(60.0)
        assert progress_of(weave).state == "ready"


def progress_of(weave: Weave) -> KVProgress:
    progress = weave.kv_progress()
    assert progress is not None
    return progress


def has_kv(library: Library, chunk: Chunk) -> bool:
    (peek,) = library.store.peek([library.encoder.key(chunk.token_ids)])
    return peek.residency is not Residency.ABSENT


def objects(folder: Path) -> list[Path]:
    return list((folder / "kv/objects").rglob("*.kv"))


def order_made(library: Library, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of chunks as they are encoded, from now on."""
    made: list[str] = []
    encode = library.encoder.encode
    titles = {chunk.id: title for title, chunk in chunks_of(library).items()}

    def watched(chunks: list[Chunk], *args: object, **kwargs: object) -> None:
        made.extend(titles[chunk.id] for chunk in chunks)
        encode(chunks, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(library.encoder, "encode", watched)
    return made


def test_an_ingest_returns_before_its_kv_which_then_appears_by_itself(weave: Weave) -> None:
    library, chunks = weave.library, chunks_of(weave.library)
    assert len(weave.search("drain a node", 3)) == 3, "text and vectors are there at once"
    before = progress_of(weave)
    assert before == KVProgress("making", 0, len(chunks), 0)
    library.start()
    assert library.maker.wait(60)
    assert all(has_kv(library, chunk) for chunk in chunks.values())
    done = progress_of(weave)
    assert (done.state, done.chunks_done, done.chunks_total) == ("ready", len(chunks), len(chunks))
    files = [path.stat().st_size for path in objects(library.kb.folder)]
    assert len(files) == len(chunks), "one each: which stands in front is not known yet"
    assert done.num_bytes == sum(files)
    assert progress_on_disk(library.kb) == done, "as one sees it who has no model"


def test_a_gpu_makes_several_chunks_in_one_pass_and_one_that_fails_leaves_the_others(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, chunks = weave.library, chunks_of(weave.library)
    monkeypatch.setattr(corpus_kv.CorpusKV, "_is_one_at_a_time", False)
    bad, encode = next(iter(chunks.values())), library.encoder.encode
    runs: list[int] = []

    def fail_for_one(run: list[Chunk], *args: object, **kwargs: object) -> None:
        runs.append(len(run))
        if any(chunk.id == bad.id for chunk in run):
            raise RuntimeError("no such kernel")
        encode(run, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(library.encoder, "encode", fail_for_one)
    library.start()
    assert library.maker.wait(60)
    assert sorted(runs) == [1, 1, 1, 3, 3], "as many as fit; those of the failed run one by one"
    assert [has_kv(library, chunk) for chunk in chunks.values()].count(False) == 1
    progress = progress_of(weave)
    assert progress.state == "failed"
    assert progress.why == f"chunk {bad.id[:8]}: RuntimeError: no such kernel"


def test_what_comes_later_is_made_too_and_answers_are_fused_from_it(weave: Weave) -> None:
    library = weave.library
    library.start()
    assert library.maker.wait(60)
    weave.ingest(("Late", make_text(24, seed=9)))
    deadline = time.monotonic() + 60
    while progress_of(weave).chunks_done < len(TEXTS) + 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert library.maker.wait(60)
    assert progress_of(weave)[:2] == ("ready", len(TEXTS) + 1)
    (first,) = weave.search("How do I drain a node?", 1)
    library.maker.note_question([first.chunk.id])
    assert library.maker.wait(60)
    answer = weave.ask("How do I drain a node?", k=3, reuse="reuse", sampling=GREEDY)
    assert answer.explain is not None
    assert [chunk.tier for chunk in answer.explain.chunks] == ["host", "host", "host"]
    assert answer.explain.chunks[0].recomputed == 0, "it is exact in front"


def test_without_a_front_copy_a_chunk_is_found_the_second_time_it_stands_in_front(
    weave: Weave, model: Model
) -> None:
    library = weave.library
    library.start()
    assert library.maker.wait(60)
    asked = {"k": 3, "reuse": "reuse", "sampling": GREEDY}
    first = weave.ask("How do I drain a node?", **asked)  # type: ignore[arg-type]
    assert first.explain is not None
    assert first.explain.chunks[0].state == "computed"
    assert library.maker.wait(60)
    assert library.store.flush()
    weave.close()
    with opened(library.kb.folder, model, None) as again:  # another process, an empty tree
        second = again.ask("How do I drain a node?", **asked)  # type: ignore[arg-type]
        assert second.explain is not None
        assert [c.state for c in second.explain.chunks] == ["reused"] * 3
        assert second.text == first.text


def test_chunks_that_questions_found_come_first_then_the_newest(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, chunks = weave.library, chunks_of(weave.library)
    made = order_made(library, monkeypatch)
    for title, times in (("Note 1", 1), ("Note 3", 3), ("Note 2", 2)):
        for _ in range(times):
            library.maker.note_question([chunks[title].id])
    library.start()
    assert library.maker.wait(60)
    assert made == ["Note 3", "Note 2", "Note 1", "Note 5", "Note 4", "Note 0"]


def test_a_question_tells_the_maker_what_it_found(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = weave.library
    hits = weave.search("drain a node", 2)
    weave.ask("drain a node", k=2, reuse="prefix", sampling=GREEDY)
    made = order_made(library, monkeypatch)
    library.start()
    assert library.maker.wait(60)
    assert set(made[:2]) == {hit.chunk.title for hit in hits}


def test_a_maker_that_is_stopped_half_way_is_gone_on_with_by_the_next(
    tmp_path: Path, model: Model
) -> None:
    folder = tmp_path / "kb"
    with opened(folder, model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        library, encode = weave.library, weave.library.encoder.encode
        stopped, calls = threading.Event(), 0

        def slow(*args: object, **kwargs: object) -> None:
            nonlocal calls
            calls += 1
            if calls > 2:
                stopped.set()
                raise GaveUp
            encode(*args, **kwargs)  # type: ignore[arg-type]

        library.encoder.encode = slow  # type: ignore[method-assign]
        library.start()
        assert stopped.wait(60)
    assert len(objects(folder)) == 2
    with opened(folder, model, BackgroundKV()) as weave:
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert progress_of(weave).state == "ready"
        encoded = weave.library.store.metrics.value("kv_chunks_encoded_total")
        assert encoded == len(TEXTS) - 2, "what was there is not made again"


def test_a_maker_killed_at_a_write_leaves_whole_objects_and_the_next_one_goes_on(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    folder = tmp_path / "kb"
    small = load_decoder(chat_model_folder, device="cpu"), Tokenizer(chat_model_folder)
    with opened(folder, small, None, encoding="isolated") as weave:
        weave.ingest(*TEXTS)
    script = [sys.executable, killed_maker.__file__, folder, chat_model_folder, "2"]
    path = [str(Path(killed_maker.__file__).parents[1]), os.environ["PYTHONPATH"]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    killed = subprocess.run(script, env=env, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(objects(folder)) == 2
    with opened(folder, small, BackgroundKV(), encoding="isolated") as weave:
        assert progress_of(weave).state == "making"
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert progress_of(weave)[:3] == ("ready", len(TEXTS), len(TEXTS))
        encoded = weave.library.store.metrics.value("kv_chunks_encoded_total")
        assert encoded == len(TEXTS) - 2


@contextmanager
def removed_meanwhile(weave: Weave, remove: Callable[[], object]) -> Iterator[list[str]]:
    """`remove` runs while the first chunk is being computed."""
    encoder, names = weave.library.encoder, []
    alone = encoder.run_alone

    def interrupted(job: Callable[[], object]) -> object:
        made = alone(job)
        if not names:
            names.append("removed")
            remove()
        return made

    encoder.run_alone = interrupted  # type: ignore[assignment]
    yield names
    encoder.run_alone = alone


@pytest.mark.parametrize("by", ["this process", "another"])
def test_a_document_deleted_while_its_kv_is_in_the_making_leaves_none(
    weave: Weave, by: str
) -> None:
    library, folder = weave.library, weave.library.kb.folder
    newest = chunks_of(library)["Note 5"]
    (document,) = [d.id for d in library.kb.documents() if d.title == "Note 5"]

    def remove() -> None:
        if by == "this process":
            threading.Thread(target=library.remove, args=(document,)).start()
            while library.kb.catalogue.existing([newest.id]):
                time.sleep(0.001)  # the engine's thread must not wait for itself
        else:
            with KnowledgeBase.open(folder) as kb:
                remove_with_kv(kb, [document])

    with removed_meanwhile(weave, remove) as removed:
        library.start()
        assert library.maker.wait(60)
    assert removed
    assert not has_kv(library, newest)
    assert progress_of(weave)[:3] == ("ready", len(TEXTS) - 1, len(TEXTS) - 1)
    assert library.store.flush()
    assert len(objects(folder)) == len(TEXTS) - 1
    assert not library.store.keys_at_hand(lambda of: of.chunk == newest.id)


def test_kv_that_a_killed_maker_left_of_a_removed_document_goes_at_the_next_start(
    tmp_path: Path, model: Model
) -> None:
    folder = tmp_path / "kb"
    with opened(folder, model, None) as weave:
        weave.ingest(*TEXTS)
        gone = chunks_of(weave.library)["Note 5"]
        (document,) = [d.id for d in weave.library.kb.documents() if d.title == "Note 5"]
        weave.remove(document)
        assert weave.library.kv.sync().is_settled
        weave.library.encoder.encode([gone])  # written behind the removal
        assert weave.library.store.flush()
        left = {path: path.read_bytes() for path in objects(folder)}
        assert len(left) == 1
    for path, data in left.items():  # closing in order had it deleted: a kill would not
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with opened(folder, model, BackgroundKV()) as weave:
        weave.library.start()
        assert weave.library.maker.wait(60)
        assert not has_kv(weave.library, gone)
        assert len(objects(folder)) == len(TEXTS) - 1


@pytest.mark.parametrize("bound", ["the tier's", "its own"])
def test_a_full_tier_stops_the_maker_and_nothing_is_evicted(
    tmp_path: Path, model: Model, bound: str
) -> None:
    folder = tmp_path / "kb"
    with opened(folder, model, None) as weave:
        weave.ingest(*TEXTS)
        lengths = [len(c.token_ids) for c in chunks_of(weave.library).values()]
        sizes = sorted(map(weave.library.encoder.plain_bytes, lengths), reverse=True)
    room = sizes[0] * 2 + sizes[-1] // 2  # for two, not for three
    options = (BackgroundKV(), room) if bound == "the tier's" else (BackgroundKV(room), 1 << 30)
    with opened(folder, model, options[0], disk_bytes=options[1]) as weave:
        library = weave.library
        library.start()
        assert library.maker.wait(60)
        full = progress_of(weave)
        assert (full.state, full.chunks_done, full.eta_s) == ("full", 2, None)
        assert full.num_bytes <= room
        time.sleep(0.1)
        assert progress_of(weave) == full, "it does not go round in circles"
        assert library.store.metrics.value("kv_evictions_total", tier="disk") == 0


def test_behind_neighbours_it_is_made_too_and_other_writers_are_not_refused(
    tmp_path: Path, model: Model
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV(), encoding="neighbours:2") as weave:
        weave.ingest(*TEXTS)
        library = weave.library
        library.start()
        for i in range(3):  # beside it
            weave.ingest((f"More {i}", make_text(24, seed=20 + i)))
        deadline = time.monotonic() + 60
        while progress_of(weave).chunks_done < len(TEXTS) + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert progress_of(weave)[:3] == ("ready", len(TEXTS) + 3, len(TEXTS) + 3)
        assert all(has_kv(library, chunk) for chunk in chunks_of(library).values())


def test_a_chunk_that_the_device_fails_on_is_counted_and_the_rest_is_made(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, failed = weave.library, []
    encode = library.encoder.encode

    def fail_once(chunks: list[Chunk], *args: object, **options: object) -> None:
        if not failed:
            failed.append(chunks)
            raise RuntimeError("out of memory")
        encode(chunks, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(library.encoder, "encode", fail_once)
    library.start()
    assert library.maker.wait(60)
    assert library.store.metrics.value("kv_not_made_total", reason="RuntimeError") == 1
    progress = progress_of(weave)
    assert (progress.state, progress.chunks_done) == ("failed", progress.chunks_total - 1)
    assert "out of memory" in progress.why


def test_what_no_tier_took_is_made_again_when_one_is_well(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_kv, "RETRY_S", 0.2)
    library = weave.library
    is_broken = True
    write = DiskTier.write

    def writing(self: DiskTier, *args: object) -> bool:
        if is_broken:
            raise TierError("disk cannot write: Permission denied (on purpose)")
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "write", writing)
    monkeypatch.setattr(HostTier, "reserve", lambda *_: None)
    library.start()
    assert comes_true(lambda: progress_of(weave).state == "failed")
    assert progress_of(weave).chunks_done == 0
    is_broken = False
    assert comes_true(lambda: progress_of(weave).state == "ready")
    assert progress_of(weave).chunks_done == len(TEXTS)


def test_a_tier_that_cannot_be_looked_through_at_the_start_is_used_when_it_can(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_maker, "PREPARE_S", 0.2)
    monkeypatch.setattr(kv_maker, "LOOK_S", 0.2)
    library = weave.library
    library.remove(library.kb.documents()[0].id)  # else there is nothing to look for
    is_broken = True
    tagged = DiskTier.tagged_keys

    def listing(self: DiskTier, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        if is_broken:
            raise TierError("disk cannot list: Permission denied (on purpose)")
        return tagged(self, tags)

    monkeypatch.setattr(DiskTier, "tagged_keys", listing)
    library.start()
    assert comes_true(lambda: progress_of(weave).state == "failed")
    assert "on purpose" in progress_of(weave).why
    is_broken = False
    assert comes_true(lambda: progress_of(weave).state == "ready")


def comes_true(what: Callable[[], bool], within_s: float = 120.0) -> bool:
    until_s = time.monotonic() + within_s
    while not what() and time.monotonic() < until_s:
        time.sleep(0.05)
    return what()


def test_a_model_without_room_for_a_chunk_behind_its_filler_says_so(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    small = load_decoder(chat_model_folder, device="cpu"), Tokenizer(chat_model_folder)
    with opened(tmp_path / "kb", small, BackgroundKV(), encoding="filler:4") as weave:
        weave.ingest(("Short", "A node has pods."))
        weave.library.start()
        assert weave.library.maker.wait(60)
        state = progress_of(weave)
        assert state.state == "failed"
        assert "do not fit into the 512 positions" in state.why


def share_taken(turn: BackgroundTurn, seconds: float) -> float:
    """The share of the time that is had, by one who always wants a few milliseconds."""
    began_s, had_s = time.monotonic(), 0.0
    while time.monotonic() - began_s < seconds:
        turn.wait()
        time.sleep(0.01)
        turn.record_hold(0.01)
        had_s += 0.01
    return had_s / (time.monotonic() - began_s)


def test_beside_an_answer_it_keeps_to_its_share_and_in_idle_time_it_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvweave.engine.background.QUIET_S", 0.05)
    answers, ended = ActiveAnswers(), threading.Event()
    pace = BackgroundPace(answers, share=0.4)
    with pace.turn(ended) as turn:
        started_s = time.monotonic()
        for _ in range(50):
            assert turn.wait() == SLICE_S
            turn.record_hold(0.01)
        assert time.monotonic() - started_s < 0.2, "nobody is kept waiting"
        with answers.one() as answer:
            awaited = share_taken(turn, 1.0)
            answer.begin_telling()
            told = share_taken(turn, 1.0)
    assert 0.02 < awaited <= 0.11, "people wait for a first token: a quarter of the share"
    assert 0.2 < told <= 0.41, "a busy server gets on with it, and no faster than it may"


def test_what_a_long_step_left_no_time_for_is_had_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvweave.engine.background.MOST_SAVED_S", 0.1)
    answers, ended = ActiveAnswers(), threading.Event()
    pace = BackgroundPace(answers, share=0.4)
    with pace.turn(ended) as turn, answers.one() as answer:
        time.sleep(0.5)  # a prompt is computed
        answer.begin_telling()
        seconds = turn.wait()
        assert 0.04 < seconds <= 0.1, "0.4 / 4 of half a second, in one piece"
        turn.record_hold(seconds)
        time.sleep(1.0)
        assert turn.wait() == pytest.approx(0.1), "a bound on what an answer waits for"


def test_idle_only_work_waits_for_the_end_of_the_answer_and_gives_up_when_it_is_to_end() -> None:
    answers, ended = ActiveAnswers(), threading.Event()
    pace = BackgroundPace(answers, share=1.0)
    with answers.one():
        threading.Timer(0.2, ended.set).start()
        with pytest.raises(GaveUp), pace.turn(ended, idle_only=True):
            raise AssertionError("an answer is in the making")


def test_who_waits_for_idle_time_keeps_nobody_from_a_share() -> None:
    answers, ended = ActiveAnswers(), threading.Event()
    pace = BackgroundPace(answers, share=1.0)

    def wait_for_idle() -> None:
        with suppress(GaveUp), pace.turn(ended, idle_only=True):
            pass

    with answers.one():
        waiting = threading.Thread(target=wait_for_idle)
        waiting.start()
        with pace.turn(ended) as turn:
            turn.wait()
        assert waiting.is_alive(), "the answer is still in the making"
        ended.set()
        waiting.join()


def test_an_answer_waits_for_a_slice_and_not_for_a_chunk(
    weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest time that the engine is had for is a layer's, whatever the chunk's length."""
    monkeypatch.setattr("kvweave.engine.background.SLICE_S", 0.0)
    library, longest = weave.library, 0
    encoder, alone, layers = library.encoder, library.encoder.run_alone, 0
    qkv = encoder.decoder.qkv

    def counted(*args: object) -> object:
        nonlocal layers
        layers += 1
        return qkv(*args)  # type: ignore[arg-type]

    def job_of(job: Callable[[], object]) -> object:
        nonlocal layers, longest
        layers = 0
        done = alone(job)
        longest = max(longest, layers)
        return done

    monkeypatch.setattr(encoder.decoder, "qkv", counted)
    encoder.run_alone = job_of  # type: ignore[assignment]
    library.start()
    assert library.maker.wait(60)
    assert longest == 1
