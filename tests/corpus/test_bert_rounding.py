"""Products of an encoder in 8 bits: near the exact ones, and one knowledge base for both."""

from pathlib import Path

import numpy as np
import pytest

from kvweave.corpus.bert_encoder import BertEncoder, BertFolder
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest import ingest
from kvweave.kernels.native.loading import VARIABLE, native_kernels
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_embedder import PROSE, make_embedder_folder


def minilm() -> Path:
    return Path(locate("minilm"))


def encoder(folder: Path, **options: str) -> BertEncoder:
    read = BertFolder.read(folder)
    assert read is not None
    return BertEncoder(read, "cpu", **options)  # type: ignore[arg-type]


@pytest.fixture
def rounded() -> BertEncoder:
    library, words = native_kernels()
    if library is None or not library.has_integers:
        pytest.skip(words)
    found = encoder(minilm(), weights="auto")
    assert found.weights_words == "24 of 24 products in 8 bits"
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


def test_products_stay_exact_without_compiled_kernels(
    exact: BertEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    found = encoder(minilm(), weights="auto")
    assert found.weights_words == "float32"
    np.testing.assert_array_equal(found.encode(PROSE, 8), exact.encode(PROSE, 8))


def test_a_small_model_stays_exact(tmp_path: Path) -> None:
    assert encoder(make_embedder_folder(tmp_path), weights="auto").weights_words == "float32"


def test_a_knowledge_base_of_either_kind_is_open_to_the_other(
    tmp_path: Path, tokenizer: Tokenizer, rounded: BertEncoder
) -> None:
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
