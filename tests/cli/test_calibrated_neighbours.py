"""Calibration of chunk KV behind neighbours: whose neighbours, and what `auto` makes of it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.app.library.neighbours import nearest_by_tokens
from kvweave.calibrate.profiles import Profile, load_profile, save_profile, user_path
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.ingest.pipeline import ingest
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds.auto import QUESTION, TEXTS, World
from worlds.running import Run
from worlds.tiny_corpus import WordEmbedder, make_folder, open_kb
from worlds.tiny_models import make_chat_model_folder

SIZE = 2


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def decoder(model_folder: Path) -> Decoder:
    return load_decoder(model_folder, device="cpu")


@pytest.fixture
def kb(tmp_path: Path, model_folder: Path) -> Iterator[KnowledgeBase]:
    with open_kb(tmp_path / "kb", Tokenizer(model_folder)) as kb:
        ingest(kb, [make_folder(tmp_path / "docs", 3)], None)
        yield kb


@pytest.fixture
def table(tmp_path: Path) -> Iterator[NeighbourTable]:
    table = NeighbourTable(tmp_path / "kb" / "kv" / "neighbours.sqlite")
    yield table
    table.close()


def chunks_of(kb: KnowledgeBase) -> list[Chunk]:
    return [chunk for batch in kb.catalogue.all_chunks(64) for chunk in batch]


def tokens(kb: KnowledgeBase, ids: tuple[str, ...]) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in kb.chunks(ids)]  # type: ignore[arg-type]


# ── whose neighbours ─────────────────────────────────────────────────────────


def test_without_notes_they_are_those_that_ingest_would_choose(kb: KnowledgeBase) -> None:
    chunks = chunks_of(kb)[:4]
    want = kb.nearest(chunks, SIZE)
    found = nearest_by_tokens(kb, None, SIZE)([chunk.token_ids for chunk in chunks])
    assert found == [tokens(kb, want[chunk.id]) for chunk in chunks]
    assert all(len(others) == SIZE for others in found)


def test_noted_neighbours_come_before_nearer_ones(kb: KnowledgeBase, table: NeighbourTable) -> None:
    first, second, *_, far, last = chunks_of(kb)
    table.put(SIZE, {first.id: [last.id, far.id], far.id: []})
    table.put(SIZE + 1, {second.id: [far.id]})  # of another size: not this one's
    asked = [each.token_ids for each in (first, second, far)]
    found = nearest_by_tokens(kb, table, SIZE)(asked)
    chosen = kb.nearest([second], SIZE)[second.id]
    assert found == [[last.token_ids, far.token_ids], tokens(kb, chosen), []]


def test_notes_of_a_removed_neighbour_count_no_more(
    kb: KnowledgeBase, table: NeighbourTable
) -> None:
    gone = kb.documents()[0]
    lost = kb.catalogue.document_chunks(gone.id)[0].chunk
    first, *_, far = (c for c in chunks_of(kb) if c.title != lost.title)
    table.put(SIZE, {first.id: [far.id, lost.id]})
    kb.remove_documents([gone.id])
    found = nearest_by_tokens(kb, table, SIZE)([first.token_ids, lost.token_ids])
    assert found == [tokens(kb, kb.nearest([first], SIZE)[first.id]), []]


# ── from the command line to a plan ──────────────────────────────────────────


@pytest.fixture
def near_kb(
    run: Run,
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A knowledge base with chunk KV behind neighbours, made from the command line."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    for module in ("ingest", "knowledge_bases"):
        monkeypatch.setattr(f"kvweave.cli.{module}.find_embedder", lambda *_: WordEmbedder())
    monkeypatch.setattr(
        "kvweave.app.library.library.SentenceEmbedder", lambda *_, **__: WordEmbedder()
    )
    monkeypatch.setattr("kvweave.app.library.library.locate", Path)
    (tmp_path / "texts").mkdir()
    for title, text in TEXTS:
        (tmp_path / "texts" / f"{title}.txt").write_text(text)
    where = ["--kb", tmp_path / "near", "--model", model_folder, "--chunk-tokens", 288]
    encoding = ["--kv", "--encoding", f"neighbours:{SIZE}"]
    done = run("ingest", tmp_path / "texts", *where, *encoding)
    assert done.code == 0, done.err
    (tmp_path / "q.txt").write_text(f"{QUESTION}\nWhat is a taint?\n")
    return tmp_path / "near"


def calibrated(decoder: Decoder, tokenizer: Tokenizer) -> Profile:
    weights = decoder.weights.fingerprint
    return load_profile(user_path(weights), weights, tokenizer.fingerprint)


def test_auto_fuses_behind_neighbours_as_soon_as_their_table_is_good(
    run: Run, near_kb: Path, model_folder: Path, decoder: Decoder
) -> None:
    tokenizer = Tokenizer(model_folder)
    world = World(near_kb, decoder, tokenizer)
    world.set_machine()
    ask = ["ask", QUESTION, "--kb", near_kb, "--model", model_folder, "--max-tokens", 2]
    ask += ["--reuse", "auto", "--json", "--chunks", 5]
    assert reused(run(*ask).out) == 0
    asked = ["--questions", near_kb.parent / "q.txt", "--kb", near_kb, "--chunks", 4]
    options = ["--strategies", "epic", "--ratios", 0.1, "--model", model_folder]
    ran = run("calibrate", *asked, *options)  # what the knowledge base is prepared with
    assert ran.code == 0, ran.err
    assert "neighbours:2 · 2 questions of q.txt" in ran.out
    profile = calibrated(decoder, tokenizer)
    (table,) = profile.calibration
    # two questions to a model that babbles convince nobody: as if they were many and it was sure
    cells = [replace(cell, kl=0.001, kl_high=0.002, flips=0.0) for cell in table.cells]
    better = replace(table, num_questions=100, cells=tuple(cells), close_call=0.0)
    path = user_path(profile.weights)
    save_profile(path, replace(profile, calibration=(better,)))
    out = run(*ask).out
    # the chunk in front may have been kept from the first answer's prompt
    assert reused(out) in (4, 5)
    assert json.loads(out)["explain"]["strategy"] == "epic"
    assert json.loads(out)["explain"]["encoding"] == "neighbours:2"
    where = [near_kb.parent / "texts", "--kb", near_kb, "--model", model_folder]
    ran = run("ingest", *where, "--kv", "--encoding", "neighbours")
    assert (ran.code, ran.err) == (0, "neighbours:2, as calibrated\n")
    other = replace(better, context=better.context.replace("neighbours:2", "neighbours:3"))
    save_profile(path, replace(profile, calibration=(other,)))
    assert reused(run(*ask).out) == 0, "a table of another number of neighbours"


def reused(out: str) -> int:
    """Chunks that were taken as stored, but for the rows recomputed in them."""
    explain = json.loads(out)["explain"]
    return sum(chunk["state"] == "reused" for chunk in explain["chunks"])


def test_several_numbers_of_neighbours_are_measured_side_by_side(
    run: Run, near_kb: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvweave.calibrate.tabulate.CLOSE_CALLS", (0.0,)
    )  # a tiny model is never sure
    asked = ["--questions", near_kb.parent / "q.txt", "--kb", near_kb, "--chunks", 4]
    options = ["--strategies", "reuse", "--model", model_folder, "--limit", 1]
    named = ["neighbours:1", "neighbours:3", "filler:4"]
    ran = run("calibrate", *asked, *options, "--encodings", ",".join(named), "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert list(said["chosen"]) == named
    kl = {table["encoding"]: table["cells"][1]["kl"] for table in said["tables"]}
    assert len(set(kl.values())) == 3
    assert len({table["context"] for table in said["tables"]}) == 3
    ran = run("calibrate", *asked, *options, "--encodings", "neighbours:40")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "neighbours:40 and chunks of 288 tokens do not fit into the 8,192 positions" in ran.err
    assert "or less" in ran.err
