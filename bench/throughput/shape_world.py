"""The world of throughput/run.py without a model: random weights of a real shape, random chunks.

For a GPU box with bare PyTorch. Requests go straight to the engine. A question draws its chunks
from a topic of its own, with a popular topic drawn more often (Zipf), so chunks repeat in other
orders and other company. Chunk KV lies in host memory.

There is no calibration of random weights, so `auto` stands for the plan it would make where 15 % is
allowed: what the knowledge tree has of the prompt, and the rest woven at `--ratio`.
"""

import argparse
import gc
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from common.files import REPO
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart
from kvweave.engine.sampling import Sampling
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix, passes
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.kv.format.keys import KeyContext, make_chunk_key
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.model.shapes import SHAPES, random_decoder
from kvweave.types import ChunkId

CHUNK_TOKENS, PREAMBLE, QUESTION = 510, 32, 64
TOPIC_CHUNKS = 2  # chunks of a topic, as a multiple of those in a prompt
QUESTIONS = 7  # of a topic, each with its own choice and order of chunks
ZIPF = 1.0
STRATEGY = "fusionrag"
CODEC = "raw"


class ShapeWorld:
    """One decoder, one store; a fresh engine for every mode."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        device = torch.device(args.device)
        self._spec = SHAPES[args.shape]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._decoder = random_decoder(self._spec, device, dtype)
        self._draw = torch.Generator().manual_seed(1)
        self._preamble = encode_prefix(self._decoder, self._ids(PREAMBLE))
        per_topic = TOPIC_CHUNKS * args.k
        self._chunks = [self._ids(CHUNK_TOKENS) for _ in range(args.topics * per_topic)]
        drawn = random.Random(3)
        self._questions = [
            (self._ids(QUESTION), drawn.sample(range(start, start + per_topic), args.k))
            for start in range(0, len(self._chunks), per_topic)
            for _ in range(QUESTIONS)
        ]
        layers = self._spec.num_layers
        self._strategy = open_strategy(STRATEGY, ModelFacts(layers))
        self.store = KVStore(StoreConfig((HostTierConfig(self._encode() + GIB // 4),)))
        for packed in self._packed:
            self.store.save(packed)
        del self._packed
        self._engine: Engine | None = None
        longest = PREAMBLE + args.k * CHUNK_TOKENS + QUESTION + args.answer
        pool_tokens = args.pool_tokens or 32 * longest
        self._cfg = EngineConfig(pool_tokens=pool_tokens, tree_share=args.tree_share)
        if device.type == "cuda":  # four pools, the engine's own choice, are more than a box has
            self._cfg = replace(self._cfg, host_tokens=pool_tokens)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "nothing is open"
        return self._engine

    def config(self) -> dict[str, Any]:
        args = self._args
        return {
            "shape": args.shape, "weights": "random", "questions": len(self._questions),
            "chunks": len(self._chunks), "chunk_tokens": CHUNK_TOKENS, "k": args.k, "zipf": ZIPF,
            "auto": f"{STRATEGY} {args.ratio:g} behind what the tree has", "codec": CODEC,
            "engine": asdict(self._cfg),
        }  # fmt: skip

    @contextmanager
    def serving(self) -> Iterator[None]:
        with Engine(self._decoder, self._cfg) as self._engine:
            yield
        self._engine = None
        gc.collect()  # its pool goes now: two do not fit
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def stream(self, count: int, seed: int) -> list[int]:
        ranks = list(range(self._args.topics))
        weights = [1 / (rank + 1) ** ZIPF for rank in ranks for _ in range(QUESTIONS)]
        return random.Random(seed).choices(range(len(self._questions)), weights, k=count)

    def serve(self, mode: str, number: int) -> Iterator[int]:
        ticket = self.engine.submit(self._request(mode, number))
        try:
            for choice in ticket:
                yield choice.token_id
        finally:
            ticket.cancel()

    def reference(self, number: int) -> list[int]:
        sys.path.insert(0, str(REPO / "tests"))
        from worlds.plain_loop import generate

        request = self._request("full", number)
        choices = generate(self._decoder, request.prompt_ids, request.sampling, frozenset())
        return [choice.token_id for choice in choices]

    def answer(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def prompt_tokens(self, number: int) -> int:
        return len(self._request("full", number).prompt_ids)

    def _request(self, mode: str, number: int) -> EngineRequest:
        question, places = self._questions[number]
        ids = [self._chunks[place] for place in places]
        fused = None
        if mode == "auto":
            chunks = tuple(PromptChunk(each, self._key(each), self._key(each)) for each in ids)
            fused = FusedPart(
                self.store, lambda: self._preamble, chunks, self._strategy, self._args.ratio
            )
        return EngineRequest(
            question,
            Sampling(max_tokens=self._args.answer),
            frozenset(),  # random weights would end answers anywhere: all have the same length
            self._preamble.token_ids,
            tuple(EngineChunk(ChunkId(f"{p:032x}"), i) for p, i in zip(places, ids, strict=True)),
            use_tree=mode != "full",
            fused=fused,
        )

    def _encode(self) -> int:
        """Chunk KV of all chunks; returns its bytes."""
        self._packed = []
        for some in passes([CHUNK_TOKENS] * len(self._chunks), 8192):
            ids = [self._chunks[i] for i in some]
            made = encode_chunks(self._decoder, self._preamble, ids)
            for each, layers in zip(ids, made, strict=True):
                self._packed.append(pack_chunk(self._key(each), layers, CODEC))
        return sum(packed.header.total_bytes for packed in self._packed)

    def _key(self, ids: tuple[int, ...]) -> Any:
        context = KeyContext("bench", str(self._decoder.dtype), CODEC, "any", (), "any")
        return make_chunk_key(context, ids)

    def _ids(self, count: int) -> tuple[int, ...]:
        drawn = torch.randint(10, self._spec.vocab_size, (count,), generator=self._draw)
        return tuple(drawn.tolist())
