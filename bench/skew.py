"""How skewed is retrieval, and does that depend on how passages are found?

Questions of MMLU and NQ-open over the Wikipedia passages, by words (BM25) and by vectors, over a
flat, an IVF and an HNSW index. Per way: the share of references that go to the hottest 3 % of
passages, of the first passage of each question and of the first five; and the same of a retrieval
that knows no favourites, which over few questions looks skewed as well. RAGCache's figures 5 and 6
have 60 % of MMLU's requests at 3 % of the documents that were accessed: whole Wikipedia pages, and
the first hit alone. Shares of all passages are here too.

    python bench/skew.py --data ../shared/data --out bench/results/skew-cpu.json

Vectors are computed once (bench/cache, resumable after a kill). `--passages` takes the first so
many of the corpus: embedding all of them takes ten minutes of a quiet machine.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import commit, cpu_device, finish
from common.vector_cache import cached_vectors
from common.word_lists import CORPUS, QUESTIONS
from kvweave.cli.knowledge_bases import find_embedder
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.index import make_index

KINDS = ("flat", "ivf", "hnsw")
HOTTEST = (0.01, 0.03, 0.1)
TOP = 5

Lists = np.ndarray  # [Q, TOP] places of passages, best first


def skew(lists: Lists, corpus: int, share: float) -> float:
    """Share of references that go to the hottest `share` of `corpus` passages."""
    counts = np.bincount(lists.reshape(-1))
    hottest = np.sort(counts)[::-1][: max(1, round(share * corpus))]
    return float(hottest.sum() / counts.sum())


def found_lists(
    texts: list[str], questions: dict[str, list[str]]
) -> Iterator[tuple[str, str, Lists]]:
    """(set, way, its lists)."""
    for name, asked in questions.items():
        yield name, "words", by_words(texts, asked)
    embedder = find_embedder("minilm")
    assert isinstance(embedder, SentenceEmbedder)
    vectors = cached_vectors("wiki_kb", embedder, texts, embedder.embed_passages)
    queries = {
        name: cached_vectors(name, embedder, asked, embedder.embed_queries)
        for name, asked in questions.items()
    }
    for kind in KINDS:
        index = make_index(kind, vectors.shape[1], collection="")
        index.add(np.arange(1, len(vectors) + 1, dtype=np.int64), vectors)
        for name, asked_vectors in queries.items():
            rows = [index.search(vector, TOP).ids - 1 for vector in asked_vectors]
            yield name, kind, np.array(rows)
    rng = np.random.default_rng(0)
    for name, asked in questions.items():
        yield name, "no favourites", rng.integers(0, len(texts), (len(asked), TOP))


def by_words(texts: list[str], asked: list[str]) -> Lists:
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    model = bm25s.BM25()
    settings = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
    model.index(bm25s.tokenize(texts, **settings), show_progress=False)
    places, _ = model.retrieve(bm25s.tokenize(asked, **settings), k=TOP, show_progress=False)
    return places.astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--passages", type=int, help="the first so many of the corpus alone")
    parser.add_argument("--questions", type=int, default=2048, help="the first of each set")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    passages = list(read_jsonl(args.data / CORPUS))[: args.passages]
    texts = [f"{p['title']}\n{p['text'].strip()}" for p in passages]
    questions = {
        name: [r["question"] for r in read_jsonl(args.data / path)][: args.questions]
        for name, path in QUESTIONS.items()
    }
    rows = []
    for name, way, lists in found_lists(texts, questions):
        row: dict[str, object] = {"set": name, "way": way, "questions": len(lists)}
        for share in HOTTEST:
            row[f"first_{share:g}"] = round(skew(lists[:, :1], len(texts), share), 4)
            row[f"five_{share:g}"] = round(skew(lists, len(texts), share), 4)
        num_found = len(np.unique(lists[:, 0]))
        row["first_0.03_of_found"] = round(skew(lists[:, :1], num_found, 0.03), 4)
        rows.append(row)
    table = Table(title=f"share of references to the hottest of {len(texts):,} passages")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=150).print(table)
    finish(
        __doc__,
        {
            "bench": "skew",
            "commit": commit(),
            "device": cpu_device(),
            "config": {"passages": len(texts), "embedder": "minilm", "top": TOP},
            "published": {"to_3_percent": 0.6},
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
