"""How much of a search does speculative prefill hide, and what does it waste?

Questions of Natural Questions over Wikipedia passages, an IVF index whose nearest clusters are
probed first. "off" searches and then computes the prompt; "on" guesses after every stage but the
last; "auto" guesses where what it learnt says that it pays, which is the default. Greedy answers of
all three must be the same tokens.

    python bench/speculation/run.py --data DATA

36k passages are searched in milliseconds, so the index is made as large as one that takes a while:
every vector is stored `--copies` times, all but the first scaled to a tenth. Scaling changes no
cluster, and a tenth of a score is never among the best: the same lists as without copies, found by
really comparing so many vectors. `--shares` are the parts of the clusters that are probed. The
query's embedding is not counted. Vectors are computed once (bench/cache).

Prefill and search share the cores and the memory of a CPU, so "here" they slow each other down.
"elsewhere" is a search that does not use them, as beside a
GPU or on a vector server: the same lists after the same times, measured of this index by itself,
while this process sleeps.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from rich.console import Console
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from common.vector_cache import cached_vectors
from kvweave.app.answer.speculation import Speculation, SpeculationConfig
from kvweave.app.answer.token_stream import Submission
from kvweave.app.notes import AnswerNotes
from kvweave.app.question import Question, SpeculationMode
from kvweave.app.requests import exact_request
from kvweave.app.runtime import EngineClient
from kvweave.cli.knowledge_bases import find_embedder
from kvweave.corpus.embedder import Vectors
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.config import EngineConfig
from kvweave.engine.sampling import Sampling
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.plan.search_pace import MAX_STAGES, Paces, SearchPace
from kvweave.text.prompt import lay_out
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Hit
from speculation.search_only_kb import SearchOnlyKB, make_large

MODES: tuple[SpeculationMode, ...] = ("off", "on", "auto")
WARM_UP = "Who are you?"
LEARN = 16  # searches that teach "auto" before anything is measured
Row = dict[str, Any]


class Measured(NamedTuple):
    """One question, answered in one mode."""

    tokens: list[int]
    ttft_s: float
    search_s: float
    open_s: float  # of the search, while nothing of the answer was computed
    guesses: int
    wasted: int  # tokens


@dataclass
class Bench:
    kb: SearchOnlyKB
    asking: EngineClient
    tokenizer: Tokenizer
    k: int
    sampling: Sampling
    device: torch.device

    def ask(self, speculation: Speculation, question: str, namespace: str) -> Measured:
        """`namespace` keeps what other modes have computed out of reach."""

        def submission_of(hits: Sequence[Hit]) -> Submission:
            prompt = lay_out(self.tokenizer, question, [hit.chunk.token_ids for hit in hits])
            eos_ids = self.tokenizer.eos_ids
            request = exact_request(prompt, self.sampling, eos_ids, use_tree=True)
            request = replace(request, namespace=namespace)
            return Submission(prompt, request, AnswerNotes(), ())

        started_s = time.perf_counter()
        submission, choices = speculation.answer(
            Question(question, k=self.k), submission_of, lambda: None
        )
        tokens = [next(choices).token_id]
        ttft_s = time.perf_counter() - started_s
        tokens += [choice.token_id for choice in choices]
        said = submission.notes.speculation
        if said is None:
            search_s = self.kb.searched_s
            return Measured(tokens, ttft_s, search_s, search_s, 0, 0)
        open_s = (said.search_ms - said.hidden_ms) / 1e3
        return Measured(
            tokens, ttft_s, said.search_ms / 1e3, open_s, said.guesses, said.wasted_tokens
        )

    def learn(self, pace: SearchPace, vectors: Vectors) -> None:
        """Searches alone, so that "auto" knows how long they take and when their lists stand."""
        for vector in vectors:
            started_s = time.perf_counter()  # by itself, so also what it takes elsewhere
            stages = self.kb.index.search_staged(vector, self.k, MAX_STAGES)
            lists = [found.ids.tolist() for found in stages]
            pace.searched(time.perf_counter() - started_s, lists, MAX_STAGES)

    def level(self, where: str, share: float, questions: Sequence[str], learn_from: Vectors) -> Row:
        self.kb.index.share = share
        self.kb.elsewhere = where == "elsewhere"
        for question in [WARM_UP, *questions]:
            self.kb.record(self.kb.vectors[question], self.k)
        kb, device = cast(KnowledgeBase, self.kb), self.device
        paces = {mode: Paces() for mode in MODES}
        by_mode = {
            mode: Speculation(kb, self.asking, device, SpeculationConfig(mode), paces=paces[mode])
            for mode in MODES
        }
        self.learn(paces["auto"].search, learn_from)
        got: dict[str, list[Measured]] = {mode: [] for mode in MODES}
        for number, question in enumerate([WARM_UP, *questions]):  # the first warms up
            for mode, speculation in by_mode.items():
                one = self.ask(speculation, question, f"{where} {share} {mode}")
                if number:
                    got[mode].append(one)
        return {"where": where, **summary(share, got)}


def summary(share: float, got: dict[str, list[Measured]]) -> Row:
    def mean_ms(mode: str, name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in got[mode]) * 1e3

    plain_ms = mean_ms("off", "search_s")
    prefill_ms = mean_ms("off", "ttft_s") - plain_ms
    row: Row = {"share": share, "search_ms": round(plain_ms, 1), "prefill_ms": round(prefill_ms, 1)}
    for mode in MODES:
        open_ms = mean_ms(mode, "open_s")
        row[mode] = {
            "ttft_ms": round(mean_ms(mode, "ttft_s"), 1),
            "ttft_p50_ms": round(statistics.median(o.ttft_s for o in got[mode]) * 1e3, 1),
            "search_ms": round(mean_ms(mode, "search_s"), 1),
            "not_overlapped_ms": round(open_ms, 1),
            "cut": round(plain_ms / open_ms, 2),
            "hidden_share": round(1 - open_ms / mean_ms(mode, "search_s"), 3),
            "guesses": statistics.fmean(one.guesses for one in got[mode]),
            "wasted_tokens": statistics.fmean(one.wasted for one in got[mode]),
            "same_answers": sum(
                one.tokens == plain.tokens for one, plain in zip(got[mode], got["off"], strict=True)
            ),
        }
    return row


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
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--here", type=float, nargs="*", default=[1.0], help="as --shares")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the prefill")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    embedder = find_embedder("minilm")
    passages = list(read_jsonl(args.data / "wiki_kb" / "passages.jsonl.gz"))
    texts = [f"{p['title']}\n{p['text'].strip()}" for p in passages]
    vectors = cached_vectors("wiki_kb", embedder, texts, embedder.embed_passages)
    records = list(read_jsonl(args.data / "nq_oracle" / "nq_open_oracle.jsonl.gz"))
    asked = [r["question"] for r in records[: args.questions + LEARN]]
    asked_vectors = cached_vectors("nq_speculation", embedder, asked, embedder.embed_queries)
    questions = asked[: args.questions]
    index = make_large(vectors, args.copies)
    folder = locate(args.model)
    decoder = load_decoder(folder, device=args.device, dtype="float32", quant=args.quant)
    tokenizer, device = Tokenizer(folder), torch.device(args.device)
    by_text = dict(zip(asked, asked_vectors, strict=True))
    by_text[WARM_UP] = embedder.embed_query(WARM_UP)
    kb = SearchOnlyKB(index, passages, tokenizer, by_text)
    asking = EngineClient(decoder, EngineConfig(pool_tokens=1 << 15))
    bench = Bench(kb, asking, tokenizer, args.k, Sampling(max_tokens=6), device)
    others = asked_vectors[args.questions :]
    rows = [bench.level("elsewhere", share, questions, others) for share in args.shares]
    rows += [bench.level("here", share, questions, others) for share in args.here]
    stats = asking.engine.stats()
    asking.close()
    show(rows, len(questions), len(index))
    config = {
        "model": args.model,
        "quant": args.quant,
        "k": args.k,
        "passages": len(passages),
        "copies": args.copies,
        "vectors": len(index),
        "stages": MAX_STAGES,
        "questions": len(questions),
        "threads": args.threads,
    }
    same = all(row[mode]["same_answers"] == len(questions) for row in rows for mode in MODES)
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
