"""Does fused traffic ever leak into exact answers, however long the engine runs?

    python bench/soak/purity.py --minutes 60

One engine serves fused and exact requests over the same chunks, several at a time, with a pool, a
knowledge tree, a host tier and a disk tier so small that all of them evict all the time. Every
100th exact request is asked again of a cold engine, which has computed nothing else, and must be
the same bit for bit: token ids, and the log probabilities of the chosen tokens and of two
alternatives.

The tiny random model computes in float64 and what is compared is rounded to float32. In float32
itself the last bits of a row depend on how many others are computed beside it, which a server under
load and a cold one never share; KV that was fused differs in the first digits. So that this is seen
and not believed, every such prompt is fused as well, and the run counts how often that differs.
Exits 1 if an exact answer does.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import numpy as np
import torch

from common.files import REPO
from common.results import finish, result_header, save_run
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart
from kvweave.engine.sampling import Choice, Sampling
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.fuse.taper import Taper
from kvweave.kv.format.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.model.load import load_decoder
from kvweave.model.spec import read_spec
from kvweave.model.weights import load_weights
from kvweave.types import Chunk, ChunkId

VOCABULARY = 97
NUM_CHUNKS = 48
EVERY = 100  # exact requests, of which one is asked of a cold engine
CLIENTS = 6
STRATEGIES = ("reuse", "weave", "cacheblend", "kvshare-like", "epic")
# a pool for a few prompts: pages leave the tree and requests lose theirs
SMALL = EngineConfig(page_tokens=4, pool_tokens=4 * 96, max_running=6, step_rows=16, alone_rows=64)
Answer = list[tuple[int, ...]]  # bits of what was said, token by token


class PurityWorld:
    """A model, chunks with stored KV, and requests over them."""

    def __init__(self, folder: Path, seed: int) -> None:
        sys.path.insert(0, str(REPO / "tests"))
        from worlds.tiny_models import make_model_folder

        model = make_model_folder(folder, "llama", max_position_embeddings=512)
        spec = read_spec(model)
        weights = load_weights(TensorFiles(model), spec, torch.float64, torch.device("cpu"))
        self._spec, self._weights = spec, weights
        rng = random.Random(seed)
        self.preamble = _ids(rng, 6)
        self.chunks = [_ids(rng, rng.randrange(1, 40)) for _ in range(NUM_CHUNKS)]
        one_chunk = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4 * 20
        tiers = (
            HostTierConfig(one_chunk * NUM_CHUNKS // 6),
            DiskTierConfig(folder / "kv", one_chunk * NUM_CHUNKS // 2, fsync=False),
        )
        self.store = KVStore(StoreConfig(tiers=tiers))
        context = KeyContext("m", "float32", "raw", "t", self.preamble, "r")
        self.encoder = ChunkEncoder(
            load_decoder(model, device="cpu"),
            self.store,
            context,
            Preparation.parse("isolated"),
        )
        self._encoding = threading.Lock()

    def decoder(self) -> Decoder:
        """Of its own: an engine uses one alone."""
        return Decoder(self._spec, self._weights)

    def encode_some(self, rng: random.Random) -> None:
        """Store KV of a few chunks: others are evicted for it."""
        self.encode(rng.sample(self.chunks, 6))

    def encode(self, chunks: Sequence[tuple[int, ...]]) -> None:
        with self._encoding:
            self.encoder.encode([Chunk(ChunkId(repr(c)), "", "", c) for c in chunks])

    def exact(self, rng: random.Random) -> EngineRequest:
        """A path of chunks, often one that others have begun."""
        first = rng.randrange(0, NUM_CHUNKS, 6)  # paths that come back begin with the same chunk
        chunks = [self.chunks[first], *rng.sample(self.chunks, rng.randrange(0, 4))]
        named = tuple(EngineChunk(ChunkId(repr(c)), c) for c in chunks)
        sampling = Sampling(max_tokens=rng.randrange(2, 9), logprobs=2)
        question = _ids(rng, rng.randrange(1, 9))
        return EngineRequest(question, sampling, frozenset(), self.preamble, named)

    def fused(self, exact: EngineRequest, rng: random.Random) -> EngineRequest:
        """The same prompt from stored KV."""
        encoder = self.encoder
        named = tuple(
            PromptChunk(c.token_ids, encoder.key(c.token_ids), encoder.exact_key(c.token_ids))
            for c in exact.chunks
        )
        name = rng.choice(STRATEGIES)
        strategy = open_strategy(name, ModelFacts(self._spec.num_layers, (1, 2)))
        if strategy.taper is not None:  # of so few layers the real one would leave none out
            strategy = replace(strategy, taper=Taper(1, 0.4))
        ratio = 0.0 if name == "reuse" else rng.choice([0.1, 0.3])
        part = FusedPart(self.store, encoder.preamble, named, strategy, ratio)
        return replace(exact, fused=part, use_tree=rng.random() < 0.5)


class PuritySoak:
    """Clients with a thread each, and the count of what they found."""

    def __init__(self, world: PurityWorld, engine: Engine) -> None:
        self._world = world
        self._engine = engine
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, number: int, seed: int, until_s: float) -> None:
        rng = random.Random(f"{seed}/{number}")
        try:
            while time.monotonic() < until_s:
                self._act(rng)
        except Exception as error:  # a client that is gone would be a soak of nothing
            self.wrong.append(f"client {number}: {type(error).__name__}: {error}")
            raise

    def _act(self, rng: random.Random) -> None:
        kind = rng.random()
        if kind < 0.02:
            self._world.encode_some(rng)
            self._count("encoded")
            return
        request = self._world.exact(rng)
        if kind < 0.55:
            ticket = self._engine.submit(self._world.fused(request, rng))
            if rng.random() < 0.1:
                ticket.cancel()
                ticket.wait(60)
                self._count("cancelled")
                return
            list(ticket)
            self._count("fused")
            return
        got = bits(list(self._engine.submit(request)))
        if self._count("exact") % EVERY == 0:
            self._compare(request, got, rng)

    def _compare(self, request: EngineRequest, got: Answer, rng: random.Random) -> None:
        with Engine(self._world.decoder(), SMALL) as cold:
            want = bits(list(cold.submit(request)))
        self._world.encode([chunk.token_ids for chunk in request.chunks])
        with Engine(self._world.decoder(), SMALL) as cold:
            part = replace(self._world.fused(request, rng), use_tree=False)
            ticket = cold.submit(part)
            fused = bits(list(ticket))
            is_fused = ticket.record is not None and ticket.record.counts["reused"] > 0
        self._count("compared")
        if is_fused:
            self._count("fused controls")
            self._count("fused controls that differ", fused != want)
        if got != want:
            self.wrong.append(f"exact request {self.done['exact']}: {got} is not {want}")

    def _count(self, what: str, amount: int = 1) -> int:
        with self._lock:
            self.done[what] += amount
            return self.done[what]


def bits(choices: Sequence[Choice]) -> Answer:
    """What was said, log probabilities as the bits of a float32."""

    def of(value: float | None) -> int:
        return int(np.float32(value).view(np.uint32))

    return [
        (c.token_id, of(c.logprob), *(part for t, p in c.alternatives for part in (t, of(p))))
        for c in choices
    ]


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        world = PurityWorld(Path(temporary), args.seed)
        rng = random.Random(args.seed)
        for _ in range(8):
            world.encode_some(rng)
        began_s = time.monotonic()
        with Engine(world.decoder(), SMALL) as engine:
            soak = PuritySoak(world, engine)
            until_s = began_s + args.minutes * 60
            threads = [
                threading.Thread(target=soak.client, args=(n, args.seed, until_s), daemon=True)
                for n in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            told_s = began_s
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.5)
                if time.monotonic() - told_s > 60:
                    told_s = time.monotonic()
                    print(f"{(told_s - began_s) / 60:.0f} min: {dict(soak.done)}", flush=True)
                    if args.out is not None:  # a run that is cut short has what it has
                        so_far = report(args, soak, engine, world, (told_s - began_s) / 60)
                        save_run(__doc__, so_far, args.out)
            minutes = (time.monotonic() - began_s) / 60
            engine.run_alone(engine.check_integrity)
            result = report(args, soak, engine, world, minutes)
        world.store.close()
    for words in soak.wrong[:10]:
        print(f"WRONG {words}")
    finish(__doc__, result, args.out)
    sys.exit(1 if soak.wrong or not soak.done["compared"] else 0)


def report(
    args: argparse.Namespace, soak: PuritySoak, engine: Engine, world: PurityWorld, minutes: float
) -> dict[str, Any]:
    stats = engine.stats()
    return {
        **result_header("purity", "cpu"),
        "config": {"minutes": args.minutes, "seed": args.seed, "model": "tiny random, float64"},
        "minutes": round(minutes, 1),
        "requests": dict(sorted(soak.done.items())),
        "evictions": evictions(world),
        "preempted": stats["preemptions"],
        "pinned_at_the_end": world.store.num_pinned(),
        "wrong": soak.wrong[:20],
        "ok": not soak.wrong and soak.done["compared"] > 0,
    }


def evictions(world: PurityWorld) -> dict[str, float]:
    """What left the tiers: a soak without any would show little."""
    found: dict[str, float] = {}
    for sample in world.store.metrics.snapshot():
        if "evict" in sample.name:
            name = f"{sample.name} {dict(sample.labels)}"
            found[name] = found.get(name, 0.0) + sample.value
    return found


if __name__ == "__main__":
    main()
