"""Streams of real requests for the benches: question → ordered chunks, with their token counts.

Questions of MMLU and NQ-open, retrieved from a Wikipedia knowledge base with the real embedder and
an exact (flat) index, or by BM25, which takes a minute where embedding takes ten. Conversations of
MTRAG with the passages their own retriever returned. The embedding runs once (bench/cache,
resumable after a kill); so does the retrieval.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.files import CACHE, read_jsonl
from common.vector_cache import cached_vectors
from common.word_lists import QUESTIONS, word_lists
from kvweave.cli.knowledge_bases import find_embedder, find_tokenizer
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.kv.tree.node import ChunkRef
from kvweave.types import ChunkId

K = 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as retrieval delivers it."""

    chunks: tuple[ChunkRef, ...]  # nearest first
    question_tokens: int
    conversation: str = ""  # "" for a question by itself


def question_stream(
    data: Path, name: str, seed: int | None = 0, model: str = "smollm2", *, by_words: bool = False
) -> list[Ask]:
    """All questions of a set, each with its K nearest passages; shuffled, or, without a seed, in
    the order of the file."""
    ids, sizes, question_sizes = _retrieved(data, name, model, by_words)
    chunks = {
        int(place): ChunkRef(ChunkId(f"{place:016x}"), int(size))
        for place, size in zip(ids.reshape(-1), sizes.reshape(-1), strict=True)
    }
    asks = [
        Ask(tuple(chunks[int(place)] for place in row), int(size))
        for row, size in zip(ids, question_sizes, strict=True)
    ]
    if seed is None:
        return asks
    order = np.random.default_rng(seed).permutation(len(asks))
    return [asks[place] for place in order]


def subject_stream(data: Path, *, by_words: bool = False) -> list[Ask]:
    """MMLU subject after subject: what is asked for drifts."""
    subjects = [record["subject"] for record in read_jsonl(data / QUESTIONS["mmlu"])]
    asks = question_stream(data, "mmlu", seed=None, by_words=by_words)
    order = sorted(range(len(asks)), key=lambda place: (subjects[place], place))
    return [asks[place] for place in order]


def conversation_stream(data: Path, k: int = 5, model: str = "smollm2") -> list[Ask]:
    """MTRAG turns: rewritten question, top-k of ELSER; conversations interleaved in time order."""
    path = CACHE / "streams" / f"mtrag-{model}-{k}.json"
    if not path.is_file():
        tokenizer = find_tokenizer(model)
        texts = {
            (p["domain"], p["doc_id"]): f"{p['title']}\n{p['text']}"
            for p in read_jsonl(data / "mtrag" / "passages.jsonl.gz")
        }
        turns = []
        for record in read_jsonl(data / "mtrag" / "retrieval_traces.jsonl.gz"):
            if (record["retriever"], record["query_mode"]) != ("elser", "rewrite"):
                continue
            conversation, turn = record["task_id"].split("<::>")
            chunks = []
            for doc_id, _ in record["ranked"][:k]:
                text = texts[record["domain"], doc_id]
                name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
                chunks.append([name, len(tokenizer.encode(text))])
            turns.append([int(turn), conversation, chunks])
        turns.sort(key=lambda turn: (turn[0], turn[1]))  # first turns first: all talk at once
        _save(path, turns)
    return [
        Ask(tuple(ChunkRef(ChunkId(name), size) for name, size in chunks), 24, conversation)
        for _, conversation, chunks in json.loads(path.read_text())
    ]


def _retrieved(
    data: Path, name: str, model: str, by_words: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places [Q, K] of the nearest passages, their token counts [Q, K], those of questions [Q]."""
    path = CACHE / "streams" / f"{name}-{model}{'-words' if by_words else ''}.npz"
    if not path.is_file():
        passages = list(read_jsonl(data / "wiki_kb" / "passages.jsonl.gz"))
        texts = [f"{p['title']}\n{p['text'].strip()}" for p in passages]
        questions = [r["question"] for r in read_jsonl(data / QUESTIONS[name])]
        ids = word_lists(data, name, K)[0] if by_words else _by_vectors(name, texts, questions)
        tokenizer = find_tokenizer(model)
        size_of = {int(p): len(tokenizer.encode(texts[p])) for p in np.unique(ids)}
        sizes = np.vectorize(size_of.__getitem__)(ids)
        question_sizes = np.array([len(tokenizer.encode(q)) for q in questions])
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, ids=ids, sizes=sizes, question_sizes=question_sizes)
    saved = np.load(path)
    return saved["ids"], saved["sizes"], saved["question_sizes"]


def _by_vectors(name: str, texts: list[str], questions: list[str]) -> np.ndarray:
    embedder = find_embedder("minilm")
    assert isinstance(embedder, SentenceEmbedder)
    index = cached_vectors("wiki_kb", embedder, texts, embedder.embed_passages)
    queries = cached_vectors(name, embedder, questions, embedder.embed_queries)
    return np.concatenate(
        [_nearest(index, queries[start : start + 512]) for start in range(0, len(queries), 512)]
    )


def _nearest(index: np.ndarray, queries: np.ndarray) -> np.ndarray:
    scores = queries @ index.T
    best = np.argpartition(-scores, K, axis=1)[:, :K]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


def _save(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
