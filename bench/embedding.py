"""What do 8-bit products in the embedder cost in retrieval, and what do they gain in time?

Questions of SQuAD, HotpotQA and NQ whose gold passages are known, over one pool of the passages of
all three, found by the exact nearest vectors: once with an embedder in float32, once as `auto` has
it on this machine. For each kind recall (share of a question's gold passages) at 1, 5 and 10 and
the mean reciprocal rank of the first gold one; their differences, paired by question, with a 95 %
bootstrap interval; and `mixed`: questions in 8 bits over passages in float32, as in a knowledge
base that an older kvweave made, and the other way round. `kept@5`: of the five best passages by
float32, the share that is among the five best in 8 bits, labelled or not.

Then the seconds that both take for the chunks of this repository's docs/, in turns.

    python bench/embedding.py --data ../shared/data --out bench/results/embedding-cpu.json

Vectors are computed once (bench/cache, resumable after a kill); --parts times measures those alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from common.files import REPO, read_jsonl
from common.measuring import alternate, medians
from common.results import finish, result_header
from common.vector_cache import cached_vectors
from kvweave.cli.knowledge_bases import find_tokenizer
from kvweave.corpus.chunker import Chunker
from kvweave.corpus.embedder import SentenceEmbedder, Vectors
from kvweave.corpus.parsers import ParseLimits, parse
from kvweave.model.files.locate import locate

MODEL = "qwen2.5-coder-0.5b"  # kvweave's default
PARTS = ("recall", "times")
QUESTIONS = {"squad": 600, "hotpotqa": 300, "nq": 500}
DISTRACTED = 155  # of HotpotQA, whose eight wrong passages are in the pool too
FIGURES = ("recall@1", "recall@5", "recall@10", "mrr")
DRAWS = 4000
SEED = 0
Row = dict[str, Any]


class Kind(NamedTuple):
    """Questions of one data set."""

    name: str
    texts: list[str]
    gold: list[set[int]]  # places in the pool


class Pool:
    """Passages of all kinds, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, title: str, text: str) -> int:
        joined = f"{title}\n{text.strip()}"
        if joined not in self._places:
            self._places[joined] = len(self.texts)
            self.texts.append(joined)
        return self._places[joined]


def read_kinds(data: Path) -> tuple[Pool, list[Kind]]:
    """Questions of each kind, with the passages that belong to them."""
    pool = Pool()
    paragraphs = {
        p["pid"]: (p["title"], p["text"])
        for p in read_jsonl(data / "squad_v1.1_dev" / "paragraphs.jsonl.gz")
    }
    squad = Kind("squad", [], [])
    for record in read_jsonl(data / "squad_v1.1_dev" / "questions.jsonl.gz"):
        if len(squad.texts) == QUESTIONS["squad"]:
            break
        squad.texts.append(record["question"])
        squad.gold.append({pool.place(*paragraphs[record["pid"]])})
    kinds = [squad]
    files = {
        "hotpotqa": "hotpotqa/hotpotqa_distractor.jsonl.gz",
        "nq": "nq_oracle/nq_open_oracle.jsonl.gz",
    }
    for name, file in files.items():
        kind = Kind(name, [], [])
        for record in read_jsonl(data / file):
            if len(kind.texts) == QUESTIONS[name]:
                break
            gold = set()
            for passage in record["passages"]:
                is_gold = passage.get("is_supporting", True)
                if is_gold or len(kind.texts) < DISTRACTED:
                    place = pool.place(passage["title"], passage["text"])
                    gold |= {place} if is_gold else set()
            kind.texts.append(record["question"])
            kind.gold.append(gold)
        kinds.append(kind)
    return pool, kinds


def figures(queries: Vectors, passages: Vectors, gold: Sequence[set[int]]) -> NDArray[np.float64]:
    """[N, FIGURES], a row for each question."""
    scores = queries @ passages.T
    rows = []
    for score, right in zip(scores, gold, strict=True):
        ranks = sorted(int((score > score[place]).sum()) for place in right)  # from 0
        recalls = [sum(rank < k for rank in ranks) / len(right) for k in (1, 5, 10)]
        rows.append([*recalls, 1 / (1 + ranks[0])])
    return np.array(rows)


def kept(exact: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Share of the five best passages by `exact` scores [N, P] that are so by `other` ones."""
    pairs = zip(
        *(np.argpartition(-each, 5)[:, :5].tolist() for each in (exact, other)), strict=True
    )
    return float(np.mean([len(set(a) & set(b)) / 5 for a, b in pairs]))


def compare(exact: NDArray[np.float64], other: NDArray[np.float64]) -> Row:
    """The other's figures less the exact ones', in points, with their intervals."""
    apart = 100 * (other - exact)
    draws = np.random.default_rng(SEED).integers(0, len(apart), (DRAWS, len(apart)))
    drawn = np.stack([apart[draw].mean(axis=0) for draw in draws])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return {
        name: [round(float(v), 3) for v in (apart[:, n].mean(), low[n], high[n])]
        for n, name in enumerate(FIGURES)
    }


def embedder_of(weights: Any) -> SentenceEmbedder:
    return SentenceEmbedder(locate("minilm"), name="minilm", device="cpu", weights=weights)


def measure_recall(data: Path) -> Row:
    pool, kinds = read_kinds(data)
    vectors: dict[str, Vectors] = {}
    queries: dict[str, list[Vectors]] = {}
    words = {}
    for weights in ("float32", "auto"):
        embedder = embedder_of(weights)
        words[weights] = embedder.weights_words
        vectors[weights] = cached_vectors(
            "embedding", embedder, pool.texts, embedder.embed_passages
        )
        queries[weights] = [
            cached_vectors("embedding", embedder, kind.texts, embedder.embed_queries)
            for kind in kinds
        ]
    cosines = (vectors["float32"] * vectors["auto"]).sum(axis=1)
    rows = []
    combined: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    for n, kind in enumerate(kinds):
        row: Row = {"kind": kind.name, "questions": len(kind.texts)}
        found = {}
        for asked in ("float32", "auto"):
            for held in ("float32", "auto"):
                each = figures(queries[asked][n], vectors[held], kind.gold)
                found[asked, held] = each
                combined.setdefault((asked, held), []).append(each)
        exact = found["float32", "float32"]
        for label, pair in LABELS.items():
            row[label] = dict(zip(FIGURES, found[pair].mean(axis=0).round(4).tolist(), strict=True))
            if label != "float32":
                row[f"{label}_less_float32"] = compare(exact, found[pair])
        rows.append(row)
    exact = np.concatenate(combined["float32", "float32"])
    total: Row = {"kind": "all", "questions": len(exact)}
    for label, pair in LABELS.items():
        each = np.concatenate(combined[pair])
        total[label] = dict(zip(FIGURES, each.mean(axis=0).round(4).tolist(), strict=True))
        if label != "float32":
            total[f"{label}_less_float32"] = compare(exact, each)
    return {
        "passages": len(pool.texts),
        "weights": words,
        "cosine_mean": round(float(cosines.mean()), 5),
        "cosine_least": round(float(cosines.min()), 5),
        "kept@5": round(
            kept(*(np.concatenate(queries[w]) @ vectors[w].T for w in ("float32", "auto"))), 4
        ),
        "rows": [*rows, total],
    }


# (questions, passages) by weights
LABELS = {
    "float32": ("float32", "float32"),
    "auto": ("auto", "auto"),
    "mixed_old_base": ("auto", "float32"),
    "mixed_new_base": ("float32", "auto"),
}


def doc_chunks() -> list[str]:
    """As `kvweave ingest docs/` cuts them for the default model."""
    chunker = Chunker(find_tokenizer(MODEL))
    texts = []
    for path in sorted((REPO / "docs").rglob("*.md")):
        for record in parse(path, path.read_bytes(), ParseLimits()):
            texts += [placed.chunk.text for placed in chunker.cut(record.title, record.text)]
    return texts


def measure_times(repeats: int) -> Row:
    texts = doc_chunks()
    embedders = {weights: embedder_of(weights) for weights in ("float32", "auto")}
    runs = {w: (lambda e=e: e.embed_passages(texts)) for w, e in embedders.items()}
    for each in embedders.values():
        each.embed_passages(texts[:8])  # loads it
    times = alternate(runs, repeats, warmups=0)
    middle = medians(times)
    return {
        "chunks": len(texts),
        "tokens": sum(map(embedders["float32"].num_tokens, texts)),
        "weights": {w: e.weights_words for w, e in embedders.items()},
        "seconds": {w: [round(s, 2) for s in each] for w, each in times.items()},
        "speed_up": round(middle["float32"] / middle["auto"], 2),
    }


def show(found: Row) -> None:
    console = Console(width=110)
    if recall := found.get("recall"):
        table = Table(title=f"{recall['passages']:,} passages", box=None, header_style="bold")
        for heading in ("kind", "questions", "vectors", *FIGURES):
            table.add_column(heading, justify="right")
        for row in recall["rows"]:
            for label in LABELS:
                values = [f"{row[label][name]:.4f}" for name in FIGURES]
                table.add_row(row["kind"], str(row["questions"]), label, *values)
                if label != "float32":
                    apart = row[f"{label}_less_float32"]
                    words = [f"{a:+.2f} [{b:+.2f}, {c:+.2f}]" for a, b, c in apart.values()]
                    table.add_row("", "", "points", *words)
        console.print(table)
        console.print(f"cosine {recall['cosine_mean']}, least {recall['cosine_least']}")
        console.print(f"of the five best passages {recall['kept@5']:.1%} stay")
    if times := found.get("times"):
        console.print(f"{times['chunks']} chunks of docs/: {times['seconds']} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with squad_v1.1_dev, hotpotqa, nq_oracle")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    if "recall" in args.parts and args.data is None:
        parser.error("recall needs --data")
    found: Row = {}
    if "recall" in args.parts:
        found["recall"] = measure_recall(args.data)
    if "times" in args.parts:
        found["times"] = measure_times(args.repeats)
    show(found)
    config = {"embedder": "minilm", "questions": QUESTIONS, "draws": DRAWS}
    finish(__doc__, {**result_header("embedding", "cpu"), "config": config, **found}, args.out)


if __name__ == "__main__":
    main()
