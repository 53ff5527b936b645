"""The bytes of a layer stored as group codes: which pieces they have, and one behind the other.

    keys: codes, scales[, lows]    values: codes, scales[, lows]

Codes are [T, H, D] as kernels/quantise.py packs them, parameters fp16 per group: of keys along
tokens, of values along the head dim. Layers of several chunks are joined piece by piece, which
makes them one long layer whose key groups are short where a chunk ends.

Shapes: T tokens, H KV heads, D head dim; a layer's bytes are uint8 [n].
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvweave.kernels.quantise import Groups, num_groups
from kvweave.kv.format.layout import LayerShape

KEY_AXIS, VALUE_AXIS = 0, 2  # keys are grouped along tokens, values along channels


@lru_cache(maxsize=1024)  # asked for every layer of every chunk
def sizes_of(shape: LayerShape, bits: int, group: int, params: int) -> tuple[int, ...]:
    """Bytes of each piece: K codes, K parameters, V codes, V parameters.

    Raises ValueError for a shape that these codes cannot represent.
    """
    if shape.head_dim * bits % 8:
        raise ValueError(f"{bits} bits need an even head dim, not {shape.head_dim}; use int8")
    codes = shape.num_tokens * shape.num_kv_heads * shape.head_dim * bits // 8
    k_params = 2 * num_groups(shape.num_tokens, group) * shape.num_kv_heads * shape.head_dim
    v_params = 2 * shape.num_tokens * shape.num_kv_heads * num_groups(shape.head_dim, group)
    return (codes, *[k_params] * params, codes, *[v_params] * params)


def fill(out: Tensor, pieces: Sequence[Tensor]) -> None:
    """Lay pieces of any dtype behind each other into the bytes of a layer."""
    sizes = [p.numel() * p.element_size() for p in pieces]
    for part, piece in zip(_cut(out, sizes), pieces, strict=True):
        part.copy_(piece.contiguous().view(torch.uint8).flatten())


def joined(
    data: Sequence[Tensor], shapes: Sequence[LayerShape], bits: int, group: int, params: int
) -> tuple[Groups, Groups]:
    """Keys and values of layers that were stored alike, one behind the other along tokens.

    Views of the bytes if it is one layer, as far as they can be viewed.
    """
    cuts = [
        _cut(each, sizes_of(shape, bits, group, params))
        for each, shape in zip(data, shapes, strict=True)
    ]
    pieces = iter(
        [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*cuts, strict=True)]
    )
    heads, dim = shapes[0].num_kv_heads, shapes[0].head_dim

    def groups(groups_per_head: int) -> Groups:
        q = next(pieces).view(-1, heads, dim * bits // 8)
        scale = _halves(next(pieces)).view(-1, heads, groups_per_head)
        low = _halves(next(pieces)).view(scale.shape) if params == 2 else None
        return Groups(q, scale, low)

    return groups(dim), groups(num_groups(dim, group))


def _cut(data: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    return iter(data[: sum(sizes)].split_with_sizes(sizes))


def _halves(part: Tensor) -> Tensor:
    """Bytes as fp16. Behind an odd number of int4 codes they lie between two halves: copied."""
    return (part.clone() if part.storage_offset() % 2 else part).view(torch.float16)
