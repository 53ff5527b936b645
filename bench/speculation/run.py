"""How much of a search does speculative prefill hide, and what does it waste?

Questions of Natural Questions over Wikipedia passages, an IVF index whose nearest clusters are
probed first. "off" searches and then computes the prompt; "on" guesses after every stage but the
last; "auto" guesses where what it learnt says that it pays, which is the default. Greedy answers of
all three must be the same tokens.

    python bench/speculation/run.py --data DATA

36k passages are searched in milliseconds, so the index is made as large as one that takes a while:
every vector is stored `--copies` times, all but the first scaled down. Scaling changes no cluster,
and a hundredth of a score is never among the best: the same lists as without copies, found by
really comparing so many vectors. `--shares` are the parts of the clusters that are probed. The
query's embedding is not counted. Vectors are computed once (bench/cache).

Prefill and search share the cores and the memory of a CPU, so "here" they slow each other down.
"elsewhere" is a search that does not use them, as beside a
GPU or on a vector server: the same lists after the same times, measured of this index by itself,
while this process sleeps.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from common.vector_cache import cached_vectors
from kvweave.app.answer.guessing import MAX_STAGES
from kvweave.app.answer.notes import RetrievedChunk
from kvweave.app.library.runtime import EngineClient
from kvweave.cli.knowledge_bases import find_embedder
from kvweave.corpus.embedder import Vectors
from kvweave.engine.config import EngineConfig
from kvweave.engine.sampling import Sampling
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.prompt import Prompt, lay_out
from kvweave.text.tokenizer import Tokenizer
from speculation.modes import LEARN, MODES, WARM_UP, Bench, Row
from speculation.search_only_kb import SearchOnlyKB, make_large


@dataclass
class World:
    """What is searched, by questions whose vectors are known."""

    kb: SearchOnlyKB
    asked: list[str]  # first those that are measured, then those that teach
    vectors: Vectors
    passages: int

    def level(self, bench: Bench, where: str, share: float, num_questions: int) -> Row:
        kb = self.kb
        kb.index.share = share
        kb.elsewhere = where == "elsewhere"
        questions = [WARM_UP, *self.asked[:num_questions]]
        for question in questions:
            kb.record(kb.vectors[question], bench.k)
        learnt = [kb.learnt(vector, bench.k) for vector in self.vectors[num_questions:]]
        found = bench.level(f"{where} {share}", questions, learnt)
        return {"where": where, "share": share, **found}


def open_world(
    data: Path, tokenizer: Tokenizer, num_questions: int, copies: int, most: int | None = None
) -> World:
    """An index over Wikipedia's passages, `most` of them, so many times as large; questions of
    Natural Questions to be measured, and LEARN more."""
    embedder = find_embedder("minilm")
    passages = list(read_jsonl(data / "wiki_kb" / "passages.jsonl.gz"))[:most]
    texts = [f"{p['title']}\n{p['text'].strip()}" for p in passages]
    name = "wiki_kb" if most is None else f"wiki_kb_{most}"
    vectors = cached_vectors(name, embedder, texts, embedder.embed_passages)
    records = list(read_jsonl(data / "nq_oracle" / "nq_open_oracle.jsonl.gz"))
    asked = [r["question"] for r in records[: num_questions + LEARN]]
    asked_vectors = cached_vectors("nq_speculation", embedder, asked, embedder.embed_queries)
    by_text = dict(zip(asked, asked_vectors, strict=True))
    by_text[WARM_UP] = embedder.embed_query(WARM_UP)
    kb = SearchOnlyKB(make_large(vectors, copies), passages, tokenizer, by_text)
    return World(kb, asked, asked_vectors, len(passages))


def show(rows: Sequence[Row], questions: int, vectors: int) -> None:
    table = Table(title=f"{questions} questions, {vectors:,} vectors", box=None)
    for heading in (
        "search is", "probed", "search", "prefill", "mode", "not hidden", "cut", "hidden",
        "TTFT", "guesses", "wasted", "same",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        for mode in MODES:
            cells = row[mode]
            first = mode == MODES[0]
            table.add_row(
                row["where"] if first else "",
                f"{row['share']:.1%}" if first else "",
                f"{row['search_ms']:.0f} ms" if first else "",
                f"{row['prefill_ms']:.0f} ms" if first else "",
                mode,
                f"{cells['not_overlapped_ms']:.0f} ms",
                f"{cells['cut']:.1f}x",
                f"{cells['hidden_share']:.0%}",
                f"{cells['ttft_ms']:.0f} ms",
                f"{cells['guesses']:.1f}",
                f"{cells['wasted_tokens']:.0f}",
                f"{cells['same_answers']}/{questions}",
            )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb, nq_oracle")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--k", type=int, default=2, help="chunks of a prompt; RAGCache's has 2")
    parser.add_argument("--passages", type=int, help="of Wikipedia's; [all 35,745]")
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--here", type=float, nargs="*", default=[1.0], help="as --shares")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the prefill")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = locate(args.model)
    tokenizer, device = Tokenizer(folder), torch.device(args.device)
    world = open_world(args.data, tokenizer, args.questions, args.copies, args.passages)
    decoder = load_decoder(folder, device=args.device, dtype="float32", quant=args.quant)
    asking = EngineClient(decoder, EngineConfig(pool_tokens=1 << 15))

    def prompt_of(question: str, found: Sequence[RetrievedChunk]) -> Prompt:
        return lay_out(tokenizer, question, [chunk.token_ids for chunk in found])

    eos_ids = sorted(tokenizer.eos_ids)
    bench = Bench(world.kb, asking, prompt_of, args.k, Sampling(max_tokens=6), eos_ids, device)
    rows = [world.level(bench, "elsewhere", share, args.questions) for share in args.shares]
    rows += [world.level(bench, "here", share, args.questions) for share in args.here]
    stats = asking.engine.stats()
    asking.close()
    num_questions, num_vectors = args.questions, len(world.kb.index)
    show(rows, num_questions, num_vectors)
    config = {
        "model": args.model,
        "quant": args.quant,
        "k": args.k,
        "passages": world.passages,
        "copies": args.copies,
        "vectors": num_vectors,
        "stages": MAX_STAGES,
        "questions": num_questions,
        "threads": args.threads,
    }
    same = all(row[mode]["same_answers"] == num_questions for row in rows for mode in MODES)
    counted = {name: stats[name] for name in stats if name.startswith("speculation")}
    header = result_header("speculation", args.device)
    results = {
        "cut": {
            where: {
                mode: [row[mode]["cut"] for row in rows if row["where"] == where]
                for mode in MODES[1:]
            }
            for where in ("elsewhere", "here")
        },
        "same_answers": same,
        "rows": rows,
        "engine": counted,
    }
    finish(__doc__, {**header, "config": config, **results}, args.out)


if __name__ == "__main__":
    main()
