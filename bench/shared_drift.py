"""What does an answer over shared chunks lose against one over a copy, which drift has moved?

Real weights; the demo's passages and questions. The exact answer of each question is forced, and
what the model thinks of its tokens is compared with full prefill, in nats per token: over a copy of
the chunks, which drift has moved; over shared ones, of which rows of the request's own say how far
it sees them moved; over shared ones in 8 bits; and without any drift. The first token is apart: it
is computed with the prompt.

    python bench/shared_drift.py --model smollm2 --out bench/results/shared_drift-cpu.json
    python bench/shared_drift.py --device cuda --model FOLDER --strategy weave-through --ratio 0.5
"""

import argparse
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from common.results import finish, result_header
from kvweave.demo import PASSAGES, DemoQuestion, read_questions
from kvweave.engine.config import EngineConfig, SharedCodec
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart
from kvweave.engine.sampling import Sampling
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.kv.format.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, ChunkId

MOST_TOKENS = 256  # of a passage
SYSTEM = "You answer questions about a valley from the passages below, in a few words.\n\n"


class Way(NamedTuple):
    """How chunks lie and whether they drift."""

    name: str
    shares: bool
    drifts: bool
    codec: SharedCodec = "raw"


WAYS = (
    Way("copied", False, True),
    Way("shared", True, True),
    Way("shared, int8", True, True, "int8"),
    Way("no drift", False, False),
)


def main() -> None:
    args = parse_args()
    world = World(args.model, args.device, args.joined)
    asked = read_questions()[: args.questions]
    prompts = [world.prompt(question, args.passages) for question in asked]
    thought, rows = {}, []
    with Engine(world.decoder, EngineConfig(share_chunks=False)) as engine:
        for number, prompt in enumerate(prompts):
            forced = tuple(choice.token_id for choice in engine.submit(prompt))
            prompts[number] = replace(prompt, forced=forced, watched=len(forced))
            thought[number] = thoughts(engine, prompts[number])
    for way in WAYS:
        strategy = world.strategy(args.strategy, drifts=way.drifts)
        cfg = EngineConfig(share_chunks=way.shares, shared_codec=way.codec)
        with Engine(world.decoder, cfg) as engine:
            found = [
                apart(thought[n], thoughts(engine, world.fused(prompt, strategy, args.ratio)))
                for n, prompt in enumerate(prompts)
            ]
            assert engine.stats()["fused_shared"] == (len(prompts) if way.shares else 0)
        first, later = ([pair[i] for pair in found] for i in (0, 1))
        rows.append(
            {
                "way": way.name,
                "first_token_nats": round(statistics.fmean(first), 5),
                "later_tokens_nats": round(statistics.fmean(later), 5),
                "later_median": round(statistics.median(later), 5),
            }
        )
        print(rows[-1], flush=True)
    config = {
        "model": Path(args.model).name, "strategy": args.strategy, "ratio": args.ratio,
        "questions": len(prompts), "passages": args.passages, "joined": args.joined,
    }  # fmt: skip
    finish(
        __doc__,
        {**result_header("shared_drift", args.device), "config": config, "rows": rows},
        args.out,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strategy", default="weave")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--passages", type=int, default=6, help="chunks in every prompt")
    parser.add_argument("--joined", type=int, default=1, help="passages that are one chunk")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class World:
    """A model with the chunk KV of the valley's passages in host memory."""

    def __init__(self, model: str, device: str, joined: int) -> None:
        folder = locate(model)
        self.decoder = load_decoder(folder, device=device, dtype="float32")
        self._tokenizer = Tokenizer(folder)
        self._preamble = tuple(self._tokenizer.encode(SYSTEM))
        self.store = KVStore(StoreConfig((HostTierConfig(2 * GIB),)))
        context = KeyContext(model, "float32", "raw", "t", self._preamble, "r")
        self._encoder = ChunkEncoder(self.decoder, self.store, context)
        paths = sorted(PASSAGES.glob("*.md"))
        groups = [paths[i : i + joined] for i in range(0, len(paths), joined)]
        self._chunk_of = {path.stem: group[0].stem for group in groups for path in group}
        self._chunks = {
            group[0].stem: tuple(i for path in group for i in self._token_ids(path))
            for group in groups
        }
        self._encoder.encode([Chunk(ChunkId(n), "", "", c) for n, c in self._chunks.items()])

    def _token_ids(self, path: Path) -> list[int]:
        return self._tokenizer.encode(path.read_text() + "\n\n")[:MOST_TOKENS]

    def prompt(self, asked: DemoQuestion, num_chunks: int) -> EngineRequest:
        """The chunks of a question among others, in some order."""
        draw = random.Random(asked.question)
        wanted = list(dict.fromkeys(self._chunk_of[name] for name in asked.passages))
        others = [name for name in self._chunks if name not in wanted]
        names = [*wanted, *draw.sample(others, num_chunks - len(wanted))]
        draw.shuffle(names)
        question = tuple(self._tokenizer.encode(f"Question: {asked.question}\nAnswer:"))
        chunks = tuple(EngineChunk(ChunkId(name), self._chunks[name]) for name in names)
        sampling = Sampling(max_tokens=24)
        return EngineRequest(question, sampling, frozenset(), self._preamble, chunks)

    def strategy(self, name: str, *, drifts: bool) -> Strategy:
        strategy = open_strategy(name, ModelFacts(self.decoder.spec.num_layers))
        return strategy if drifts else replace(strategy, drift=0.0)

    def fused(self, prompt: EngineRequest, strategy: Strategy, ratio: float) -> EngineRequest:
        key, exact_key = self._encoder.key, self._encoder.exact_key
        ids = [chunk.token_ids for chunk in prompt.chunks]
        chunks = tuple(PromptChunk(each, key(each), exact_key(each)) for each in ids)
        part = FusedPart(self.store, self._encoder.preamble, chunks, strategy, ratio)
        return replace(prompt, fused=part)


def thoughts(engine: Engine, request: EngineRequest) -> list[Tensor]:
    """Log-probabilities [V] of every token of the forced answer."""
    ticket = engine.submit(request)
    for _ in ticket:
        pass
    return ticket.distributions


def apart(exact: list[Tensor], found: list[Tensor]) -> tuple[float, float]:
    """KL of exact to found in nats: of the first token, and the mean of the others."""
    nats = [float((p.exp() * (p - q)).sum()) for p, q in zip(exact, found, strict=True)]
    return nats[0], statistics.fmean(nats[1:] or [0.0])


if __name__ == "__main__":
    main()
