"""Compute chunk KV: each chunk behind a prefix, which is the preamble and its encoding context.

The prefix is computed once. Chunks then run as one flat batch, each its own sequence at the
positions right behind its prefix. Keys are kept before rotation, so a chunk can stand anywhere
later. A chunk right behind the bare preamble is exact: that is where it was computed.

Shapes: R rows of all chunks, Hk KV heads, D head dim.
"""

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.fuse.request import bounds_of
from kvweave.kernels.attention import attend
from kvweave.kernels.rope import rotate
from kvweave.kernels.types import Segment
from kvweave.kv.format.codec import LayerKV

PASS_ROWS = 2048  # rows computed together: enough to keep the products busy, bounded in memory


def encode_prefix(decoder: FusionDecoder, token_ids: Sequence[int]) -> Prefix:
    """Compute the KV of a prefix. An empty one is fine."""
    if not token_ids:
        return Prefix((), ())
    (layers,) = encode_chunks(decoder, Prefix((), ()), [token_ids])
    return prefix_of(decoder, token_ids, layers)


@torch.inference_mode()
def prefix_of(
    decoder: FusionDecoder, token_ids: Sequence[int], layers: Sequence[LayerKV]
) -> Prefix:
    """Tokens that stand in front of everything, with their KV as `encode_chunks` gives it."""
    angles = decoder.angles(torch.arange(len(token_ids), device=decoder.device))
    turned = (LayerKV(rotate(kv.k, angles), kv.v) for kv in layers)
    return Prefix(tuple(token_ids), tuple(turned))


def passes(lengths: Sequence[int], max_rows: int = PASS_ROWS) -> Iterator[range]:
    """Cut a list of chunks into runs of at most `max_rows` rows (or one longer chunk)."""
    start, rows = 0, 0
    for i, length in enumerate(lengths):
        if rows and rows + length > max_rows:
            yield range(start, i)
            start, rows = i, 0
        rows += length
    if rows:
        yield range(start, len(lengths))


def encode_chunks(
    decoder: FusionDecoder, prefix: Prefix | Sequence[Prefix], chunks: Sequence[Sequence[int]]
) -> list[list[LayerKV]]:
    """KV of each chunk, layer by layer: keys before RoPE [T, Hk, D], values [T, Hk, D].

    `prefix` is one for all chunks or one for each. All chunks run in one pass; use `passes` to
    bound it. Chunks must not be empty.
    """
    work = ChunkPass(decoder, prefix, chunks)
    work.advance()
    return work.made


class ChunkPass:
    """One pass over some chunks, which may be made a few layers at a time: what else needs the
    decoder has it in between. Made and advanced on the thread that has the decoder."""

    @torch.inference_mode()
    def __init__(
        self,
        decoder: FusionDecoder,
        prefix: Prefix | Sequence[Prefix],
        chunks: Sequence[Sequence[int]],
    ) -> None:
        """Take the arguments of `encode_chunks`. Computes next to nothing."""
        assert all(chunks), "an empty chunk has no KV"
        self._decoder = decoder
        self._prefixes = [prefix] * len(chunks) if isinstance(prefix, Prefix) else prefix
        self._positions = torch.cat(  # [R] on the host
            [
                len(before.token_ids) + torch.arange(len(ids))
                for before, ids in zip(self._prefixes, chunks, strict=True)
            ]
        )
        self._bounds = bounds_of(map(len, chunks))
        self._angles = decoder.angles(self._positions.to(decoder.device))
        ids = torch.tensor([i for chunk in chunks for i in chunk], device=decoder.device)
        self._h = decoder.embed(ids)  # [R, E]
        self._layer = 0
        self.made: list[list[LayerKV]] = [[] for _ in chunks]  # whole once `advance` says so

    @torch.inference_mode()
    def advance(self, most_s: float = math.inf) -> bool:
        """Compute the next layers: at least one, none that begins after `most_s`. True: all of them
        are there."""
        give_up_s = time.perf_counter() + most_s
        while self._layer < self._decoder.spec.num_layers:
            self._compute(self._layer)
            self._layer += 1
            if time.perf_counter() >= give_up_s:
                break
        return self._layer == self._decoder.spec.num_layers

    def _compute(self, layer: int) -> None:
        decoder, angles = self._decoder, self._angles
        projected = decoder.qkv(layer, self._h)
        for made, (start, end) in zip(self.made, self._bounds, strict=True):
            made.append(LayerKV(projected.k[start:end].clone(), projected.v[start:end].clone()))
        if layer == decoder.spec.num_layers - 1:
            return  # nothing behind the last keys and values is kept
        turned = rotate(projected.k, angles)
        segments = [
            Segment(
                start, end, *with_prefix(before, layer, turned[start:end], projected.v[start:end])
            )
            for before, (start, end) in zip(self._prefixes, self._bounds, strict=True)
        ]
        attended = attend(rotate(projected.q, angles), self._positions, segments)
        self._h = decoder.finish(layer, self._h, attended)


def with_prefix(prefix: Prefix, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that the rows of one chunk look at: the prefix in front, then its own."""
    if not prefix.layers:
        return k, v
    front = prefix.layers[layer]
    return torch.cat([front.k, k]), torch.cat([front.v, v])
