"""What questions ask for survives a restart, and comes to host memory before it is asked for."""

import json
from pathlib import Path

from kvweave import Weave
from kvweave.app.library.chunk_demand import ChunkDemand
from kvweave.app.library.library_kv import BackgroundKV
from kvweave.types import ChunkId
from worlds.made_kv import TEXTS, Model, chunks_of, model, opened

__all__ = ["model"]


def make_all(weave: Weave) -> None:
    weave.library.start()
    assert weave.library.maker.wait(60)


def tier_of(weave: Weave, title: str) -> str | None:
    library = weave.library
    (peek,) = library.store.peek([library.encoder.key(chunks_of(library)[title].token_ids)])
    return peek.tier


def test_after_a_restart_chunk_kv_is_in_host_memory_before_the_first_question(
    tmp_path: Path, model: Model
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        make_all(weave)
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        assert tier_of(weave, "Note 0") == "disk"
        make_all(weave)
        assert {tier_of(weave, title) for title, _ in TEXTS} == {"host"}


def test_where_host_memory_is_small_what_was_asked_most_comes_to_it(
    tmp_path: Path, model: Model
) -> None:
    with opened(tmp_path / "kb", model, BackgroundKV()) as weave:
        weave.ingest(*TEXTS)
        make_all(weave)
        library = weave.library
        chunk = chunks_of(library)["Note 3"]
        copies = library.store.copies([library.encoder.key(chunk.token_ids)])
        for title, times in (("Note 3", 3), ("Note 5", 2)):
            for _ in range(times):
                library.maker.note_question([chunks_of(library)[title].id])
        assert library.maker.wait(60), "their front copies are made"
    room = 2 * copies["disk"]  # for a chunk and its front copy
    with opened(tmp_path / "kb", model, BackgroundKV(), host_bytes=room) as weave:
        make_all(weave)
        assert tier_of(weave, "Note 3") == "host"
        assert tier_of(weave, "Note 0") == "disk"


def test_what_is_deleted_is_not_kept_as_wanted(tmp_path: Path) -> None:
    path = tmp_path / "demand.json"
    a, b, c = (ChunkId(name) for name in "abc")
    demand = ChunkDemand(path)
    for found in ([a, b], [b], [c, b], [c]):
        demand.push(found)
    assert demand.rank() == [b, c, a]
    demand.keep(lambda chunk_id: chunk_id != c)
    assert json.loads(path.read_text()) == [b, a]
    assert ChunkDemand(path).rank() == [b, a], "as before the restart"


def test_a_question_now_counts_more_than_all_before_the_restart(tmp_path: Path) -> None:
    path = tmp_path / "demand.json"
    path.write_text(json.dumps(["old", "older"]))
    demand = ChunkDemand(path)
    demand.push([ChunkId("new")])
    assert demand.rank() == ["new", "old", "older"]


def test_a_file_that_is_none_of_ours_is_no_order(tmp_path: Path) -> None:
    path = tmp_path / "demand.json"
    path.write_text("{not json")
    assert ChunkDemand(path).rank() == []
