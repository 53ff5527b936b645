"""What is computed and stored beside chunk KV for strategies that ask for it: the extras."""

from collections.abc import Sequence

import torch

from kvweave.fuse.encode.anchors import (
    choose_anchors,
    extra_name,
    knorm_scores,
    kvzip_scores,
    pack_anchors,
    sink_scores,
)
from kvweave.fuse.encode.chunk_pass import Prefix
from kvweave.fuse.encode.inter_attention import inter_attention
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.selectors.cachecraft import INTER
from kvweave.kv.format.codec import LayerKV


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
