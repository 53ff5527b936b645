"""One pass over a prompt of which parts are already computed.

Stitched chunk KV is laid into the request's own buffer layer by layer, rotated to its place; then
the rows to compute (missing chunks, the question, any rows chosen for recomputation) run through
that layer, write their fresh keys and values over it and attend by position. Every row writes
before any row reads, and a row sees what stands at or before it, nothing else.

With every row computed this is full prefill; with the question alone it is plain reuse.

Shapes: R rows to compute, Hk KV heads, D head dim.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.fuse.encode import Preamble
from kvweave.fuse.protocol import Decoder, KVBuffer
from kvweave.kernels.attention import Segment, attend
from kvweave.kernels.rope import Angles, rotate
from kvweave.kv.keys import ChunkKey
from kvweave.kv.objects import EncodedLayer

WaitLayer = Callable[[int], Mapping[ChunkKey, EncodedLayer]]


class Placement(NamedTuple):
    """A chunk of this prompt whose KV comes from the store."""

    key: ChunkKey
    start: int  # position of its first token
    num_tokens: int


class ChunkLost(Exception):
    """Stored KV that was promised did not arrive. The pass must start over without it."""

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        super().__init__(f"{len(keys)} chunks did not arrive")
        self.keys = tuple(keys)


@torch.inference_mode()
def fused_pass(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    rows: Sequence[int],
    preamble: Preamble,
    placements: Sequence[Placement],
    wait_layer: WaitLayer,
    kv: KVBuffer,
) -> Tensor:
    """Fill `kv` for the whole prompt and return the logits [V] of its last token.

    `rows` are the positions to compute, ascending, the last token among them. Every other position
    is covered by the preamble or a placement. `wait_layer` blocks until a layer's bytes are there.
    Raises ChunkLost when a placed chunk fails on the way, or when what arrives is not of this model
    and length; `kv` then holds garbage.
    """
    assert rows[-1] == len(prompt_ids) - 1, "the last token is always computed"
    positions = torch.tensor(rows)  # [R] on the host
    rows_on_device = positions.to(decoder.device)
    angles = decoder.angles(rows_on_device)
    placed = [_turn_of(decoder, p) for p in placements]
    kv.reserve(len(prompt_ids))
    h = decoder.embed(torch.tensor([prompt_ids[i] for i in rows], device=decoder.device))
    last = decoder.spec.num_layers - 1
    for layer in range(last + 1):
        arrived = wait_layer(layer)
        _check_arrived(decoder, placements, arrived)
        _stitch(layer, preamble, placements, placed, arrived, kv)
        projected = decoder.qkv(layer, h)
        q, at, turn = projected.q, positions, angles
        keys, values = kv.keys(layer), kv.values(layer)
        keys[rows_on_device] = rotate(projected.k, angles)
        values[rows_on_device] = projected.v
        if layer == last:  # behind the last keys only the last row matters
            q, h, at = q[-1:], h[-1:].clone(), positions[-1:]
            turn = Angles(angles.cos[-1:], angles.sin[-1:])
        o = attend(rotate(q, turn), at, [Segment(0, len(at), keys, values)])
        h = decoder.finish(layer, h, o)
    return decoder.logits(h)[0]


def _turn_of(decoder: Decoder, placement: Placement) -> Angles:
    start, end = placement.start, placement.start + placement.num_tokens
    return decoder.angles(torch.arange(start, end, device=decoder.device))


def _check_arrived(
    decoder: Decoder, placements: Sequence[Placement], arrived: Mapping[ChunkKey, EncodedLayer]
) -> None:
    """Raise ChunkLost unless every placed chunk is there and has the shape of its place."""
    spec = decoder.spec
    lost = [
        p.key
        for p in placements
        if p.key not in arrived
        or arrived[p.key].shape[:3] != (p.num_tokens, spec.num_kv_heads, spec.head_dim)
    ]
    if lost:
        raise ChunkLost(lost)


def _stitch(
    layer: int,
    preamble: Preamble,
    placements: Sequence[Placement],
    turns: Sequence[Angles],
    arrived: Mapping[ChunkKey, EncodedLayer],
    kv: KVBuffer,
) -> None:
    """Lay one layer of everything that is not computed into the request's buffer."""
    keys, values = kv.keys(layer), kv.values(layer)
    if preamble.layers:
        keys[: len(preamble.token_ids)] = preamble.layers[layer].k
        values[: len(preamble.token_ids)] = preamble.layers[layer].v
    for placement, turn in zip(placements, turns, strict=True):
        stored = arrived[placement.key].decode()
        place = slice(placement.start, placement.start + placement.num_tokens)
        rotate(stored.k.to(keys.device), turn, out=keys[place])
        values[place] = stored.v.to(values.device)
