"""A server with default settings: guesses where searches are slow, and no other answer for it."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import KVOptions
from kvweave.corpus.catalogue_index import CatalogueIndex
from kvweave.corpus.index.base import IndexHits, Vector
from worlds.serving import make_weave, serving, user
from worlds.tiny_corpus import WordEmbedder, make_text

SLOW_S = 0.4  # what a search takes, as over a network or many millions of vectors
# The flat index compares in order of arrival: a list of what came first stands at the first stage.
NOTES = [
    ("Anna", "The albatross of Anna flies to the harbour. " + make_text(30, seed=1)),
    ("Tom", "Tom paints the albatross in the harbour. " + make_text(30, seed=2)),
    *((f"Note {i}", make_text(30, seed=i)) for i in range(3, 17)),
]
QUESTION = "Who saw the albatross in the harbour?"


@pytest.fixture
def slow_index(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = CatalogueIndex.search_staged

    def slow(self: CatalogueIndex, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        for hits in fast(self, vector, k, stages):
            time.sleep(SLOW_S / stages)
            yield hits

    monkeypatch.setattr(CatalogueIndex, "search_staged", slow)


@pytest.fixture
def url(chat_model_folder: Path, tmp_path: Path) -> Iterator[str]:
    """One knowledge base is open at a time; all else is as it comes."""
    config = LibrariesConfig(tmp_path, embedder="words", kv=KVOptions("isolated"), open_most=1)
    with make_weave(chat_model_folder) as weave:
        libraries = Libraries(weave, config, open_embedder=lambda _: WordEmbedder())
        for name, notes in (("birds", NOTES), ("other", NOTES[:1])):
            with libraries.use("", name, create=True) as over:
                over.ingest(*notes)
        with serving(weave, libraries=libraries) as address:
            yield address
        libraries.close()


def ask(url: str, question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    body = {"messages": user(question), "kb": "birds", "k": 2, "explain": True}
    body |= {"max_tokens": 6, "temperature": 0, "reuse": "prefix", **fields}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def counted(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    names = {s.name + "".join(f" {value}" for value in s.labels.values()): s.value for s in samples}
    return {name.removeprefix("kvweave_"): value for name, value in names.items()}


def test_a_server_with_default_settings_learns_to_guess_and_answers_the_same(
    url: str, slow_index: None
) -> None:
    first = ask(url)
    assert first["explain"]["speculation"] is None, "nobody knows how long anything takes"
    assert first["explain"]["not_guessed"] == "no prompt was timed yet"
    told = [ask(url) for _ in range(3)]
    said = [each["explain"]["speculation"] for each in told]
    assert said[-1]["stages"] == 8
    assert said[-1]["guesses"] == 1
    assert told[-1]["explain"]["not_guessed"] is None
    assert 3 < said[-1]["right_stage"] < 8, "a short prefill waits until little of it is left"
    assert 0 < said[-1]["hidden_ms"] < said[-1]["search_ms"]
    off = ask(url, speculate="off")
    assert off["explain"]["speculation"] is None
    assert off["explain"]["not_guessed"] == "speculation is off"
    texts = {each["choices"][0]["message"]["content"] for each in (first, *told, off)}
    assert len(texts) == 1
    counts = counted(url)
    guesses = sum(each["guesses"] for each in said if each)
    assert counts["guesses_total right"] + counts["guesses_total wrong"] == guesses > 0
    assert counts["staged_searches_total"] == sum(each is not None for each in said)
    assert counts["engine_speculation_right"] == counts["guesses_total right"] > 0
    saved = sum(each["saved_tokens"] for each in said if each)
    assert counts["engine_speculation_saved_tokens"] == saved


def test_a_search_by_words_and_vectors_has_stages_and_a_pace_of_its_own(
    url: str, slow_index: None
) -> None:
    for _ in range(3):
        ask(url)
    first = ask(url, retrieval="hybrid")["explain"]
    assert first["speculation"] is None, "nobody knows how long such a search takes"
    # when a guess pays is learnt from times: a machine that is busy for a moment delays it
    told = (ask(url, retrieval="hybrid")["explain"]["speculation"] for _ in range(20))
    guessed = next(said for said in told if said and said["guesses"])
    assert guessed["guesses"] == 1
    assert guessed["hidden_ms"] > 0
    words = ask(url, retrieval="words")["explain"]
    assert words["speculation"] is None
    assert words["not_guessed"] == "this search has no stages: words"


def test_what_was_learnt_outlives_the_closing_of_a_knowledge_base(
    url: str, slow_index: None
) -> None:
    for _ in range(3):
        ask(url)
    closed = counted(url)["kb_closed_total"]
    ask(url, kb="other")
    assert counted(url)["kb_closed_total"] > closed
    assert ask(url)["explain"]["speculation"]["guesses"] == 1


def test_a_small_knowledge_base_is_searched_plainly(url: str) -> None:
    for _ in range(3):
        told = ask(url)["explain"]
        assert told["speculation"] is None
    assert re.fullmatch(r"the search is too short to .+: \d+\.\d ms", told["not_guessed"])


def test_loading_an_index_is_no_part_of_a_search(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = CatalogueIndex._load

    def slow(self: CatalogueIndex) -> None:
        time.sleep(SLOW_S)
        load(self)

    monkeypatch.setattr(CatalogueIndex, "_load", slow)
    ask(url, kb="other")  # so that the next one is opened anew
    for _ in range(3):
        assert ask(url)["explain"]["speculation"] is None
