"""A small world for tests of fused requests in the engine: a store with the KV of a few chunks."""

import random
from dataclasses import replace
from pathlib import Path

import torch

from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, FusedPart, Ticket
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.fuse.prefill import PromptFrame
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.fuse.taper import Taper
from kvweave.kv.format.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.tree.node import DEVICE
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool
from kvweave.model.rows import Rows
from kvweave.types import Chunk, ChunkId
from worlds.engine import ids, with_chunks
from worlds.fuse import prefill_stored

RNG = random.Random(0)
PREAMBLE = ids(RNG, 6)
CHUNKS = [ids(RNG, n) for n in (11, 1, 19, 7)]
QUESTION = ids(RNG, 5)


class World:
    """A decoder, a store with the chunks' KV, and requests over both."""

    def __init__(self, decoder: Decoder, folder: Path, encoding: Decoder | None = None) -> None:
        """`encoding` computes the chunks' KV if `decoder` is of a precision that is not stored."""
        self.decoder = decoder
        tiers = (HostTierConfig(1 << 20), DiskTierConfig(folder))
        self.store = KVStore(StoreConfig(tiers=tiers))
        context = KeyContext("m", "float32", "raw", "t", PREAMBLE, "r")
        isolated = Preparation.parse("isolated")
        self.encoder = ChunkEncoder(
            encoding or decoder, self.store, context, isolated, Texts(repeat=(1, 2, 3))
        )
        chunks = [Chunk(ChunkId(repr(c)), "", "", tuple(c)) for c in CHUNKS]
        self.encoder.encode(chunks)
        self.encoder.add_extras(chunks, ["anchors:kvzip"])
        assert self.store.flush()

    def part(self, chunks: list[tuple[int, ...]], strategy: str, ratio: float) -> FusedPart:
        encoder = self.encoder
        named = tuple(PromptChunk(c, encoder.key(c), encoder.exact_key(c)) for c in chunks)
        facts = ModelFacts(self.decoder.spec.num_layers, (1, 2))
        preamble = encoder.preamble
        opened = open_strategy(strategy, facts)
        if opened.taper is not None:  # of so few layers the real one would leave none out
            opened = replace(opened, taper=Taper(1, 0.4))
        return FusedPart(self.store, preamble, named, opened, ratio)

    def request(
        self, chunks: list[tuple[int, ...]], strategy: str = "weave", ratio: float = 0.3
    ) -> EngineRequest:
        exact = with_chunks(PREAMBLE, chunks, QUESTION, use_tree=False, max_tokens=6)
        return replace(exact, fused=self.part(chunks, strategy, ratio))

    def alone(self, request: EngineRequest) -> list[int]:
        """Woven into a buffer of its own, then decoded one by one."""
        decoder, part = Decoder(self.decoder.spec, self.decoder.weights), request.fused
        assert part is not None
        kv = decoder.new_kv(1)
        frame = PromptFrame(part.preamble, request.question)
        logits = prefill_stored(
            decoder, self.store, part.chunks, frame, part.strategy, part.ratio, kv
        ).logits
        tokens, at = [int(logits.argmax())], len(request.prompt_ids)
        while len(tokens) < request.sampling.max_tokens:
            logits = decoder.forward([Rows([tokens[-1]], [at], kv, [0])])[0]
            tokens.append(int(logits.argmax()))
            at += 1
        return tokens


def answer(ticket: Ticket) -> list[int]:
    return [choice.token_id for choice in ticket]


def shuffled(rng: random.Random) -> list[tuple[int, ...]]:
    return rng.sample(CHUNKS, rng.randint(1, len(CHUNKS)))


def at_rest(engine: Engine, world: World) -> None:
    engine.run_alone(engine.check_integrity)
    assert world.store.num_pinned() == 0
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def shared_rows(engine: Engine, pool: KVPool) -> dict[bytes, torch.Tensor]:
    """Everything the tree would give out, by path."""

    def copy() -> dict[bytes, torch.Tensor]:
        page = pool.page_tokens
        found = {}
        for node in engine.tree:
            table = list(node.pages[DEVICE].handle)
            rows = node.end - (node.end - node.num_tokens) // page * page
            both = torch.stack([pool.keys[:, table], pool.values[:, table]])
            found[node.key] = both.flatten(2, 3)[:, :, :rows].clone()
        return found

    return engine.run_alone(copy)
