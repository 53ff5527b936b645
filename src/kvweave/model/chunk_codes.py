"""Pages of a pool that hold shared chunks in 8 bits (`kernels/coded.py`).

    a page of own rows   | token 0       | token 1       | ..      in the dtype of the pool
    the same, of a chunk | 0     | 1     | 2     | 3     | ..      in bytes, scales apart

Any page can become either: one pool, one book of pages. Scales have room for all of them.
"""

import torch
from torch import Tensor

from kvweave.kernels.types import CodedPages
from kvweave.model.rope import frequencies
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import Weights

SCALE = torch.float16
USUAL = 4.0  # how large a pair of key channels is about, without a bias


class ChunkCodes:
    """All pages of a pool as codes. Views: whoever writes codes writes the pool."""

    def __init__(self, keys: Tensor, values: Tensor, lifts: Tensor | None) -> None:
        """Keys and values of a pool [L, P, page, Hk, D]. `lifts`: see `key_lifts`."""
        layers, pages, page, heads, head_dim = keys.shape
        self.page_tokens = page * keys.element_size()
        codes = (layers, pages, self.page_tokens, heads, head_dim // 2)
        both = [x.view(torch.int16).view(codes) for x in (keys, values)]
        scales = (layers, pages, heads, self.page_tokens, 2)
        zeros = torch.zeros(scales, dtype=SCALE, device=keys.device)
        each = [None] * layers if lifts is None else lifts
        # once: a layer is asked for at every step, and each view takes the host a while
        self._layers = list(map(CodedPages, *both, zeros, each))

    def layer(self, layer: int) -> CodedPages:
        return self._layers[layer]


def scale_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a pool with codes needs besides, for each of its tokens."""
    return 2 * spec.num_layers * spec.num_kv_heads * dtype.itemsize * SCALE.itemsize


@torch.no_grad()
def key_lifts(spec: ModelSpec, weights: Weights) -> Tensor | None:
    """[L, Hk, D] float32: what key channels are divided by before they share a scale, and queries
    multiplied by. None: the projections have no bias, or a norm follows.

    A bias makes a few channels large for all tokens. With Qwen2.5-Coder-0.5B codes of the first 500
    of 560 tokens cost the others 0.0028 nats without this and 0.0001 with it (tried by hand, on a
    CPU in float32); with SmolLM2, which has no bias, 0.00015.
    """
    layers = weights.layers
    if not spec.qkv_bias or layers[0].k_norm is not None:
        return None
    nothing = torch.zeros_like(weights.embedding[:1])
    first = spec.num_heads * spec.head_dim
    end = first + spec.num_kv_heads * spec.head_dim
    # what a product makes of nothing is its bias, however its weights are kept
    bias = torch.stack([layer.qkv(nothing)[0, first:end].float() for layer in layers])
    square = bias.view(len(layers), spec.num_kv_heads, spec.head_dim).square()
    half = len(frequencies(spec.rope))
    pair = square[..., :half] + square[..., half : 2 * half]  # channels that turn together
    each = torch.cat((pair, pair, square[..., 2 * half :]), dim=-1)
    return (each + USUAL**2).sqrt()
