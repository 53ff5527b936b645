"""Small worlds for tests of fusion: a tiny model, a prompt of a few chunks, and their KV."""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.encode.extras import (
    INTER,
    Anchors,
    choose_anchors,
    kvzip_scores,
    pack_anchors,
    view_anchors,
)
from kvweave.fuse.fuse import Fused, fuse
from kvweave.fuse.prefill import Prefilled as StoredPrefill
from kvweave.fuse.prefill import PromptFrame, StoredPrompt
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.request import FuseRequest, PromptChunk, classify
from kvweave.fuse.selector import Scene
from kvweave.fuse.selectors.strategies import NAMES, open_strategy
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import Stitched, stitch
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.fuse.taper import Taper
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import (
    EncodedLayer,
    PackedChunk,
    extra_tensor,
    layer_of,
    layers_of,
)
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.model.sequence_kv import SequenceKV

VOCABULARY = 97
SELECTING = [name for name in NAMES if name not in ("full", "prefix", "reuse")]
REPEAT = (1, 2, 3)  # stands for "repeat the text"


def make_ids(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]


(PREAMBLE, QUESTION), CHUNKS = make_ids(3, 6, 5), make_ids(4, 11, 1, 19, 7)


class Prefilled(NamedTuple):
    """A prompt in a buffer: logits of its last token, and all its KV."""

    logits: Tensor
    keys: list[Tensor]  # per layer [T, Hk, D]
    values: list[Tensor]


def full_prefill(decoder: Decoder, ids: Sequence[int]) -> Prefilled:
    """Every token computed by the decoder's own loop, nothing reused."""
    kv = decoder.new_kv(len(ids))
    logits = decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])[0]
    return prefilled(decoder, logits, kv)


def prefilled(decoder: Decoder, logits: Tensor, kv: SequenceKV) -> Prefilled:
    layers = range(decoder.spec.num_layers)
    return Prefilled(logits, [kv.keys(i) for i in layers], [kv.values(i) for i in layers])


@dataclass
class World:
    """One prompt over one decoder. Chunks are named by their token ids."""

    decoder: Decoder
    preamble: Sequence[int] = tuple(PREAMBLE)
    chunks: Sequence[Sequence[int]] = tuple(CHUNKS)
    question: Sequence[int] = tuple(QUESTION)
    missing: Collection[int] = ()  # chunks, by their number, whose KV is not there
    first_is_exact: bool = True
    asked: tuple[int, int] | None = None
    extras: dict[str, dict[ChunkKey, bytes]] | None = None  # None: all that selectors may want
    prefix: Prefix = field(init=False)
    made: list[list[LayerKV]] = field(init=False)
    request: FuseRequest = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = encode_prefix(self.decoder, self.preamble)
        placed = [i for i in range(len(self.chunks)) if i not in self.missing]
        ids = [self.chunks[i] for i in placed]
        self.made = encode_chunks(self.decoder, self.prefix, ids) if ids else []
        keys = [key_of(chunk) for chunk in self.chunks]
        self.request = classify(
            self.preamble,
            list(zip(keys, self.chunks, strict=True)),
            self.question,
            present={keys[i] for i in placed},
            first_is_exact=self.first_is_exact,
            asked=self.asked,
        )
        if self.extras is None:
            self.extras = self._extras([keys[i] for i in placed], ids) if ids else {}
        self.source = ComputedChunks(self.made, self.extras)

    def _extras(
        self, keys: list[ChunkKey], ids: list[Sequence[int]]
    ) -> dict[str, dict[ChunkKey, bytes]]:
        scores = kvzip_scores(self.decoder, self.prefix, ids, self.made, REPEAT)
        anchors = {
            key: pack_anchors(choose_anchors(made, score))
            for key, made, score in zip(keys, self.made, scores, strict=True)
        }
        rng = np.random.default_rng(0)
        inter = {
            key: rng.random(len(chunk)).astype(np.float16).tobytes()
            for key, chunk in zip(keys, ids, strict=True)
        }
        return {"anchors:kvzip": anchors, INTER: inter}

    def stitched(self, kv: SequenceKV | None = None) -> Stitched:
        kv = kv or self.decoder.new_kv(1)
        return stitch(self.decoder, self.request, self.prefix, self.source, kv)

    def scene(self) -> Scene:
        hits = torch.tensor(self.request.hits, dtype=torch.int64)
        return Scene(self.stitched(), hits)

    def strategy(self, name: str) -> Strategy:
        strategy = open_strategy(name, ModelFacts(self.decoder.spec.num_layers, (1, 2)))
        if strategy.taper is not None:  # of so few layers the real one would leave none out
            strategy = replace(strategy, taper=Taper(1, 0.4))
        return strategy

    def fuse(self, strategy: Strategy | str, ratio: float) -> tuple[Fused, Prefilled]:
        if isinstance(strategy, str):
            strategy = self.strategy(strategy)
        kv = self.decoder.new_kv(1)
        fused = fuse(self.stitched(kv), strategy, ratio)
        return fused, prefilled(self.decoder, fused.logits, kv)

    @cached_property
    def full(self) -> Prefilled:
        """The whole prompt computed. Only for reading."""
        return full_prefill(self.decoder, self.request.prompt_ids)

    def laid_by_hand(self) -> SequenceKV:
        """Preamble and chunks in a buffer, without any of the code under test but `rotate`."""
        kv = self.decoder.new_kv(len(self.request.prompt_ids))
        kv.reserve(len(self.request.prompt_ids))
        angles = self.decoder.angles(torch.arange(len(self.request.prompt_ids)))
        for layer in range(self.decoder.spec.num_layers):
            keys, values = kv.keys(layer), kv.values(layer)
            unturned = torch.zeros_like(keys)
            for span, made in zip(self.request.placed, self.made, strict=True):
                unturned[span.start : span.end] = made[layer].k
                values[span.start : span.end] = made[layer].v
            rotate(unturned, angles, out=keys)
            if self.prefix.layers:
                front = self.prefix.layers[layer]
                keys[: len(front.k)], values[: len(front.k)] = front.k, front.v
        return kv

    @torch.inference_mode()
    def dense_pass(self, *rows_per_layer: Sequence[int]) -> Prefilled:
        """The fused pass in the open: dense scores, a boolean mask, no shortcuts.

        Rows of the first layers; the last ones given run through all the rest.
        """
        decoder, kv = self.decoder, self.laid_by_hand()
        ids = torch.tensor(self.request.prompt_ids)
        at = torch.tensor(rows_per_layer[0])
        h = decoder.embed(ids[at])
        for layer in range(decoder.spec.num_layers):
            now = torch.tensor(rows_per_layer[min(layer, len(rows_per_layer) - 1)])
            h, at = h[torch.isin(at, now)], now
            angles = decoder.angles(at)
            q, k, v = decoder.qkv(layer, h)
            keys, values = kv.keys(layer), kv.values(layer)
            keys[at], values[at] = rotate(k, angles), v
            group = q.shape[1] // k.shape[1]
            all_k, all_v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("rhd,nhd->hrn", rotate(q, angles).double(), all_k)
            hidden = torch.arange(len(ids)) > at[:, None]  # [R, T]
            scores = (scores * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
            o = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), all_v)
            h = decoder.finish(layer, h, o.to(h.dtype))
        return prefilled(decoder, decoder.logits(h)[-1], kv)


def prefill_stored(
    decoder: Decoder,
    store: KVStore,
    chunks: Sequence[PromptChunk],
    frame: PromptFrame,
    strategy: Strategy,
    ratio: float,
    kv: SequenceKV | None = None,
) -> StoredPrefill:
    """Prefill a prompt whose chunks are in a store."""
    with StoredPrompt(decoder.spec.num_layers, chunks, store, strategy) as stored:
        return stored.prefill(decoder, frame, OwnRoom(kv or decoder.new_kv(1)), ratio)


@dataclass
class Packed:
    """Packed chunks that have all arrived: what a transfer is to a source."""

    chunks: dict[ChunkKey, PackedChunk]

    def is_ready(self, layer: int) -> bool:
        return True

    def wait_layer(self, layer: int) -> dict[ChunkKey, EncodedLayer]:
        return {key: layer_of(p.header, p.memory, layer) for key, p in self.chunks.items()}

    def whole(self, keys: Iterable[ChunkKey]) -> list[Tensor] | None:
        found = [self.chunks.get(key) for key in keys]
        return None if None in found else [layers_of(p.header, p.memory) for p in found if p]

    def extras(self, name: str) -> dict[ChunkKey, Tensor]:
        found = {key: extra_tensor(p.header, p.memory, name) for key, p in self.chunks.items()}
        return {key: data for key, data in found.items() if data is not None}


def key_of(chunk: Sequence[int]) -> ChunkKey:
    return ChunkKey(random.Random(str(list(chunk))).randbytes(32))


def assert_same(ours: Prefilled, want: Prefilled, tolerance: float = 1e-4) -> None:
    """Logits and all KV agree."""
    torch.testing.assert_close(ours.logits, want.logits, atol=tolerance, rtol=tolerance)
    assert_same_kv(ours, want, tolerance=tolerance)


def assert_same_kv(
    ours: Prefilled,
    want: Prefilled,
    rows: Sequence[int] | slice = slice(None),
    layers: Sequence[int] | None = None,
    tolerance: float = 1e-4,
) -> None:
    index = rows if isinstance(rows, slice) else list(rows)
    chosen = range(len(ours.keys)) if layers is None else layers
    for mine, theirs in ((ours.keys, want.keys), (ours.values, want.values)):
        torch.testing.assert_close(
            torch.stack([mine[i][index] for i in chosen]),
            torch.stack([theirs[i][index] for i in chosen]),
            atol=tolerance,
            rtol=tolerance,
        )


def unpack_anchors(blob: bytes) -> Anchors:
    """What `pack_anchors` wrote."""
    return view_anchors(torch.from_numpy(np.frombuffer(blob, np.uint8).copy()))
