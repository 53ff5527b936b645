"""What does a fused prefill cost those who are being answered beside it?

A request is being answered while prompts with stored chunk KV come in, one after another. Measured
are the gaps between the tokens of that answer, and the time to the first token of the prompts,
beside it and alone:

    own step   as one step of its own: stitch, choose rows, compute them, all at once
    joined     rows run in the common steps, a slice at a time (what the engine does)

    python bench/beside.py --out bench/results/beside-cpu.json

Random tokens: nothing here depends on what they say. `gap_p95_ratio` is the first over the second.
On a machine that others use too, `--clock cpu --threads 1` counts what the process computed instead
of what the clock on the wall says.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common.results import finish, result_header
from kvweave.engine import fused_prompts
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.fused_prompts import runs_in_slices
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart, LoadCost
from kvweave.engine.sampling import Sampling
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.kv.format.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.types import Chunk, ChunkId

PREAMBLE, QUESTION, CHUNK = 32, 40, 256
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
RULES = {"own step": lambda *_, **__: False, "joined": runs_in_slices}


class World:
    """A model, the KV of some chunks in host memory, and prompts over them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.decoder = load_decoder(locate(args.model), device="cpu")
        self._rng = random.Random(0)
        self._vocabulary = self.decoder.spec.vocab_size
        self.store = KVStore(StoreConfig(tiers=(HostTierConfig(4 * GIB),)))
        context = KeyContext("bench", "float32", args.codec, "t", self._ids(PREAMBLE), "r")
        self._encoder = ChunkEncoder(self.decoder, self.store, context)
        self._chunks = [self._ids(CHUNK) for _ in range(2 * args.chunks)]
        self._encoder.encode(
            [Chunk(ChunkId(str(i)), "", "", c) for i, c in enumerate(self._chunks)]
        )
        self._way = open_strategy("weave", ModelFacts(self.decoder.spec.num_layers))
        self._args = args

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocabulary) for _ in range(count))

    def prompt(self) -> EngineRequest:
        chosen = self._rng.sample(self._chunks, self._args.chunks)
        encoder, preamble = self._encoder, self._encoder.preamble
        part = FusedPart(
            self.store,
            lambda: preamble,
            tuple(PromptChunk(c, encoder.key(c), encoder.exact_key(c)) for c in chosen),
            self._way,
            self._args.ratio,
            expected=LoadCost(0.0, 1.0),
        )
        named = tuple(EngineChunk(ChunkId(str(hash(c))), c) for c in chosen)
        sampling = Sampling(max_tokens=1)
        front = preamble.token_ids
        return EngineRequest(self._ids(QUESTION), sampling, frozenset(), front, named, fused=part)

    def long_answer(self) -> EngineRequest:
        return EngineRequest(self._ids(100), Sampling(max_tokens=4000), frozenset())


def first_token_s(world: World, engine: Engine, now: Clock) -> float:
    """Of one prompt, whose answer has one token."""
    prompt, started_s = world.prompt(), now()
    assert len(list(engine.submit(prompt))) == 1, "it was answered"
    return now() - started_s


@contextmanager
def ruled(name: str) -> Iterator[None]:
    fused_prompts.runs_in_slices = RULES[name]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fused_prompts.runs_in_slices = runs_in_slices  # type: ignore[attr-defined]


def beside(
    world: World, engine: Engine, prompts: int, now: Clock
) -> tuple[list[float], list[float]]:
    """Gaps of the answer while prompts come, and their times to the first token."""
    answered: list[float] = []
    ticket = engine.submit(world.long_answer())
    next(ticket)
    reader = threading.Thread(target=lambda: [answered.append(now()) for _ in ticket])
    reader.start()
    took = [first_token_s(world, engine, now) for _ in range(prompts)]
    ticket.cancel()
    reader.join()
    return [b - a for a, b in pairwise(answered)], took


def percentile_95(values: list[float]) -> float:
    """Never above the highest: these are all the gaps, not a sample to guess more from."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chunks", type=int, default=10, help=f"of {CHUNK} tokens, in a prompt")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--step-rows", type=int, default=EngineConfig().step_rows)
    parser.add_argument("--prompts", type=int, default=8, help="per mode and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    now = CLOCKS[args.clock]
    torch.set_num_threads(args.threads)
    world = World(args)
    gaps: dict[str, list[float]] = {name: [] for name in RULES}
    near: dict[str, list[float]] = {name: [] for name in RULES}
    alone: dict[str, list[float]] = {name: [] for name in RULES}
    cfg = EngineConfig(step_rows=args.step_rows, pool_tokens=1 << 15)
    with Engine(world.decoder, cfg) as engine:
        for i in range(-1, args.rounds):
            for name in RULES:
                with ruled(name):
                    found, took = beside(world, engine, args.prompts if i >= 0 else 1, now)
                    lone = [first_token_s(world, engine, now) for _ in range(3)]
                if i >= 0:
                    gaps[name] += found
                    near[name] += took
                    alone[name] += lone
    world.store.close()
    results = {
        name: {
            "gap_ms_p50": round(statistics.median(gaps[name]) * 1e3, 1),
            "gap_ms_p95": round(percentile_95(gaps[name]) * 1e3, 1),
            "gap_ms_max": round(max(gaps[name]) * 1e3, 1),
            "ttft_ms_beside": round(statistics.median(near[name]) * 1e3, 1),
            "ttft_ms_alone": round(statistics.median(alone[name]) * 1e3, 1),
        }
        for name in RULES
    }
    table = Table("", *next(iter(results.values())))
    for name, numbers in results.items():
        table.add_row(name, *(f"{number:,.1f}" for number in numbers.values()))
    Console().print(table)
    ratio = results["own step"]["gap_ms_p95"] / results["joined"]["gap_ms_p95"]
    config = {name: value for name, value in vars(args).items() if name != "out"}
    found = {"config": config, "ways": results, "gap_p95_ratio": round(ratio, 2)}
    finish(__doc__, {**result_header("beside", "cpu"), **found}, args.out)


if __name__ == "__main__":
    main()
