"""Chunks stored in 8-bit codes, decoded, turned and laid in place at once: by compiled kernels.

Where there are none, chunks are decoded by their codec and turned by rope.py: the definition. On a
GPU unpack.py does the same for any codec.

Shapes: N tokens of all chunks, T rows of the request's KV, Hk KV heads, D head dim, r rotary dims.
"""

from collections.abc import Sequence

from torch import Tensor

from kvweave.kernels.dispatch import compiled
from kvweave.kernels.native.stored import StoredCodes, has_whole_rows, lay_chunks
from kvweave.kernels.rope import Angles

__all__ = ["StoredCodes", "can_lay_codes", "lay_codes", "takes_codes"]


def can_lay_codes(head_dim: int) -> bool:
    """Whether there are kernels for heads of this size: then for float32 on a CPU."""
    library = compiled()
    return library is not None and head_dim <= library.most_dim


def takes_codes(keys: Tensor, values: Tensor) -> bool:
    """Whether they can be laid into this memory [T, Hk, D]."""
    return compiled(keys, values) is not None and has_whole_rows(keys, values)


def lay_codes(
    chunks: Sequence[StoredCodes], group: int, turn: Angles, keys: Tensor, values: Tensor
) -> None:
    """Write chunks into rows of keys, turned, and values [T, Hk, D]. `turn` [N, 1, r/2] is of all
    tokens, chunk by chunk; `group` values share parameters. Only where `takes_codes`."""
    library = compiled(keys, values)
    assert library is not None, "asked without kernels, or for another dtype than float32"
    lay_chunks(library, chunks, group, turn, keys, values)
