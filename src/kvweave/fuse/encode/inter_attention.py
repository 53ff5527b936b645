"""Inter-attention: how much each token of a chunk looks outside it, at the last layer.

Measured when a chunk is encoded and stored beside its KV as float16; what Cache-Craft's core
selects by. Behind the bare preamble the outside is the preamble.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.fuse.encode.chunk_pass import Prefix, behind
from kvweave.fuse.protocol import FusionDecoder
from kvweave.kernels.attention import attend
from kvweave.kernels.rope import rotate
from kvweave.kernels.types import Segment
from kvweave.kv.format.codec import LayerKV


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
        keys, values = behind(prefix, layer, rotate(layers[layer].k, angles), layers[layer].v)
        h = decoder.finish(layer, h, attend(q, positions, [Segment(0, count, keys, values)]))
    q = rotate(decoder.qkv(last, h).q, angles).float()
    keys, _ = behind(prefix, last, rotate(layers[last].k, angles), layers[last].v)
    group = q.shape[1] // keys.shape[1]
    spread = keys.float().repeat_interleave(group, dim=1)  # [start + T, Hq, D]
    logits = torch.einsum("thd,khd->htk", q, spread) * q.shape[-1] ** -0.5
    hidden = torch.arange(start + count) > positions[:, None]
    probs = logits.masked_fill(hidden.to(logits.device), float("-inf")).softmax(-1)
    outside: Tensor = probs[..., :start].sum((0, 2))
    return outside
