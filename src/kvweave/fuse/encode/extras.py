"""Extras: what is computed and stored beside chunk KV for strategies that ask for it.

    inter                 how much each token of a chunk looks outside it, at the last layer: what
                          Cache-Craft's core selects by. Behind the bare preamble the outside is
                          that
    anchors:RULE          the tenth of its tokens that stands for the chunk while a question is
    anchors:RULE:SHARE    probed, or another share

Extras are made when a strategy first wants them (`ChunkEncoder.add_extras`). Anchors are chosen per
chunk and per layer, by one of three rules, and stored as one small blob (indices, keys before RoPE,
values), so that a probe needs none of the chunk's ordinary bytes.

    sink    the first tokens
    knorm   the lowest key norms
    kvzip   the keys most looked at while the model repeats the chunk word for word, as far as the
            model's positions go

Shapes: T tokens of a chunk, A anchors, L layers, Hk KV heads, D head dim.
"""

import math
import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_pass import with_prefix
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.fuse.request import bounds_of
from kvweave.kernels.attention import attend
from kvweave.kernels.column_scores import column_scores
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Segment
from kvweave.kv.format.codec import LayerKV

REPEAT = "\n\nRepeat the previous context exactly."  # what kvzip asks for
RULES = ("sink", "knorm", "kvzip")
SHARE = 0.10  # of a chunk's tokens
MOST_SHARE = 1.0  # of its tokens, that all anchors beside it take together
NUM_SINKS = 4  # first keys of the prefix that take part in kvzip's softmax
HEADER = struct.Struct("<4sHHHH")
MAGIC = b"anc1"


class Anchors(NamedTuple):
    """The anchors of one chunk."""

    indices: Tensor  # int64 [L, A] ascending within a layer, on the host
    keys: Tensor  # [L, A, Hk, D] before RoPE
    values: Tensor  # [L, A, Hk, D]


def extra_name(rule: str, share: float = SHARE) -> str:
    """The name under which a chunk's anchors lie beside its KV."""
    if rule not in RULES:
        raise ConfigError(f"anchor rule {rule!r} is unknown; known: {', '.join(RULES)}")
    return f"anchors:{rule}" if share == SHARE else f"anchors:{rule}:{share:g}"


def anchors_of(name: str) -> tuple[str, float]:
    """The rule and the share of an extra that `extra_name` has named."""
    _, rule, *share = name.split(":")
    return rule, float(share[0]) if share else SHARE


def choose_beside(wanted: Collection[str], there: Collection[str]) -> tuple[str, ...]:
    """Return the extras that lie beside a chunk from now on: the wanted ones, and of those that are
    there as many as MOST_SHARE leaves room for. Without a bound every share that a request names
    would stay, and a header refuses an object with more beside its layers than these take."""
    kept = set(wanted)
    for name in sorted(set(there) - kept, key=_share_of):
        if sum(map(_share_of, (*kept, name))) <= MOST_SHARE:
            kept.add(name)
    return tuple(sorted(kept))


def _share_of(name: str) -> float:
    """The share of a chunk's tokens that an extra keeps."""
    return 0.0 if name == INTER else anchors_of(name)[1]


def choose_anchors(layers: Sequence[LayerKV], scores: Tensor, share: float = SHARE) -> Anchors:
    """Keep the best `share` of a chunk's tokens in every layer; `scores` are [L, T]."""
    num_tokens = scores.shape[1]
    count = min(num_tokens, max(1, math.ceil(share * num_tokens)))
    order = scores.float().cpu().sort(dim=1, descending=True, stable=True).indices
    indices = order[:, :count].sort(dim=1).values
    at = indices.to(layers[0].k.device)
    keys = torch.stack([kv.k[i] for kv, i in zip(layers, at, strict=True)])
    values = torch.stack([kv.v[i] for kv, i in zip(layers, at, strict=True)])
    return Anchors(indices, keys, values)


def sink_scores(layers: Sequence[LayerKV]) -> Tensor:
    """[L, T]: the earlier the better."""
    num_tokens = len(layers[0].k)
    return -torch.arange(num_tokens, dtype=torch.float32).expand(len(layers), -1)


def knorm_scores(layers: Sequence[LayerKV]) -> Tensor:
    """[L, T]: mean key norm over heads, negative: low norms come first."""
    return -torch.stack([kv.k.float().norm(dim=-1).mean(-1) for kv in layers])


@torch.inference_mode()
def kvzip_scores(
    decoder: FusionDecoder,
    prefix: Prefix,
    chunks: Sequence[Sequence[int]],
    made: Sequence[Sequence[LayerKV]],
    repeat_ids: Sequence[int],
) -> list[Tensor]:
    """[L, T] per chunk: the most attention a key gets while the model repeats its chunk.

    `made` is the chunks' KV behind `prefix`; `repeat_ids` asks for the repetition and ends with the
    header of the answer. All chunks run in one pass. A repetition that would run past the model's
    last position ends there.
    """
    first = len(prefix.token_ids)
    room = [max(1, decoder.spec.max_context - first - len(ids)) for ids in chunks]
    texts = [[*repeat_ids, *ids][:most] for ids, most in zip(chunks, room, strict=True)]
    bounds = bounds_of(map(len, texts))
    starts = [first + len(ids) for ids in chunks]
    positions = torch.cat(
        [at + torch.arange(len(text)) for at, text in zip(starts, texts, strict=True)]
    )
    angles = decoder.angles(positions.to(decoder.device))
    chunk_at = decoder.angles(
        torch.arange(first, first + max(map(len, chunks)), device=decoder.device)
    )
    h = decoder.embed(torch.tensor([i for text in texts for i in text], device=decoder.device))
    scores: list[list[Tensor]] = [[] for _ in chunks]
    for layer in range(decoder.spec.num_layers):
        projected = decoder.qkv(layer, h)
        q, k = rotate(projected.q, angles), rotate(projected.k, angles)
        segments = []
        for i, (start, end) in enumerate(bounds):
            stored = made[i][layer]
            turn = Angles(chunk_at.cos[: len(stored.k)], chunk_at.sin[: len(stored.k)])
            keys, own = rotate(stored.k, turn), k[start:end]
            causal = torch.ones(len(own), len(own), dtype=torch.bool, device=k.device).tril()
            others: list[tuple[Tensor, Tensor | None]] = [(own, causal)]
            if prefix.layers:
                others.append((prefix.layers[layer].k[:NUM_SINKS], None))
            scores[i].append(
                column_scores(q[start:end], keys, others=others, rows="max", heads="max").cpu()
            )
            whole = torch.cat([keys, own]), torch.cat([stored.v, projected.v[start:end]])
            segments.append(Segment(start, end, *with_prefix(prefix, layer, *whole)))
        if layer < decoder.spec.num_layers - 1:
            h = decoder.finish(layer, h, attend(q, positions, segments))
    return [torch.stack(each) for each in scores]


def pack_anchors(anchors: Anchors) -> bytes:
    """Anchors as they lie beside the chunk KV: int32 indices, then float16 keys and values."""
    num_layers, count = anchors.indices.shape
    heads, dim = anchors.keys.shape[2:]
    parts = [
        HEADER.pack(MAGIC, num_layers, count, heads, dim),
        anchors.indices.to(torch.int32).numpy().tobytes(),
        _to_float16(anchors.keys).numpy().tobytes(),
        _to_float16(anchors.values).numpy().tobytes(),
    ]
    return b"".join(parts)


def _to_float16(x: Tensor) -> Tensor:
    """Return `x` as float16 on the host. Values beyond its range are cut: anchors only steer a
    choice."""
    largest = torch.finfo(torch.float16).max
    return x.float().clamp(-largest, largest).to("cpu", torch.float16)


def view_anchors(blob: Tensor) -> Anchors:
    """Read what `pack_anchors` wrote, keys and values as views of the blob: uint8 [n] on the host.
    Raises ValueError if the blob is none."""
    num_layers, count, heads, dim = _sizes(blob[: HEADER.size].numpy().tobytes(), len(blob))
    num_indices, num_values = num_layers * count, num_layers * count * heads * dim
    parts = torch.split(blob[HEADER.size :], [4 * num_indices, 2 * num_values, 2 * num_values])
    shape = (num_layers, count, heads, dim)
    keys, values = (part.view(torch.float16).view(shape) for part in parts[1:])
    return Anchors(parts[0].view(torch.int32).view(num_layers, count).long(), keys, values)


def _sizes(start: bytes, num_bytes: int) -> tuple[int, int, int, int]:
    """Layers, anchors, heads, head dim of a blob. Raises ValueError if it is none."""
    if len(start) < HEADER.size or start[:4] != MAGIC:
        raise ValueError("these bytes are no anchors")
    _, num_layers, count, heads, dim = HEADER.unpack_from(start)
    if num_bytes != HEADER.size + 4 * num_layers * count * (1 + heads * dim):
        raise ValueError(f"anchors of {num_layers} layers have another size than {num_bytes}")
    return num_layers, count, heads, dim


INTER = "inter"  # float16 [T], attention to keys outside the chunk, summed over heads


def compute_extras(
    decoder: FusionDecoder,
    names: Sequence[str],
    prefix: Prefix,
    chunks: Sequence[tuple[int, ...]],
    made: Sequence[Sequence[LayerKV]],
    repeat_ids: tuple[int, ...],
) -> list[dict[str, bytes]]:
    """The extras of these names for each of some chunks, from their token ids and their KV behind
    `prefix`, as bytes of the store. `repeat_ids` ask the model for a repetition, for anchors that
    are found so."""
    found: list[dict[str, bytes]] = [{} for _ in chunks]
    for name in names:
        if name == INTER:
            for token_ids, layers, extras in zip(chunks, made, found, strict=True):
                inter = inter_attention(decoder, prefix, token_ids, layers)
                extras[name] = inter.to("cpu", torch.float16).numpy().tobytes()
            continue
        rule, share = anchors_of(name)
        if rule == "sink":
            scores = [sink_scores(layers) for layers in made]
        elif rule == "knorm":
            scores = [knorm_scores(layers) for layers in made]
        else:
            scores = kvzip_scores(decoder, prefix, chunks, made, repeat_ids)
        for extras, layers, each in zip(found, made, scores, strict=True):
            extras[name] = pack_anchors(choose_anchors(layers, each, share))
    return found


@torch.inference_mode()
def inter_attention(
    decoder: FusionDecoder, prefix: Prefix, token_ids: Sequence[int], layers: Sequence[LayerKV]
) -> Tensor:
    """[T] float32: probability on keys outside the chunk, summed over heads, at the last layer.

    `layers` is the chunk's KV behind `prefix`; its hidden states are computed again to get queries.
    """
    start, count = len(prefix.token_ids), len(token_ids)
    positions = torch.arange(start, start + count)
    angles = decoder.angles(positions.to(decoder.device))
    h = decoder.embed(torch.tensor(list(token_ids), device=decoder.device))
    last = decoder.spec.num_layers - 1
    for layer in range(last):
        q = rotate(decoder.qkv(layer, h).q, angles)
        keys, values = with_prefix(prefix, layer, rotate(layers[layer].k, angles), layers[layer].v)
        h = decoder.finish(layer, h, attend(q, positions, [Segment(0, count, keys, values)]))
    q = rotate(decoder.qkv(last, h).q, angles).float()
    keys, _ = with_prefix(prefix, last, rotate(layers[last].k, angles), layers[last].v)
    group = q.shape[1] // keys.shape[1]
    spread = keys.float().repeat_interleave(group, dim=1)  # [start + T, Hq, D]
    logits = torch.einsum("thd,khd->htk", q, spread) * q.shape[-1] ** -0.5
    hidden = torch.arange(start + count) > positions[:, None]
    probs = logits.masked_fill(hidden.to(logits.device), float("-inf")).softmax(-1)
    outside: Tensor = probs[..., :start].sum((0, 2))
    return outside
