"""Products of an encoder in 8 bits: near the exact ones, and one knowledge base for both."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvweave.corpus import bert_rounding
from kvweave.corpus.bert_encoder import BertEncoder, BertFolder
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest import ingest
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.product_probe import ROWS, Shape, Times
from kvweave.kernels.product_ways import ProductWays
from kvweave.kernels.products import FLOAT32
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_embedder import PROSE, make_embedder_folder

INT_MM, NATIVE = "int8 rows, int_mm", "int8 rows, native"
Measure = Callable[[Shape], Times]


def times(way: str, seconds: float) -> Measure:
    """Of a machine on which float32 takes a second and `way` so many."""
    return lambda _: {FLOAT32: dict.fromkeys(ROWS, 1.0), way: dict.fromkeys(ROWS, seconds)}


def minilm() -> Path:
    return Path(locate("minilm"))


def encoder(folder: Path, **options: str) -> BertEncoder:
    read = BertFolder.read(folder)
    assert read is not None
    return BertEncoder(read, "cpu", **options)  # type: ignore[arg-type]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """Makes this machine one with such times."""

    def be(measure: Measure) -> None:
        ways = ProductWays(tmp_path / "products.json", machine="a", measure=measure)
        monkeypatch.setattr(bert_rounding, "ProductWays", lambda: ways)

    return be


@pytest.fixture(params=[INT_MM, NATIVE])
def rounded(request: pytest.FixtureRequest, machine: Callable[[Measure], None]) -> BertEncoder:
    if request.param == NATIVE and native_kernels().library is None:
        pytest.skip("no C compiler here; the other way is tested all the same")
    machine(times(request.param, 0.1))
    found = encoder(minilm(), weights="auto")
    assert found.weights_words == f"24 of 24 products in 8 bits ({request.param})"
    return found


@pytest.fixture(scope="module")
def exact() -> BertEncoder:
    found = encoder(minilm())
    assert found.weights_words == "float32"
    return found


def test_vectors_in_8_bits_are_near_the_exact_ones(
    rounded: BertEncoder, exact: BertEncoder
) -> None:
    found, right = rounded.encode(PROSE, 8), exact.encode(PROSE, 8)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    cosines = (found * right).sum(axis=1)
    assert cosines.min() > 0.997, cosines
    assert cosines.mean() > 0.9985, cosines
    assert cosines.min() < 1 - 1e-5, "it is rounded"


def test_a_vector_is_the_same_to_the_last_bit_whatever_is_beside_it(rounded: BertEncoder) -> None:
    together = rounded.encode(PROSE, 32)
    np.testing.assert_array_equal(rounded.encode(PROSE[::-1], 3), together[::-1])
    for text, vector in zip(PROSE, together, strict=True):
        np.testing.assert_array_equal(rounded.encode([text], 32)[0], vector)


def test_the_same_weights_are_rounded_alike_at_every_start(rounded: BertEncoder) -> None:
    again = encoder(minilm(), weights="auto")
    np.testing.assert_array_equal(again.encode(PROSE, 8), rounded.encode(PROSE, 8))


def test_products_stay_exact_where_float32_is_faster(
    exact: BertEncoder, machine: Callable[[Measure], None]
) -> None:
    machine(times(INT_MM, 2.0))
    found = encoder(minilm(), weights="auto")
    assert found.weights_words == "float32"
    np.testing.assert_array_equal(found.encode(PROSE, 8), exact.encode(PROSE, 8))


def test_a_small_model_is_not_worth_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> ProductWays:
        raise AssertionError("products were measured")

    monkeypatch.setattr(bert_rounding, "ProductWays", refuse)
    assert encoder(make_embedder_folder(tmp_path), weights="auto").weights_words == "float32"


def test_a_knowledge_base_of_either_kind_is_open_to_the_other(
    tmp_path: Path, tokenizer: Tokenizer, machine: Callable[[Measure], None]
) -> None:
    machine(times(INT_MM, 0.1))
    documents = [(f"Note {n}", text) for n, text in enumerate(PROSE)]
    kinds = {
        weights: SentenceEmbedder(minilm(), name="minilm", device="cpu", weights=weights)  # type: ignore[arg-type]
        for weights in ("float32", "auto")
    }
    assert len({embedder.identity for embedder in kinds.values()}) == 1
    for made, other in (("float32", "auto"), ("auto", "float32")):
        folder = tmp_path / made
        with KnowledgeBase.open(
            folder, tokenizer=tokenizer, embedder=kinds[made], create=True
        ) as kb:
            ingest(kb, documents)
            before = kb.search("When does the boat leave?", 3)
        with KnowledgeBase.open(folder, tokenizer=tokenizer, embedder=kinds[other]) as kb:
            assert ingest(kb, documents).added == 0, "nothing is embedded again"
            after = kb.search("When does the boat leave?", 3)
        assert [hit.chunk.id for hit in after] == [hit.chunk.id for hit in before]
        for old, new in zip(before, after, strict=True):
            assert abs(old.score - new.score) < 0.01
        assert [hit.score for hit in after] != [hit.score for hit in before]
