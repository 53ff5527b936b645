"""How much of a search does speculative prefill hide on a GPU?

Real searches, recorded stage by stage with their times (record.py), are played back in front of a
model of a real shape with random weights: a search beside a GPU uses other cores. Chunks have the
lengths of the passages that were found. "off" searches and then computes; "on" guesses after every
stage; "auto", the default, where it is expected to pay.

    python bench/speculation/record.py --data DATA --searches carry/searches.json.gz     # here
    python bench/speculation/gpu.py --searches carry/searches.json.gz                    # on a GPU
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import numpy as np
import torch

from common.gpu_world import STACK
from common.results import finish, result_header, versions
from kvweave.app.answer.notes import RetrievedChunk
from kvweave.app.library.runtime import EngineClient
from kvweave.corpus.index.base import Vector
from kvweave.corpus.knowledge_base import BY_VECTOR
from kvweave.corpus.search import SearchOptions
from kvweave.engine.config import EngineConfig
from kvweave.engine.sampling import Sampling
from kvweave.model.shapes import SHAPES, random_decoder
from kvweave.text.prompt import Prompt
from kvweave.types import Chunk, ChunkId, Hit
from speculation.modes import MODES, Bench, Learnt, PromptOf, Row

PREAMBLE = 32  # tokens
ASKING = 16  # tokens of the template around a question


@dataclass
class ReplayedKB:
    """Searches that took place elsewhere: the same lists after the same times, while this thread
    sleeps. A question stands for its vector."""

    chunks: dict[int, Chunk]
    searches: dict[str, dict[str, list[tuple[float, list[int]]]]] = field(default_factory=dict)
    most_stages: int = 1
    searched_s: float = 0.0  # the last plain search

    @property
    def embedder(self) -> "ReplayedKB":
        return self

    def embed_query(self, text: str) -> Vector:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def load_index(self) -> None:
        """There is none."""

    def num_stages(self, k: int, stages: int, how: SearchOptions = BY_VECTOR) -> int:
        return min(stages, self.most_stages)

    def search(self, vector: Vector, k: int, how: SearchOptions = BY_VECTOR) -> list[Hit]:
        started_s = time.perf_counter()
        *_, hits = self.search_staged(vector, k, 1, how)
        self.searched_s = time.perf_counter() - started_s
        return hits

    def search_staged(
        self, vector: Vector, k: int, stages: int, how: SearchOptions = BY_VECTOR
    ) -> Iterator[list[Hit]]:
        question = vector.tobytes().decode()
        for seconds, places in self.searches[question][str(stages)]:
            time.sleep(seconds)
            yield [Hit(self.chunks[place], 1.0 / (1 + nth)) for nth, place in enumerate(places)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--searches", type=Path, required=True, help="from record.py")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1, help="of all questions")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    with gzip.open(args.searches, "rt", encoding="utf-8") as file:
        kept = json.load(file)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    asking = EngineClient(
        random_decoder(SHAPES[args.shape], device, dtype), EngineConfig(pool_tokens=1 << 17)
    )
    vocab = SHAPES[args.shape].vocab_size  # a small shape has fewer tokens than the recording
    kb = ReplayedKB({int(n): chunk_of(int(n), ids, vocab) for n, ids in kept["chunks"].items()})
    question_ids = {
        text: tuple(token % vocab for token in ids) for text, ids in kept["questions"].items()
    }

    def prompt_of(question: str, found: Sequence[RetrievedChunk]) -> Prompt:
        ids = (*question_ids[question], *range(100, 100 + ASKING))
        chunks = tuple(chunk.token_ids for chunk in found)
        return Prompt(tuple(range(PREAMBLE)), chunks, ids, (0, len(question_ids[question])))

    while not asking.engine.is_warm:  # as a server is that was not started a moment ago
        time.sleep(0.05)
    rows: list[Row] = []
    questions = list(question_ids)[: 1 + args.questions]
    for level in kept["levels"]:
        rows.append(measure(level, kb, asking, prompt_of, questions, device, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    asking.close()
    medians = [row["auto"]["times_p50"] for row in rows]
    means = [row["auto"]["times"] for row in rows]
    result = {
        **result_header("speculation", args.device),
        "versions": versions(*STACK),
        "config": {
            "shape": args.shape, "weights": "random", "dtype": str(dtype),
            "questions": len(questions) - 1, "rounds": args.rounds, "passages": kept["passages"],
            "vectors": kept["vectors"], "recorded_on": kept["recorded_on"],
            "recorded_with": kept.get("args"),
        },
        "same_answers": {m: sum(row[m]["same_answers"] for row in rows) for m in MODES},
        "speculation_over_plain": max(means),
        "speculation_worst": min(means),
        "speculation_over_plain_p50": max(medians),
        "speculation_worst_p50": min(medians),
        "rows": rows,
    }  # fmt: skip
    finish(__doc__, result, args.out)


def chunk_of(number: int, ids: Sequence[int], vocab: int) -> Chunk:
    return Chunk(ChunkId(f"{number:032x}"), "", "", tuple(token % vocab for token in ids))


def measure(
    level: dict[str, Any],
    kb: ReplayedKB,
    asking: EngineClient,
    prompt_of: PromptOf,
    questions: Sequence[str],
    device: torch.device,
    rounds: int,
) -> Row:
    """One number of chunks, one part of the index that is searched."""
    kb.searches, kb.most_stages = level["searches"], level["stages"]
    k, share = level["k"], level["share"]
    bench = Bench(kb, asking, prompt_of, k, Sampling(max_tokens=2), (), device)
    learnt = [Learnt(**each) for each in level["learnt"]]
    found = bench.level(f"{k} {share}", questions, learnt, rounds)
    tokens = [sum(len(kb.chunks[n].token_ids) for n in level["searches"][q]["1"][-1][1])
              for q in questions]  # fmt: skip
    return {"k": k, "share": share, "chunk_tokens": round(sum(tokens) / len(tokens)), **found}


if __name__ == "__main__":
    main()
