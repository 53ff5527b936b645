"""Real questions with the passages that a search by words finds for them: places in the corpus.

For benches that need which passages come back and how often, and no vectors: BM25 over the
Wikipedia passages takes seconds where embedding them takes minutes. Kept in bench/cache.
"""

from pathlib import Path

import numpy as np

from common.files import CACHE, read_jsonl

QUESTIONS = {"mmlu": "mmlu/mmlu.jsonl.gz", "nq_open": "nq_open/nq_open_questions.jsonl.gz"}
CORPUS = "wiki_kb/passages.jsonl.gz"


def word_lists(data: Path, name: str, k: int) -> tuple[np.ndarray, int]:
    """Places [Q, k] of the passages nearest to each question of a set, best first; and how many
    passages there are."""
    path = CACHE / "streams" / f"{name}-words-{k}.npz"
    if not path.is_file():
        import bm25s
        import Stemmer

        stemmer = Stemmer.Stemmer("english")

        def tokens(texts: list[str]) -> object:
            return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)

        texts = [f"{p['title']}\n{p['text']}" for p in read_jsonl(data / CORPUS)]
        asked = [record["question"] for record in read_jsonl(data / QUESTIONS[name])]
        model = bm25s.BM25()
        model.index(tokens(texts), show_progress=False)
        places, _ = model.retrieve(tokens(asked), k=k, show_progress=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, places=places.astype(np.int64), corpus=len(texts))
        temporary.replace(path)
    saved = np.load(path)
    return saved["places"], int(saved["corpus"])


def zipf_lists(num: int, k: int, corpus: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Invented lists: passages drawn by Zipf's law, without data to go by."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, corpus + 1) ** 0.8
    cumulated = np.cumsum(weights / weights.sum())
    drawn = np.searchsorted(cumulated, rng.random((num, 4 * k)))
    lists = [list(dict.fromkeys(row.tolist()))[:k] for row in drawn]
    full = [row for row in lists if len(row) == k]
    return np.array(full, dtype=np.int64), corpus
