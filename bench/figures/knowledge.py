"""Passages of Wikipedia as a knowledge base: vectors, the nearest of a passage, and what is
retrieved together (FusionRAG, figure 7a). No language model runs here."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_jsonl
from common.vector_cache import cached_vectors
from figures.neighbours import Nearest
from kvweave.calibrate.questions import Passage
from kvweave.cli.knowledge_bases import find_embedder

SETS = {
    "hotpot": "hotpotqa/hotpotqa_distractor.jsonl.gz",
    "2wiki": "2wikimultihopqa/2wiki.jsonl.gz",
    "nq": "nq_open/nq_open_questions.jsonl.gz",
}
TOPS = (2, 5, 10)
QUESTIONS = 300  # of each set, where only retrieval is asked


class Knowledge:
    """The first `count` passages with their vectors by MiniLM, made once. They lie in the order of
    drawn ids: the first ones are a fair sample."""

    def __init__(self, data: Path, count: int) -> None:
        self.embedder: Any = find_embedder("minilm")
        rows = list(islice(read_jsonl(data / "wiki_kb/passages.jsonl.gz"), count))
        self.passages = [Passage(row["text"], row["title"]) for row in rows]
        texts = [_text(passage) for passage in self.passages]
        self.vectors = cached_vectors("wiki_kb", self.embedder, texts, self.embedder.embed_passages)

    def nearest_of(self, passages: Sequence[Passage]) -> Nearest:
        """A function that knows the nearest passages of `passages`. A passage that shares its text
        with one of them, or holds it, is no neighbour of it."""
        vectors = self.embedder.embed_passages([_text(passage) for passage in passages])
        places = {passage: i for i, passage in enumerate(passages)}

        def nearest(passage: Passage, count: int) -> Sequence[Passage]:
            order = np.argsort(-(self.vectors @ vectors[places[passage]]))[: 2 * count + 8]
            own = passage.text.strip()
            near = [self.passages[i] for i in order]
            return [p for p in near if own not in p.text and p.text.strip() not in own][:count]

        return nearest


def share_together(
    retrieved: Sequence[Sequence[int]], near: Sequence[Sequence[Sequence[int]]]
) -> dict[str, float]:
    """Of retrieved passages, how many have one of their nearest among those retrieved with them.

    `retrieved` are places by question, `near` the nearest places of each of them. `chunks` is the
    share of passages with one or more beside them, `questions` that of questions with such a pair.
    """
    has = [
        [bool(set(own) & (set(places) - {place})) for place, own in zip(places, lists, strict=True)]
        for places, lists in zip(retrieved, near, strict=True)
    ]
    return {
        "chunks": round(float(np.mean([flag for flags in has for flag in flags])), 4),
        "questions": round(float(np.mean([any(flags) for flags in has])), 4),
    }


def measure_together(data: Path, num_passages: int, count: int) -> dict[str, Any]:
    """What is retrieved together, by set and number of passages retrieved."""
    knowledge = Knowledge(data, num_passages)
    found: dict[str, Any] = {"questions": count, "passages": len(knowledge.passages)}
    for name, path in SETS.items():
        texts = [
            row["question"] for row, _ in zip(read_jsonl(data / path), range(count), strict=False)
        ]
        asked = knowledge.embedder.embed_queries(texts)
        order = _best(knowledge.vectors, asked, max(TOPS))
        flat = sorted({int(place) for places in order for place in places})
        own = _best(knowledge.vectors, knowledge.vectors[flat], max(TOPS) + 1)
        near_of = {p: [q for q in row if q != p] for p, row in zip(flat, own.tolist(), strict=True)}
        found[name] = {}
        for top in TOPS:
            places = order[:, :top].tolist()
            for reach in dict.fromkeys((top, max(TOPS))):
                near = [[near_of[p][:reach] for p in each] for each in places]
                found[name][f"top {top}, nearest {reach}"] = share_together(places, near)
    return found


def _best(vectors: np.ndarray, asked: np.ndarray, count: int) -> np.ndarray:
    """[questions, count]: places of the nearest vectors, nearest first."""
    parts = []
    for start in range(0, len(asked), 256):
        scores = asked[start : start + 256] @ vectors.T
        best = np.argpartition(-scores, count, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
        parts.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(parts)


def _text(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text.strip()}"
