"""What the GPU benches run on: random weights of a real shape, a long prompt, its chunk KV."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix, passes
from kvweave.fuse.encode.extras import choose_anchors, extra_name, pack_anchors
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.kv.format.keys import KeyContext, make_chunk_key
from kvweave.kv.format.objects import PackedChunk, pack_chunk
from kvweave.model.shapes import SHAPES, random_decoder

CHUNK_TOKENS, PREAMBLE, QUESTION = 510, 32, 64
STACK = ("torch", "triton", "transformers")  # whose versions a result names


class Size(NamedTuple):
    name: str
    chunks: int


class World:
    """A model, a long prompt, and its chunk KV."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.spec = SHAPES[args.shape]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decoder = random_decoder(self.spec, device, dtype)
        self.sizes = [Size(n, int(c)) for n, c in (s.split("=") for s in args.sizes.split(","))]
        most = max(size.chunks for size in self.sizes)
        g = torch.Generator().manual_seed(1)

        def ids(count: int) -> tuple[int, ...]:
            drawn = torch.randint(10, self.spec.vocab_size, (count,), generator=g)
            return tuple(drawn.tolist())

        self.preamble = encode_prefix(self.decoder, ids(PREAMBLE))
        self.question = ids(QUESTION)
        self.chunk_ids = [ids(CHUNK_TOKENS) for _ in range(most)]
        self.made = []
        for part in passes([CHUNK_TOKENS] * most, 8192):
            some = [self.chunk_ids[i] for i in part]
            self.made += encode_chunks(self.decoder, self.preamble, some)
        layers = self.spec.num_layers
        self.critical = (layers * 2 // 5, layers * 2 // 5 + 1, layers // 2)
        self.facts = ModelFacts(layers, self.critical)

    def strategy(self, name: str) -> Strategy:
        """As it is, but rows are not weighed by cost: random weights look at all of them alike,
        and the cheapest, at the front of the prompt, would win everywhere. So they lie spread."""
        strategy = open_strategy(name, self.facts)
        if isinstance(strategy.selector, QueryAttention):
            return replace(strategy, selector=replace(strategy.selector, late=0.0))
        return strategy

    def config(self) -> dict[str, Any]:
        token_bytes = 4 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim
        return {
            "shape": self.args.shape, "weights": "random, bf16", "chunk_tokens": CHUNK_TOKENS,
            "preamble": PREAMBLE, "question": QUESTION, "critical_layers": self.critical,
            "kv_bytes_per_token": token_bytes, "repeats": self.args.repeats,
            "prompt_tokens": {s.name: self.prompt_tokens(s) for s in self.sizes},
            "cold": "files synced and dropped from the page cache before each run",
            "warm": "files in the page cache",
        }  # fmt: skip

    def prompt_tokens(self, size: Size) -> int:
        return PREAMBLE + size.chunks * CHUNK_TOKENS + QUESTION

    def prompt(self, size: Size) -> list[int]:
        chunks = [i for ids in self.chunk_ids[: size.chunks] for i in ids]
        return [*self.preamble.token_ids, *chunks, *self.question]

    def prompt_chunks(self, size: Size, codec: str) -> list[PromptChunk]:
        keys = [self.key(codec, ids) for ids in self.chunk_ids[: size.chunks]]
        return [PromptChunk(i, k, k) for i, k in zip(self.chunk_ids, keys, strict=False)]

    def key(self, codec: str, ids: tuple[int, ...]) -> Any:
        return make_chunk_key(KeyContext("bench", "bfloat16", codec, "any", (), "any"), ids)

    def packed(self, codec: str) -> list[PackedChunk]:
        """All chunks, encoded on the device, sealed by several threads. With anchors."""
        anchors = extra_name("kvzip")

        def pack(i: int) -> PackedChunk:
            layers = self.made[i]
            scores = torch.rand(len(layers), CHUNK_TOKENS)
            extras = {anchors: pack_anchors(choose_anchors(layers, scores))}
            return pack_chunk(self.key(codec, self.chunk_ids[i]), layers, codec, extras)

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(pack, range(len(self.made))))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
