"""Metadata of documents, and searches among those that have some."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.corpus import search as search_module
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.metadata import MetadataFilter, check_metadata, parse_pairs
from kvweave.corpus.search import RETRIEVALS, Retrieval, SearchOptions
from kvweave.errors import RequestError
from kvweave.ingest import IngestOptions, ingest
from kvweave.ingest.sources import FileBytes, TextSource
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_text, open_kb

ZORB = TextSource("Zorb", "A zorb drains a node of pods.", "z", {"product": "zorb", "year": 2024})
BLINT = TextSource("Blint", "A blint drains a node of pods too.", "b", {"product": "blint"})
PLAIN = TextSource("Plain", "Cordon a node, then drain its pods.", "p")


@pytest.fixture
def kb(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[KnowledgeBase]:
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        ingest(kb, [ZORB, BLINT, PLAIN])
        yield kb


def titles(kb: KnowledgeBase, retrieval: Retrieval, **wanted: Any) -> set[str]:
    how = SearchOptions(retrieval, filter=MetadataFilter.parse(wanted))
    return {hit.chunk.title for hit in kb.search("drain a node of pods", 5, how)}


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_a_filter_takes_documents_with_such_metadata_alone(
    kb: KnowledgeBase, retrieval: Retrieval
) -> None:
    assert titles(kb, retrieval) == {"Zorb", "Blint", "Plain"}
    assert titles(kb, retrieval, product="zorb") == {"Zorb"}
    assert titles(kb, retrieval, product=["zorb", "blint"]) == {"Zorb", "Blint"}
    assert titles(kb, retrieval, product="zorb", year=2024) == {"Zorb"}
    assert titles(kb, retrieval, product="blint", year=2024) == set()
    assert titles(kb, retrieval, year={"gte": 2024, "lt": 2025}) == {"Zorb"}
    assert titles(kb, retrieval, year={"gt": 2024}) == set()
    assert titles(kb, retrieval, product={"gte": "c"}) == {"Zorb"}
    assert titles(kb, retrieval, year="2024") == set(), "a text is no number"
    assert titles(kb, retrieval, year={"lt": "z"}) == set()
    assert titles(kb, retrieval, product={"gt": 5}) == set(), "texts stand behind all numbers"


def test_documents_show_it_and_an_update_changes_it(kb: KnowledgeBase) -> None:
    def shown() -> dict[str, dict[str, Any]]:
        return {d.title: d.metadata for d in kb.documents()}

    assert shown() == {
        "Zorb": {"product": "zorb", "year": 2024},
        "Blint": {"product": "blint"},
        "Plain": {},
    }
    again = ingest(kb, [ZORB])
    assert (again.updated, again.unchanged) == (0, 1)
    newer = TextSource(ZORB.title, ZORB.text, ZORB.key, {"product": "zorb", "year": 2025})
    report = ingest(kb, [newer])
    assert (report.added, report.updated, report.new_chunks) == (0, 1, 0)
    assert shown()["Zorb"]["year"] == 2025
    ingest(kb, [TextSource(ZORB.title, ZORB.text, ZORB.key)])
    assert shown()["Zorb"] == {}
    assert titles(kb, "words", product="zorb") == set()
    assert kb.check() == []


def test_what_goes_takes_its_metadata_with_it(kb: KnowledgeBase) -> None:
    (zorb,) = [d for d in kb.documents() if d.title == "Zorb"]
    kb.remove(zorb.id)
    (left,) = kb.catalogue.database.connection.execute(
        "SELECT count(*) FROM metadata WHERE document_id = ?", (zorb.id,)
    ).fetchone()
    assert left == 0
    assert kb.check() == []


def test_a_run_gives_metadata_to_all_and_a_source_may_say_otherwise(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        file = FileBytes("notes.md", b"Notes about pods.", {"product": "notes"})
        ingest(kb, [PLAIN, file], options=IngestOptions(metadata={"product": "all", "year": 1}))
        found = {d.title: d.metadata for d in kb.documents()}
    assert found["Plain"] == {"product": "all", "year": 1}
    assert found["notes"] == {"product": "notes", "year": 1}


def test_a_chunk_of_two_documents_is_found_by_the_metadata_of_each(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        one = TextSource("Same", "The same words of pods.", "1", {"owner": "a"})
        two = TextSource("Same", "The same words of pods.", "2", {"owner": "b"})
        ingest(kb, [one, two])
        by_source = {d.source: d.id for d in kb.documents()}
        for owner, source in (("a", "text:1"), ("b", "text:2")):
            how = SearchOptions(filter=MetadataFilter.parse({"owner": owner}))
            (hit,) = kb.search("words of pods", 3, how)
            assert hit.document == by_source[source], "the one that the filter holds for"


@pytest.mark.parametrize("scanned", [0, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_a_filtered_search_is_a_search_of_those_documents(
    tmp_path: Path,
    tokenizer: Tokenizer,
    seed: int,
    scanned: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared one by one or found by the index: the same as a knowledge base of them alone."""
    monkeypatch.setattr(search_module, "SCANNED", scanned)
    rng = random.Random(seed)
    texts = [
        TextSource(f"T{i}", make_text(30, 100 * seed + i), str(i), {"part": rng.randrange(3)})
        for i in range(40)
    ]
    how = SearchOptions(filter=MetadataFilter.parse({"part": 1}))
    with open_kb(tmp_path / "all", tokenizer) as kb, open_kb(tmp_path / "one", tokenizer) as alone:
        ingest(kb, texts)
        ingest(alone, [t for t in texts if t.metadata["part"] == 1])
        for query in ("drain node", "quota budget", "image registry probe"):
            got = [(h.chunk.id, h.score) for h in kb.search(query, 6, how)]
            wanted = [(h.chunk.id, h.score) for h in alone.search(query, 6)]
            assert [i for i, _ in got] == [i for i, _ in wanted]
            assert [s for _, s in got] == pytest.approx([s for _, s in wanted])


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_what_scores_less_is_left_out(kb: KnowledgeBase, retrieval: Retrieval) -> None:
    hits = kb.search("a zorb of pods", 3, SearchOptions(retrieval))
    scores = [hit.score for hit in hits]
    assert len(set(scores)) > 1
    least = sorted(scores)[-2]
    kept = kb.search("a zorb of pods", 3, SearchOptions(retrieval, min_score=least))
    assert kept == [hit for hit in hits if hit.score >= least]
    assert kb.search("a zorb of pods", 3, SearchOptions(retrieval, min_score=1e6)) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a b": 1}, "'a b' is no key of metadata"),
        ({"": 1}, "is no key of metadata"),
        ({"a": True}, "must be a text or a number"),
        ({"a": None}, "must be a text or a number"),
        ({"a": float("nan")}, "must be a text or a number"),
        ({"a": 2**64}, "beyond 64 bits"),
        ({"a": "x" * 2000}, "longer than 1024 characters"),
        ({"a": "\ud800"}, "no valid Unicode"),
        ({f"k{i}": 1 for i in range(33)}, "33 keys; it may have 32"),
    ],
)
def test_what_cannot_be_metadata_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    for check in (check_metadata, MetadataFilter.parse):
        with pytest.raises(RequestError, match=says):
            check(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": {"like": 1}}, "compares by 'like'; known: eq, gt"),
        ({"a": {}}, "compares by nothing"),
        ({"a": []}, "lists 0 values"),
        ({"a": [[1]]}, "must be a text or a number"),
    ],
)
def test_what_cannot_be_a_filter_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        MetadataFilter.parse(given)


def test_pairs_are_read_as_people_type_them() -> None:
    assert parse_pairs(["a=zorb", "b=12", "c=1.5", "d=a=b", "e="], "--meta") == {
        "a": "zorb",
        "b": 12,
        "c": 1.5,
        "d": "a=b",
        "e": "",
    }
    with pytest.raises(RequestError, match="--meta 'zorb' has no value; write KEY=VALUE"):
        parse_pairs(["zorb"], "--meta")
