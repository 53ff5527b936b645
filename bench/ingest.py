"""What does ingest cost on top of embedding?

Passages of a Wikipedia knowledge base as (title, text) pairs into a new knowledge base: cut, embed,
catalogue, words, index, all on the disk. The baseline in the same run is the bare embedder, called
once with the very same chunk texts: one `SentenceTransformer.encode` over everything, which may
sort all of them by length. The two alternate, so that a slow moment of the machine hits both.

    python bench/ingest.py --data DATA --model smollm2 --embedder minilm
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import commit, cpu_device, finish, read_jsonl, versions
from kvweave.cli.knowledge_bases import find_embedder, find_tokenizer
from kvweave.corpus.chunker import Chunker
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest import ingest
from kvweave.tokenizer import Tokenizer

Pair = tuple[str, str]


def bare(embedder: SentenceEmbedder, texts: list[str]) -> float:
    """Seconds of one call to the model itself, nothing of ours around it."""
    started = time.perf_counter()
    embedder.model.encode(texts, batch_size=embedder.batch_size, show_progress_bar=False)
    return time.perf_counter() - started


def whole(
    folder: Path, tokenizer: Tokenizer, embedder: SentenceEmbedder, pairs: list[Pair]
) -> float:
    """Seconds from (title, text) pairs to a knowledge base that answers searches."""
    started = time.perf_counter()
    with KnowledgeBase.open(folder, tokenizer=tokenizer, embedder=embedder, create=True) as kb:
        report = ingest(kb, pairs)
    took_s = time.perf_counter() - started
    assert report.is_complete, report.skipped[:3]
    return took_s


def again(
    folder: Path, tokenizer: Tokenizer, embedder: SentenceEmbedder, pairs: list[Pair]
) -> float:
    """Seconds of a second run that finds everything unchanged."""
    started = time.perf_counter()
    with KnowledgeBase.open(folder, tokenizer=tokenizer, embedder=embedder) as kb:
        report = ingest(kb, pairs)
    assert report.added == report.updated == 0
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer cuts the chunks")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--passages", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    tokenizer, embedder = find_tokenizer(args.model), find_embedder(args.embedder)
    assert isinstance(embedder, SentenceEmbedder)
    records = read_jsonl(args.data / "wiki_kb" / "passages.jsonl.gz")
    pairs = [(r["title"], r["text"]) for r in itertools.islice(records, args.passages)]
    chunker = Chunker(tokenizer)
    texts = list({p.chunk.id: p.chunk.text for t, x in pairs for p in chunker.cut(t, x)}.values())
    embedder.embed_passages(texts[:64])  # warm up
    bare_s, whole_s, again_s = [], [], []
    with tempfile.TemporaryDirectory() as work:
        for number in range(args.rounds):
            folder = Path(work) / str(number)
            if number % 2 == 0:  # take turns at going first
                bare_s.append(bare(embedder, texts))
            whole_s.append(whole(folder, tokenizer, embedder, pairs))
            if number % 2:
                bare_s.append(bare(embedder, texts))
            again_s.append(again(folder, tokenizer, embedder, pairs))
    ratios = [b / w for b, w in zip(bare_s, whole_s, strict=True)]
    results = {
        "passages": len(pairs),
        "chunks": len(texts),
        "bare_embedder_per_s": round(len(pairs) / statistics.median(bare_s), 2),
        "ingest_per_s": round(len(pairs) / statistics.median(whole_s), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(r, 4) for r in ratios],
        "second_run_s": round(statistics.median(again_s), 3),
    }
    table = Table(box=None, header_style="bold")
    for heading in ("passages", "bare embedder /s", "ingest /s", "ratio", "second run s"):
        table.add_column(heading, justify="right")
    keys = ("passages", "bare_embedder_per_s", "ingest_per_s", "ratio", "second_run_s")
    table.add_row(*(str(results[key]) for key in keys))
    Console().print(table)
    finish(
        {
            "bench": "ingest",
            "commit": commit(),
            "device": cpu_device(),
            "config": {"embedder": "all-MiniLM-L6-v2", "rounds": args.rounds, "chunk_tokens": 256},
            "versions": versions("faiss-cpu", "sentence-transformers", "torch", "tokenizers"),
            "results": results,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
