"""A cross-encoder puts what was found in order. A real one, small and of random weights."""

from pathlib import Path

import pytest

from kvweave.corpus.reranker import CrossEncoderReranker
from kvweave.corpus.search import LEAST_RERANKED, SearchOptions
from kvweave.errors import ModelNotFound, RequestError
from kvweave.ingest import ingest
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import open_kb

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["drain", "node", "pods", "quota", "volume", "a", "the"],
]
PAIRS = [
    ("Drain", "drain the node"),
    ("Quota", "a quota of pods"),
    ("Volume", "the volume of a node"),
]


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("cross")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
        initializer_range=1.0,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hits_come_in_the_order_of_the_cross_encoder(
    tmp_path: Path, tokenizer: Tokenizer, cross_encoder: Path
) -> None:
    query, name = "drain a node", str(cross_encoder)
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        ingest(kb, PAIRS)
        texts = [hit.chunk.text for hit in kb.search(query, 3)]
        scores = dict(zip(texts, CrossEncoderReranker(name).scores(query, texts), strict=True))
        assert len(set(scores.values())) == 3
        got = kb.search(query, 3, SearchOptions(reranker=name))
        assert [hit.chunk.text for hit in got] == sorted(texts, key=lambda text: -scores[text])
        assert [hit.score for hit in got] == pytest.approx(sorted(scores.values(), reverse=True))
        assert kb.search(query, 1, SearchOptions(reranker=name)) == got[:1], "it sees more than one"
        least = SearchOptions(reranker=name, min_score=got[1].score)
        assert kb.search(query, 3, least) == got[:2]
        with pytest.raises(RequestError, match="needs the query's words"):
            kb.search(kb.embedder.embed_query(query), 1, SearchOptions(reranker=name))
    assert LEAST_RERANKED >= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_reranker_says_what_it_has_so_far_and_ends_with_what_it_says_at_once(
    tmp_path: Path, tokenizer: Tokenizer, cross_encoder: Path
) -> None:
    words = ["drain", "node", "pods", "quota", "volume"]
    notes = [(f"N{i}", f"{words[i % 5]} the {words[i % 3]} {i}") for i in range(24)]
    how = SearchOptions(reranker=str(cross_encoder))
    with open_kb(tmp_path / "kb", tokenizer) as kb:
        ingest(kb, notes)
        *lists, last = kb.search_staged("drain a node", 3, 8, how)
        assert 1 + len(lists) == kb.num_stages(3, 8, how) == LEAST_RERANKED // 4
        plain = kb.search("drain a node", 3, how)
        assert [hit.chunk.id for hit in last] == [hit.chunk.id for hit in plain]
        found = {hit.chunk.id for hit in kb.search("drain a node", LEAST_RERANKED)[:4]}
        assert {hit.chunk.id for hit in lists[0]} < found, "likely ones are read first"
        scores = [lists[0][0].score, *(each[0].score for each in lists[1:]), last[0].score]
        assert scores == sorted(scores), "later stages only add"


def test_no_text_needs_no_model() -> None:
    assert CrossEncoderReranker("nowhere").scores("q", []) == []


@pytest.mark.filterwarnings("ignore")
def test_one_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFound, match=r"no reranker .*: give a cross-encoder's folder"
    ) as seen:
        CrossEncoderReranker(str(tmp_path / "nothing")).scores("q", ["a"])
    assert "\n" not in str(seen.value)
