"""Extras: what is computed and stored beside chunk KV for strategies that ask for it.

inter           how much each token of a chunk looks outside it, at the last layer: what
                Cache-Craft's core selects by. Behind the bare preamble the outside is that
anchors:RULE    the tokens that stand for the chunk while a question is probed (anchors.py)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.fuse.encode.anchors import (
    RULES,
    choose_anchors,
    extra_name,
    knorm_scores,
    kvzip_scores,
    pack_anchors,
    sink_scores,
)
from kvweave.fuse.encode.chunk_pass import with_prefix
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.kernels.attention import attend
from kvweave.kernels.rope import rotate
from kvweave.kernels.types import Segment
from kvweave.kv.format.codec import LayerKV

INTER = "inter"  # float16 [T], attention to keys outside the chunk, summed over heads
EXTRAS = (INTER, *(extra_name(rule) for rule in RULES))  # all names


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
        if name == extra_name("sink"):
            scores = [sink_scores(layers) for layers in made]
        elif name == extra_name("knorm"):
            scores = [knorm_scores(layers) for layers in made]
        else:
            scores = kvzip_scores(decoder, prefix, chunks, made, repeat_ids)
        for extras, layers, each in zip(found, made, scores, strict=True):
            extras[name] = pack_anchors(choose_anchors(layers, each))
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
