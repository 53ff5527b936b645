"""Ingest does only what changed, skips what is bad, and never leaves half a document."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvweave.corpus.chunker import Chunker
from kvweave.corpus.embedder import Vectors
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.parsers import ParsedRecord, ParseLimits, parser_process
from kvweave.errors import CorpusError
from kvweave.ingest import IngestOptions, IngestProgress, IngestReport, ingest, window
from kvweave.ingest.sources import Selection, TextSource
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, EncodeWork, PlacedChunk
from worlds.tiny_corpus import WordEmbedder, make_folder, make_text, open_kb


def counts(report: IngestReport) -> tuple[int, int, int, int]:
    return report.added, report.updated, report.unchanged, report.removed


@pytest.fixture
def world(tmp_path: Path, tokenizer: Tokenizer) -> tuple[KnowledgeBase, Path]:
    return open_kb(tmp_path / "kb", tokenizer), make_folder(tmp_path / "docs", 6)


def embedded(kb: KnowledgeBase) -> int:
    assert isinstance(kb.embedder, WordEmbedder)
    return kb.embedder.num_embedded


def test_a_second_run_does_only_what_changed(world: tuple[KnowledgeBase, Path]) -> None:
    kb, folder = world
    assert counts(ingest(kb, [folder])) == (6, 0, 0, 0)
    before = embedded(kb)
    assert counts(ingest(kb, [folder])) == (0, 0, 6, 0)
    assert embedded(kb) == before
    note = folder / "doc002.md"
    note.write_text(f"{note.read_text()}\n\nOne more sentence about quota.\n")
    (folder / "new.txt").write_text("A new note.")
    assert counts(ingest(kb, [folder])) == (1, 1, 6 - 1, 0)
    assert embedded(kb) - before <= 3  # the last chunk of the changed note, and the new one
    assert kb.check() == []


def test_prune_removes_the_documents_of_files_that_are_gone(
    world: tuple[KnowledgeBase, Path],
) -> None:
    kb, folder = world
    ingest(kb, [folder, ("Kept", "a text from Python")])
    (folder / "doc000.md").unlink()
    assert counts(ingest(kb, [folder])) == (0, 0, 5, 0)
    report = ingest(kb, [folder], options=IngestOptions(prune=True))
    assert counts(report) == (0, 0, 5, 1)
    assert report.orphaned
    assert len(kb.documents()) == 6
    assert kb.check() == []


def test_prune_keeps_the_documents_of_files_it_may_not_look_at(
    world: tuple[KnowledgeBase, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kb, folder = world
    ingest(kb, [folder])
    shut = folder / "doc000.md"
    real_stat = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:  # a root user is refused nothing
        if path.name == shut.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    report = ingest(kb, [folder], options=IngestOptions(prune=True))
    assert counts(report) == (0, 0, 5, 0)
    assert [skipped.source for skipped in report.skipped] == [str(shut)]
    assert len(kb.documents()) == 6


def test_the_same_passage_in_two_documents_is_one_chunk(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    text = make_text(20, 1)
    report = ingest(kb, [TextSource("Note", text, "a"), TextSource("Note", text, "b")])
    assert (report.added, report.new_chunks, report.shared_chunks) == (2, 1, 1)
    (first, second) = kb.documents()
    assert kb.remove(first.id).orphaned == ()
    assert len(kb.remove(second.id).orphaned) == 1


def test_texts_from_python_are_known_by_content_or_by_key(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    assert counts(ingest(kb, [("A", "one"), ("A", "two")])) == (2, 0, 0, 0)
    assert counts(ingest(kb, (p for p in [("A", "one")]))) == (0, 0, 1, 0)  # also from a generator
    assert counts(ingest(kb, [TextSource("B", "old", key="b")])) == (1, 0, 0, 0)
    assert counts(ingest(kb, [TextSource("B", "new", key="b")])) == (0, 1, 0, 0)
    assert [h.chunk.text for h in kb.search("new", 1)] == ["B\nnew\n\n"]


def test_a_passage_that_moves_to_another_document_keeps_its_vector(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    ingest(kb, [TextSource("Note", "moving text", "a"), TextSource("Note", "other", "b")])
    before = embedded(kb)
    report = ingest(kb, [TextSource("Note", "new", "a"), TextSource("Note", "moving text", "b")])
    assert counts(report) == (0, 2, 0, 0)
    assert embedded(kb) - before == 1
    assert len(report.orphaned) == 1  # "other"; the moved one is in use again
    assert kb.check() == []
    assert kb.catalogue.drop_unused_vectors() == 0


def test_a_passage_that_goes_twice_in_one_run_is_reported_once(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    ingest(kb, [TextSource("Note", "moving text", "a"), TextSource("Note", "other", "b")])
    report = ingest(
        kb,
        [
            TextSource("Note", "new", "a"),
            TextSource("Note", "moving text", "b"),
            TextSource("Note", "newer", "b"),  # the passage goes with it again
        ],
    )
    assert len(report.orphaned) == 2  # "moving text" and "other"
    assert len(set(report.orphaned)) == 2


def test_the_same_text_twice_in_one_run_is_one_document(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    assert counts(ingest(kb, [("A", "one"), ("A", "one")])) == (1, 0, 0, 0)
    both = [TextSource("B", "old", key="b"), TextSource("B", "new", key="b")]
    ingest(kb, both)
    assert [h.chunk.text for h in kb.search("old new", 5) if h.chunk.title == "B"] == ["B\nnew\n\n"]
    assert kb.check() == []


def test_trouble_while_writing_stops_the_run_and_blames_no_file(
    world: tuple[KnowledgeBase, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kb, folder = world

    def full(*_: object) -> None:
        raise CorpusError("the disk is full")

    monkeypatch.setattr(window, "WINDOW", 1)
    monkeypatch.setattr(kb.catalogue, "put_vectors", full)
    with pytest.raises(CorpusError, match="the disk is full"):
        ingest(kb, [folder])
    assert kb.documents() == []


def test_records_that_leave_a_file_leave_the_knowledge_base(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "alpha"}\n{"text": "beta"}\n{"text": "gamma"}\n')
    assert counts(ingest(kb, [path])) == (3, 0, 0, 0)
    path.write_text('{"text": "delta"}\n{"text": "gamma"}\n{"text": "alpha"}\n')
    assert counts(ingest(kb, [path])) == (1, 0, 2, 1)
    assert kb.check() == []


def test_every_bad_file_is_reported_and_the_rest_goes_in(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    folder = make_folder(tmp_path / "docs", 3)
    bad = {
        "a.pdf": b"%PDF-1.4 nothing",
        "b.txt": bytes(range(256)),
        "c.txt": b"caf\xe9",
        "d.csv": b"a,b\n1,2\n3\n",
        "e.md": b"",
        "f.jsonl": b'{"text": "fine"}\n{"text": "fine too"}\nbroken',
        "g.docx": b"no zip",
    }
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(200 << 20)
    (folder / "loop").symlink_to(folder)
    report = ingest(kb, [folder, ("Half", "a \ud800 pair"), ("Blank", " \n")])
    assert counts(report) == (3, 0, 0, 0)
    names = sorted(Path(s.source).name for s in report.skipped if not s.source.startswith("text:"))
    assert names == sorted([*bad, "huge.txt", "loop"])
    assert [s.reason.split()[0] for s in report.skipped[-2:]] == ["half", "no"]
    assert report.skipped
    assert {Path(d.source).suffix for d in kb.documents()} == {".md"}
    assert kb.check() == []


def test_a_file_that_turns_bad_keeps_its_last_good_version(
    world: tuple[KnowledgeBase, Path],
) -> None:
    kb, folder = world
    ingest(kb, [folder])
    (folder / "doc001.md").write_bytes(b"caf\xe9")
    report = ingest(kb, [folder], options=IngestOptions(prune=True))
    assert len(report.skipped) == 1
    assert len(kb.documents()) == 6


def test_paths_outside_the_roots_are_skipped(world: tuple[KnowledgeBase, Path]) -> None:
    kb, folder = world
    options = IngestOptions(selection=Selection(roots=(folder / "inner",)))
    report = ingest(kb, [folder], options=options)
    assert [s.reason for s in report.skipped] == ["outside the allowed folders"]
    assert kb.documents() == []


def test_a_large_text_is_taken_when_the_limit_allows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    kb = open_kb(tmp_path / "kb", tokenizer)
    (tmp_path / "big.txt").write_text(make_text(12_000, 1))
    small = IngestOptions(limits=ParseLimits(file_bytes=10_000))
    assert "over the limit" in ingest(kb, [tmp_path / "big.txt"], options=small).skipped[0].reason
    report = ingest(kb, [tmp_path / "big.txt"])
    assert report.added == 1
    assert report.new_chunks > 300
    assert kb.check() == []


def test_trouble_of_the_embedder_is_one_line_and_keeps_what_is_complete(
    world: tuple[KnowledgeBase, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kb, folder = world
    embed, calls = kb.embedder.embed_passages, 0

    def fails_later(texts: Sequence[str]) -> Vectors:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(28, "No space left on device")
        return embed(texts)

    monkeypatch.setattr(window, "WINDOW", 1)
    monkeypatch.setattr(window, "SLICE", 256)
    monkeypatch.setattr(kb.embedder, "embed_passages", fails_later)
    with pytest.raises(CorpusError, match=r"ingest stopped .*No space left on device.* run it"):
        ingest(kb, [folder])
    assert len(kb.documents()) == 2
    monkeypatch.undo()
    assert counts(ingest(kb, [folder])) == (4, 0, 2, 0)
    assert kb.check() == []


ODD_FILES = {
    "undefined.html": b"<meta charset=undefined><p>caf\xe9</p>",
    "object.jsonl": b'{"text": {"a": 1}}\n',
}


def test_odd_files_and_paths_are_reported_and_the_rest_gets_in(
    world: tuple[KnowledgeBase, Path],
) -> None:
    kb, folder = world
    for name, data in ODD_FILES.items():
        (folder / name).write_bytes(data)
    (folder / "ids.jsonl").write_bytes(b'{"id": "\\ud800", "text": "half a pair in the id"}\n')
    (folder / "control.txt").write_text("<|im_end|>" * 3000)
    paths = ["x" * 300, "~nosuchuser/x", "a\0b", folder]
    report = ingest(kb, paths)
    assert report.added == 6 + 2
    skipped = [Path(source).name for source, _ in report.skipped]
    assert skipped == ["x" * 300, "x", "a\0b", *sorted(ODD_FILES)]
    assert kb.check() == []


@pytest.mark.parametrize("part", ["parse", "cut"])
def test_a_file_that_trips_the_parser_or_the_chunker_is_skipped_with_the_reason(
    world: tuple[KnowledgeBase, Path], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    kb, folder = world
    real_parse, real_cut = parser_process.parse, Chunker.cut

    def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
        if path.name == "doc003.md":
            raise KeyError("a bug")
        return real_parse(path, data, limits)

    def cut(
        self: Chunker, title: str, text: str, before_each: Callable[[], None]
    ) -> Iterator[PlacedChunk]:
        if title == "Note 3":
            raise KeyError("a bug")
        return real_cut(self, title, text, before_each)

    if part == "parse":
        monkeypatch.setattr(parser_process, "parse", parse)
    else:
        monkeypatch.setattr(Chunker, "cut", cut)
    report = ingest(kb, [folder])
    assert report.added == 5
    assert report.skipped == ((str(folder / "doc003.md"), "KeyError: 'a bug'"),)
    monkeypatch.undo()
    assert counts(ingest(kb, [folder])) == (1, 0, 5, 0)


class FailingEmbedder(WordEmbedder):
    """Gives up after some passages, as if someone had pressed Ctrl-C."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        self._left -= len(texts)
        if self._left < 0:
            raise KeyboardInterrupt
        return super().embed_passages(texts)


def test_an_interrupt_keeps_whole_documents_and_the_next_run_embeds_nothing_twice(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "WINDOW", 24)
    monkeypatch.setattr(window, "SLICE", 4)
    folder = make_folder(tmp_path / "docs", 12)
    first = FailingEmbedder(after=50)
    kb = open_kb(tmp_path / "kb", tokenizer, embedder=first)
    with pytest.raises(KeyboardInterrupt):
        ingest(kb, [folder])
    assert 0 < len(kb.documents()) < 12
    assert kb.check() == []
    second = WordEmbedder()
    again = open_kb(tmp_path / "kb", tokenizer, embedder=second)
    ingest(again, [folder])
    assert len(again.documents()) == 12
    assert first.num_embedded + second.num_embedded == again.totals().num_chunks
    assert again.check() == []


class RecordingEncoder:
    """Keeps what it was offered; skips what it has, as the contract asks."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def missing(self, chunks: Sequence[Chunk]) -> EncodeWork:
        new = [chunk for chunk in chunks if chunk.id not in self.encoded]
        tokens = sum(len(chunk.token_ids) for chunk in new)
        return EncodeWork(len(new), tokens, 100 * tokens)

    def encode(
        self, chunks: Sequence[Chunk], tell: Callable[[EncodeWork], None] | None = None
    ) -> None:
        for chunk in chunks:
            work = self.missing([chunk])
            if work.num_chunks:
                self.encoded.append(chunk.id)
                if tell is not None:
                    tell(work)


def test_the_encoder_is_offered_every_chunk_after_its_vector_is_there(
    world: tuple[KnowledgeBase, Path],
) -> None:
    kb, folder = world
    encoder = RecordingEncoder()
    ingest(kb, [folder], encoder)
    first = list(encoder.encoded)
    assert len(first) == kb.totals().num_chunks
    ingest(kb, [("New", "text")], encoder)
    assert len(encoder.encoded) == len(first) + 1


def test_progress_reaches_the_total_and_never_goes_back(world: tuple[KnowledgeBase, Path]) -> None:
    kb, folder = world
    seen: list[IngestProgress] = []
    ingest(kb, [folder], progress=seen.append)
    done = [state.done_bytes for state in seen]
    assert done == sorted(done)
    assert seen[-1].total_bytes is not None
    assert 0.99 * seen[-1].total_bytes <= done[-1] <= seen[-1].total_bytes
    assert [s.phase for s in seen][-1] == "index"


def test_kv_counts_what_is_left_from_the_first_chunk_to_the_last(
    world: tuple[KnowledgeBase, Path],
) -> None:
    kb, folder = world
    encoder, seen = RecordingEncoder(), []
    ingest(kb, [folder])  # no KV yet
    report = ingest(kb, [folder, ("New", "text")], encoder, progress=seen.append)
    states = [state for state in seen if state.phase == "encode"]
    totals = kb.totals()
    assert {state.total_chunks for state in states} == {totals.num_chunks}
    assert {state.total_tokens for state in states} == {totals.num_tokens}
    assert [state.num_chunks for state in states] == list(range(totals.num_chunks + 1))
    assert (states[0].kv_bytes, states[0].eta_s) == (0, None), "announced before it begins"
    assert states[-1].kv_bytes == states[-1].total_kv_bytes == 100 * totals.num_tokens
    assert states[-1].eta_s == 0
    assert all(state.eta_s is not None and state.eta_s > 0 for state in states[1:-1])
    assert (report.kv_chunks, report.kv_bytes) == (totals.num_chunks, 100 * totals.num_tokens)
    seen.clear()
    assert ingest(kb, [folder], encoder, progress=seen.append).kv_chunks == 0
    assert "encode" not in {state.phase for state in seen}, "nothing is left: nothing to count"


def test_a_moved_knowledge_base_still_answers(
    world: tuple[KnowledgeBase, Path], tmp_path: Path
) -> None:
    kb, folder = world
    ingest(kb, [folder])
    kb.close()
    moved = shutil.move(tmp_path / "kb", tmp_path / "elsewhere")
    again = KnowledgeBase.open(moved, embedder=WordEmbedder())
    assert len(again.search("drain node", 3)) == 3
    assert np.isfinite([hit.score for hit in again.search("drain node", 3)]).all()
