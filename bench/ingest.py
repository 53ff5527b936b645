"""What does ingest cost on top of embedding?

Passages of a Wikipedia knowledge base as (title, text) pairs into a new knowledge base: cut, embed,
catalogue, words, index, all on the disk. The baseline in the same run is the bare embedder, called
once with the very same chunk texts: one `SentenceTransformer.encode` over everything, which may
sort all of them by length. The two alternate, so that a slow moment of the machine hits both.

    python bench/ingest.py --data ../shared/data --out bench/results/ingest-cpu.json
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import commit, cpu_device, finish, versions
from kvweave.cli.knowledge_bases import find_embedder, find_tokenizer
from kvweave.corpus.chunker import Chunker
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest import ingest
from kvweave.text.tokenizer import Tokenizer

Pair = tuple[str, str]


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float  # of all threads: steadier than the clock when the machine is shared


class Stopwatch:
    def __enter__(self) -> "Stopwatch":
        self._started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._started
        self.spent = Spent(time.perf_counter() - wall, time.process_time() - cpu)


def bare(embedder: SentenceEmbedder, texts: list[str]) -> Spent:
    """One call to the model itself, nothing of ours around it."""
    with Stopwatch() as watch:
        embedder.model.encode(texts, batch_size=embedder.batch_size, show_progress_bar=False)
    return watch.spent


def whole(
    folder: Path, tokenizer: Tokenizer, embedder: SentenceEmbedder, pairs: list[Pair]
) -> Spent:
    """From (title, text) pairs to a knowledge base that answers searches.

    Called again with the same folder, it finds everything unchanged.
    """
    with Stopwatch() as watch:
        settings = {"tokenizer": tokenizer, "embedder": embedder, "create": True}
        with KnowledgeBase.open(folder, **settings) as kb:
            report = ingest(kb, pairs)
    assert not report.skipped, report.skipped[:3]
    return watch.spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer cuts the chunks")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--passages", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, help="for torch; 1 is steadiest on a busy machine")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer, embedder = find_tokenizer(args.model), find_embedder(args.embedder)
    assert isinstance(embedder, SentenceEmbedder)
    records = read_jsonl(args.data / "wiki_kb" / "passages.jsonl.gz")
    pairs = [(r["title"], r["text"]) for r in itertools.islice(records, args.passages)]
    chunker = Chunker(tokenizer)
    texts = list({p.chunk.id: p.chunk.text for t, x in pairs for p in chunker.cut(t, x)}.values())
    embedder.embed_passages(texts[:64])  # warm up
    rounds: list[tuple[Spent, Spent, Spent]] = []
    with tempfile.TemporaryDirectory() as work:
        for number in range(args.rounds):
            folder = Path(work) / str(number)
            if number % 2 == 0:  # take turns at going first
                alone = bare(embedder, texts)
                full = whole(folder, tokenizer, embedder, pairs)
            else:
                full = whole(folder, tokenizer, embedder, pairs)
                alone = bare(embedder, texts)
            rounds.append((alone, full, whole(folder, tokenizer, embedder, pairs)))
    wall_ratios = [alone.wall_s / full.wall_s for alone, full, _ in rounds]
    cpu_ratios = [alone.cpu_s / full.cpu_s for alone, full, _ in rounds]
    results = {
        "passages": len(pairs),
        "chunks": len(texts),
        "bare_embedder_per_s": round(
            len(pairs) / statistics.median(r[0].wall_s for r in rounds), 1
        ),
        "ingest_per_s": round(len(pairs) / statistics.median(r[1].wall_s for r in rounds), 1),
        "ratio": round(statistics.median(wall_ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "ratios": [round(r, 3) for r in wall_ratios],
        "cpu_ratios": [round(r, 3) for r in cpu_ratios],
        "second_run_s": round(statistics.median(r[2].wall_s for r in rounds), 3),
    }
    table = Table(box=None, header_style="bold")
    for heading in ("passages", "bare embedder /s", "ingest /s", "ratio", "CPU ratio", "again s"):
        table.add_column(heading, justify="right")
    keys = ("passages", "bare_embedder_per_s", "ingest_per_s", "ratio", "cpu_ratio", "second_run_s")
    table.add_row(*(str(results[key]) for key in keys))
    Console().print(table)
    finish(
        __doc__,
        {
            "bench": "ingest",
            "commit": commit(),
            "device": cpu_device(),
            "config": {
                "embedder": "all-MiniLM-L6-v2",
                "rounds": args.rounds,
                "chunk_tokens": 256,
                "torch_threads": torch.get_num_threads(),
            },
            "versions": versions("faiss-cpu", "sentence-transformers", "torch", "tokenizers"),
            "results": results,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
