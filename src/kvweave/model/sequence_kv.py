"""The keys and values of one sequence, dense by position.

Keys are rotated to their positions. The buffer doubles when it runs out, so a sequence of unknown
length costs one copy per doubling. Owned by the thread that runs the sequence.
"""

import math
import mmap
from typing import Protocol

import torch
from torch import Tensor

from kvweave.model.spec import ModelSpec

HUGE_BYTES = 8 << 20  # from here on


class DenseKV(Protocol):
    """Keys and values that lie side by side, position p at index p: what rows can be run over."""

    def reserve(self, num_tokens: int) -> None: ...
    def keys(self, layer: int) -> Tensor: ...
    def values(self, layer: int) -> Tensor: ...


class SequenceKV:
    """Room for `capacity` tokens; position p lies at index p."""

    def __init__(
        self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tokens = 0
        shape = (spec.num_layers, max(capacity, 1), spec.num_kv_heads, spec.head_dim)
        self._keys = room_for(shape, dtype, device)  # [L, capacity, Hk, D]
        self._values = room_for(shape, dtype, device)

    @property
    def num_tokens(self) -> int:
        """Positions that hold something, counted from 0."""
        return self._tokens

    @property
    def capacity(self) -> int:
        """Tokens there is room for without growing."""
        return self._keys.shape[1]

    def clear(self) -> None:
        """Hold nothing; the memory stays."""
        self._tokens = 0

    def reserve(self, num_tokens: int) -> None:
        """Make positions [0, num_tokens) writable and count them as present."""
        if num_tokens > self._keys.shape[1]:
            capacity = max(num_tokens, 2 * self._keys.shape[1])
            self._keys = _grown(self._keys, capacity, self._tokens)
            self._values = _grown(self._values, capacity, self._tokens)
        self._tokens = max(self._tokens, num_tokens)

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """All layers, keys and values [L, capacity, Hk, D], until it grows."""
        return self._keys, self._values

    def keys(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D], rotated. A view: writing to it writes the cache."""
        return self._keys[layer, : self._tokens]

    def values(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D]. A view, as `keys`."""
        return self._values[layer, : self._tokens]


def room_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; on a CPU in huge pages where there are any.

    A long prompt touches 100 MB here for the first time: huge pages take far fewer faults.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _grown(old: Tensor, capacity: int, used: int) -> Tensor:
    new = old.new_empty(old.shape[0], capacity, *old.shape[2:])
    new[:, :used] = old[:, :used]
    return new
