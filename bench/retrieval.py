"""How good and how fast is retrieval, and how early does a staged search know its answer?

Passages of a Wikipedia knowledge base, questions of NQ and HotpotQA whose gold passages are in it.
For each index: recall of gold passages, latency of a search (the query's embedding not counted),
build time and memory; and for staged search, after each stage, the share of queries whose ordered
top-5 is already the final one, and how much more it costs than a plain one. The yardstick in the
same run is the flat index; bm25s stands beside our own lexical search.

    python bench/retrieval.py --data ../shared/data --out bench/results/retrieval-cpu.json

Vectors are computed once (bench/cache, resumable after a kill).
"""

import argparse
import gc
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.measuring import rss_mb
from common.results import commit, cpu_device, finish, versions
from common.vector_cache import cached_vectors
from kvweave.cli.knowledge_bases import find_embedder
from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.catalogue_index import load_index, save_index
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.embedder import SentenceEmbedder, Vectors
from kvweave.corpus.index import VectorIndex, make_index
from kvweave.corpus.index.faiss_index import FaissIndex
from kvweave.corpus.search import fuse_ranks, search_words
from kvweave.types import Chunk, DocumentId, ParsedDocument, PlacedChunk

KINDS = ("flat", "ivf", "hnsw")
STAGES = 8
K = 10  # recall is counted at 5 and at 10
TOP = 5  # the list whose early standing is measured: what a RAG prompt usually holds
SETS = {
    "nq": "nq_oracle/nq_open_oracle.jsonl.gz",
    "hotpotqa": "hotpotqa/hotpotqa_distractor.jsonl.gz",
}

Ranking = list[int]
Row = dict[str, Any]


class Questions:
    """Query texts, vectors, and for each the set of its gold passages (places in the corpus)."""

    def __init__(self, path: Path, place_of: dict[str, int]) -> None:
        self.texts: list[str] = []
        self.gold: list[set[int]] = []
        for record in read_jsonl(path):
            passages = [p for p in record["passages"] if p.get("is_supporting", True)]
            self.texts.append(record["question"])
            self.gold.append({place_of[pid(p)] for p in passages})


def pid(passage: dict[str, str]) -> str:
    text = f"{passage['title']}\n{passage['text'].strip()}"
    return hashlib.sha1(text.encode()).hexdigest()[:12]


def recall(rankings: Sequence[Ranking], gold: Sequence[set[int]], k: int) -> float:
    """Mean share of a question's gold passages among its first k."""
    pairs = zip(rankings, gold, strict=True)
    return float(np.mean([len(g & set(r[:k])) / len(g) for r, g in pairs]))


def timed(search: Callable[[int], Ranking], num: int) -> tuple[list[Ranking], Row]:
    """All rankings, and p50/p95 of the time each took. Warmed up first."""
    for query in range(min(20, num)):
        search(query)
    rankings, times_ms = [], []
    for query in range(num):
        started = time.perf_counter()
        rankings.append(search(query))
        times_ms.append((time.perf_counter() - started) * 1e3)
    p50, p95 = np.percentile(times_ms, [50, 95])
    return rankings, {"p50_ms": round(float(p50), 3), "p95_ms": round(float(p95), 3)}


def score(rankings: Sequence[Ranking], gold: Sequence[set[int]]) -> Row:
    return {f"recall@{k}": round(recall(rankings, gold, k), 4) for k in (5, 10)}


def standing(index: VectorIndex, vectors: Vectors) -> list[Row]:
    """After each stage: share of queries whose ordered top-5 is final, and time spent so far."""
    final_at = np.zeros(STAGES)
    spent_ms: list[list[float]] = [[] for _ in range(STAGES)]
    for vector in vectors:
        lists = []
        started = time.perf_counter()
        for stage, hits in enumerate(index.search_staged(vector, TOP, STAGES)):
            spent_ms[stage].append((time.perf_counter() - started) * 1e3)
            lists.append(hits.ids.tolist())
        lists += [lists[-1]] * (STAGES - len(lists))
        assert lists[-1] == index.search(vector, TOP).ids.tolist(), "staged differs from plain"
        first = next(i for i in range(STAGES) if all(lists[i] == x for x in lists[i:]))
        final_at[first:] += 1
    total_ms = float(np.median(spent_ms[max(s for s in range(STAGES) if spent_ms[s])]))
    return [
        {
            "stage": stage + 1,
            "share_of_time": round(float(np.median(spent_ms[stage])) / total_ms, 3),
            "final": round(float(final_at[stage]) / len(vectors), 4),
        }
        for stage in range(STAGES)
        if spent_ms[stage]
    ]


def staged_over_plain(index: VectorIndex, vectors: Vectors) -> Row:
    """What a staged search costs, as a multiple of a plain one: by CPU time, and by comparisons
    where FAISS counts them (HNSW)."""
    import faiss

    def cost(search: Callable[[Vectors], object]) -> tuple[float, int]:
        for vector in vectors[:20]:
            search(vector)
        faiss.cvar.hnsw_stats.reset()
        started_s = time.thread_time()
        for vector in vectors:
            search(vector)
        return time.thread_time() - started_s, int(faiss.cvar.hnsw_stats.ndis)

    plain_s, plain_compared = cost(lambda vector: index.search(vector, TOP))
    staged_s, staged_compared = cost(lambda vector: list(index.search_staged(vector, TOP, STAGES)))
    compared = {"compared": round(staged_compared / plain_compared, 3)} if plain_compared else {}
    return {"cpu_time": round(staged_s / plain_s, 3), **compared}


def build_in_a_process(kind: str, vectors_file: Path, folder: Path) -> Row:
    """Build and save an index in a fresh process, so that its peak memory is its own."""
    script = Path(__file__).resolve()
    arguments = [sys.executable, str(script), "--build", kind, str(vectors_file), str(folder)]
    out = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    built: Row = json.loads(out.splitlines()[-1])
    return built


def build(kind: str, vectors_file: Path, folder: Path) -> None:
    from common.measuring import peak_rss_mb

    vectors = np.load(vectors_file)
    index = make_index(kind, vectors.shape[1], collection="")
    gc.collect()
    before_mb = rss_mb()
    started = time.perf_counter()
    index.add(np.arange(1, len(vectors) + 1, dtype=np.int64), vectors)
    build_s = time.perf_counter() - started
    assert isinstance(index, FaissIndex)
    save_index(folder / kind, index, 0)
    size_mb = (folder / kind).stat().st_size / 2**20
    print(
        json.dumps(
            {
                "build_s": round(build_s, 2),
                "peak_mb_over_vectors": round(peak_rss_mb() - before_mb, 1),
                "file_mb": round(size_mb, 1),
            }
        )
    )


def word_catalogue(folder: Path, texts: Sequence[str]) -> tuple[Catalogue, float]:
    """A catalogue that holds the passages as chunks, for its full-text table."""
    catalogue = Catalogue(folder / "catalogue.sqlite")
    started = time.perf_counter()
    chunks = [
        Chunk(make_chunk_id([place]), "", text, (place,)) for place, text in enumerate(texts, 1)
    ]
    catalogue.put_vectors([c.id for c in chunks], np.zeros((len(chunks), 1), np.float32))
    placed = [PlacedChunk(chunk, 0, 0) for chunk in chunks]
    catalogue.put(ParsedDocument(DocumentId("all"), "bench", "", ""), "", placed)
    return catalogue, time.perf_counter() - started


def bm25s_search(texts: Sequence[str]) -> tuple[Callable[[str], Ranking], float]:
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    started = time.perf_counter()
    tokens = bm25s.tokenize(list(texts), stopwords="en", stemmer=stemmer, show_progress=False)
    model = bm25s.BM25()
    model.index(tokens, show_progress=False)
    took_s = time.perf_counter() - started

    def search(text: str) -> Ranking:
        query = bm25s.tokenize([text], stopwords="en", stemmer=stemmer, show_progress=False)
        found: Ranking = model.retrieve(query, k=K, show_progress=False)[0][0].tolist()
        return found

    return search, took_s


def measure(args: argparse.Namespace, work: Path) -> Row:
    embedder = find_embedder(args.embedder)
    assert isinstance(embedder, SentenceEmbedder)
    passages = list(read_jsonl(args.data / "wiki_kb" / "passages.jsonl.gz"))
    texts = [f"{p['title']}\n{p['text'].strip()}" for p in passages]
    vectors = cached_vectors("wiki_kb", embedder, texts, embedder.embed_passages)
    np.save(work / "vectors.npy", vectors)
    place_of = {pid(p): place for place, p in enumerate(passages)}
    sets = {name: Questions(args.data / path, place_of) for name, path in SETS.items()}
    query_vectors = {
        name: cached_vectors(name, embedder, q.texts, embedder.embed_queries)
        for name, q in sets.items()
    }
    results: Row = {"passages": len(texts), "rows": [], "standing": {}, "staged_over_plain": {}}
    builds = {kind: build_in_a_process(kind, work / "vectors.npy", work) for kind in KINDS}
    words, words_s = word_catalogue(work, texts)
    bm25, bm25_s = bm25s_search(texts)
    builds |= {"words": {"build_s": round(words_s, 2)}, "bm25s": {"build_s": round(bm25_s, 2)}}
    results["builds"] = builds
    for name, questions in sets.items():
        queries = query_vectors[name][: args.limit]
        gold, asked = questions.gold[: args.limit], questions.texts[: args.limit]
        for method, search in methods(work, words, bm25, asked, queries, builds):
            rankings, latency = timed(search, len(queries))
            results["rows"].append(
                {"set": name, "method": method, **score(rankings, gold), **latency}
            )
        for kind in KINDS:
            loaded = load_index(work / kind)
            assert loaded is not None
            results["standing"][f"{name}/{kind}"] = standing(loaded.vectors, queries)
            staged = staged_over_plain(loaded.vectors, queries)
            results["staged_over_plain"][f"{name}/{kind}"] = staged
    return results


def methods(
    work: Path,
    words: Catalogue,
    bm25: Callable[[str], Ranking],
    asked: Sequence[str],
    queries: Vectors,
    builds: dict[str, Row],
) -> Iterator[tuple[str, Callable[[int], Ranking]]]:
    """(name, search of the n-th question → places in the corpus, best first)."""
    flat: VectorIndex | None = None
    for kind in KINDS:
        loaded = load_index(work / kind)
        assert loaded is not None
        index: VectorIndex = loaded.vectors
        flat = flat or index
        yield kind, lambda n, index=index: (index.search(queries[n], K).ids - 1).tolist()
    assert flat is not None
    dense = flat

    def by_words(n: int, k: int = K) -> Ranking:
        return [vector_id - 1 for vector_id, _ in search_words(words, asked[n], k)]

    def hybrid(n: int) -> Ranking:
        near = (dense.search(queries[n], 50).ids - 1).tolist()
        return [place for place, _ in fuse_ranks([near, by_words(n, 50)], K)]

    yield "words", by_words
    yield "bm25s", lambda n: bm25(asked[n])
    yield "hybrid", hybrid


def show(results: Row) -> None:
    console = Console(width=100)
    table = Table(title=f"{results['passages']:,} passages", box=None, header_style="bold")
    for heading in ("set", "method", "recall@5", "recall@10", "p50 ms", "p95 ms", "build s"):
        table.add_column(heading, justify="left" if heading in ("set", "method") else "right")
    for row in results["rows"]:
        built = results["builds"].get(row["method"], {}).get("build_s", "")
        table.add_row(
            row["set"], row["method"], *(str(v) for v in list(row.values())[2:]), str(built)
        )
    console.print(table)
    stages = Table(title="ordered top-5 final after stage (share of search time)", box=None)
    for heading in ("set/index", *map(str, range(1, STAGES + 1))):
        stages.add_column(heading, justify="right")
    for name, rows in results["standing"].items():
        cells = [f"{r['final']:.1%}\n({r['share_of_time']:.0%})" for r in rows]
        stages.add_row(name, *cells)
    console.print(stages)
    for kind in KINDS:
        console.print(f"{kind}: {results['builds'][kind]}")
    for name, staged in results["staged_over_plain"].items():
        console.print(f"{name}: a staged search is {staged} times a plain one")


def main() -> None:
    if sys.argv[1:2] == ["--build"]:
        build(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb, nq_oracle…")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--limit", type=int, default=None, help="questions per set, for a trial")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        results = measure(args, Path(work))
    show(results)
    finish(
        __doc__,
        {
            "bench": "retrieval",
            "commit": commit(),
            "device": cpu_device(),
            "config": {"embedder": "all-MiniLM-L6-v2", "k": K, "top": TOP, "stages": STAGES},
            "versions": versions("faiss-cpu", "sentence-transformers", "bm25s", "numpy"),
            "results": results,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
