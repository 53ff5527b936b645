"""The world of gpu_shared.py: random weights of a real shape, 1,000 chunks, a skewed stream.

Chunk KV is computed by the model, a few dozen chunks of it, and stored under the names of all: what
the numbers are does not matter to memory and time, and a thousand encodings would.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch

from kvweave.engine.config import EngineConfig, SharedCodec
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart
from kvweave.engine.sampling import Sampling
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix, passes
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.kv.format.keys import KeyContext, make_chunk_key
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.model.paged_kv import scale_bytes
from kvweave.model.shapes import SHAPES, random_decoder
from kvweave.types import ChunkId

CHUNK_TOKENS, PREAMBLE, QUESTION = 256, 32, 64
MADE = 32  # chunks whose KV is computed


class SharedWorld:
    """One decoder, one store of chunk KV in host memory, and requests over both."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        device = torch.device(args.device)
        self.spec = SHAPES[args.shape]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decoder = random_decoder(self.spec, device, dtype)
        self._draw = torch.Generator().manual_seed(1)
        self.preamble = encode_prefix(self.decoder, self._ids(PREAMBLE))
        self.chunks = [self._ids(args.chunk_tokens) for _ in range(args.chunks)]
        self.question = self._ids(QUESTION)
        self._context = KeyContext("bench", str(dtype), args.codec, "any", (), "any")
        self._keys = [make_chunk_key(self._context, ids) for ids in self.chunks]
        self.store = self._fill_store()
        self.weave = self._strategy("weave")
        self._reuse = open_strategy("reuse", ModelFacts(self.spec.num_layers))

    @property
    def token_bytes(self) -> int:
        """KV of a token, in the pool."""
        spec, size = self.spec, self.decoder.dtype.itemsize
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size

    def engine_config(self, *, shares: bool) -> EngineConfig:
        codec: SharedCodec = "int8" if shares and self.args.pages == "int8" else "raw"
        scales = scale_bytes(self.spec, self.decoder.dtype) if codec == "int8" else 0
        tokens = int(self.args.pool_gib * GIB) // (self.token_bytes + scales)
        return EngineConfig(
            pool_tokens=tokens, share_chunks=shares, shared_codec=codec, max_running=64,
            host_tokens=0, tree_share=0.02,
        )  # fmt: skip

    def config(self) -> dict[str, Any]:
        args = self.args
        return {
            "shape": args.shape, "weights": "random", "dtype": str(self.decoder.dtype),
            "chunks": args.chunks, "chunk_tokens": args.chunk_tokens, "k": args.k,
            "prompt_tokens": PREAMBLE + args.k * args.chunk_tokens + QUESTION, "zipf": args.zipf,
            "codec": args.codec, "pages": args.pages, "pool_gib": args.pool_gib,
            "kv_bytes_per_token": self.token_bytes,
            "strategy": "weave, rows not weighed by cost",
        }  # fmt: skip

    def stream(self, count: int, seed: int, k: int | None = None) -> list[list[int]]:
        """Chunks of each request: no two alike, popular ones more often, in any order."""
        draw = random.Random(seed)
        weights = [1 / (rank + 1) ** self.args.zipf for rank in range(len(self.chunks))]
        places = range(len(self.chunks))
        found = []
        for _ in range(count):
            some: dict[int, None] = {}
            while len(some) < (k or self.args.k):
                some.update(dict.fromkeys(draw.choices(places, weights, k=8)))
            kept = list(some)[: k or self.args.k]
            draw.shuffle(kept)
            found.append(kept)
        return found

    def request(
        self, places: Sequence[int], ratio: float | None, *, answer: int = 1, absent: int = 0
    ) -> EngineRequest:
        """Over these chunks, and so many behind them that no store has: computed (None), or woven
        at `ratio`."""
        more = [self._ids(self.args.chunk_tokens) for _ in range(absent)]
        named = [(f"{p:032x}", self.chunks[p], self._keys[p]) for p in places]
        named += [(uuid4().hex, ids, make_chunk_key(self._context, ids)) for ids in more]
        fused = None
        if ratio is not None:
            chunks = tuple(PromptChunk(ids, key, key) for _, ids, key in named)
            strategy = self.weave if ratio else self._reuse
            fused = FusedPart(self.store, self.preamble, chunks, strategy, ratio)
        return EngineRequest(
            self.question,
            Sampling(max_tokens=answer),
            frozenset(),  # random weights would end answers anywhere: all have the same length
            self.preamble.token_ids,
            tuple(EngineChunk(ChunkId(name), ids) for name, ids, _ in named),
            use_tree=ratio is not None,
            fused=fused,
        )

    def _strategy(self, name: str) -> Strategy:
        """Rows are not weighed by cost: random weights look at all alike, and those at the front of
        the prompt would win everywhere."""
        strategy = open_strategy(name, ModelFacts(self.spec.num_layers))
        assert isinstance(strategy.selector, QueryAttention), "it chooses by a probe"
        return replace(strategy, selector=replace(strategy.selector, late=0.0))

    def _fill_store(self) -> KVStore:
        some = self.chunks[:MADE]
        made = []
        for part in passes([self.args.chunk_tokens] * len(some), 8192):
            made += encode_chunks(self.decoder, self.preamble, [some[i] for i in part])
        pairs = zip(self._keys, made, strict=False)
        packed = [pack_chunk(key, layers, self.args.codec) for key, layers in pairs]
        total = packed[0].header.total_bytes * len(self._keys)
        store = KVStore(StoreConfig((HostTierConfig(total + GIB),)))
        for number, key in enumerate(self._keys):
            store.save(replace(packed[number % len(packed)], key=key))
        return store

    def _ids(self, count: int) -> tuple[int, ...]:
        drawn = torch.randint(10, self.spec.vocab_size, (count,), generator=self._draw)
        return tuple(drawn.tolist())
