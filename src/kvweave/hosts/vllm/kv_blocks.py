"""vLLM's paged KV: written through the attention backend's own operator, read by a known layout.

Whatever the layout (CPU, FlashAttention, FlashInfer, Triton), the backend has an operator that puts
keys and values [T, Hk, D] into slots, and that is the writer. There is no such operator to read by.
So the layouts we know are tried at start on a scratch cache that the writer has filled: the one
that gives back what was written is the reader. With none, exact KV that vLLM has is not read, and
what rows need of it is taken from the store.

Shapes: B blocks of N tokens, T tokens, Hk KV heads, D head dim. A layer's cache is
[B, Hk, N, 2 D] in vLLM's canonical order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvweave.kernels.host import on_device
from kvweave.kv.format.codec import LayerKV

BlockReader = Callable[[Tensor], LayerKV]  # [n, Hk, N, 2 D] → keys and values [n N, Hk, D]


class BlockWriter(Protocol):
    """Writes keys (rotated) and values [T, Hk, D] into slots [T] of a layer's cache. On the thread
    of the forward pass; slot = block id · tokens per block + place in the block."""

    def __call__(self, cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None: ...


def read_split(blocks: Tensor) -> LayerKV:
    """Keys and values side by side in the last axis: FlashAttention, FlashInfer, Triton, whatever
    the strides (NHD or HND)."""
    rows = blocks.transpose(1, 2).flatten(0, 1)  # [n N, Hk, 2 D]
    k, v = rows.chunk(2, dim=-1)
    return LayerKV(k.contiguous(), v.contiguous())


def read_cpu(blocks: Tensor) -> LayerKV:
    """Read vLLM's CPU layout: by block and head, keys transposed [D, N], then values [N, D]."""
    n, heads, size, width = blocks.shape
    dim = width // 2
    flat = blocks.reshape(n, heads, 2, size * dim)
    keys = flat[:, :, 0].view(n, heads, dim, size).permute(0, 3, 1, 2)  # [n, N, Hk, D]
    values = flat[:, :, 1].view(n, heads, size, dim).permute(0, 2, 1, 3)
    return LayerKV(keys.flatten(0, 1), values.flatten(0, 1))


READERS: dict[str, BlockReader] = {"cpu": read_cpu, "split": read_split}


def find_reader(write: BlockWriter, cache: Tensor, head_dim: int) -> str | None:
    """The name of the layout that `write` writes, tried on two blocks like those of `cache`."""
    _, heads, size, width = cache.shape
    if width != 2 * head_dim:
        return None
    scratch = torch.empty_like(cache[:2]).zero_()
    made = torch.Generator().manual_seed(7)
    shape = (2 * size, heads, head_dim)
    k, v = (torch.randn(shape, generator=made).to(cache.device, cache.dtype) for _ in range(2))
    write(scratch, k, v, torch.arange(2 * size, device=cache.device))
    for name, read in READERS.items():
        got = read(scratch)
        if torch.equal(got.k, k) and torch.equal(got.v, v):
            return name
    return None


class KVBlocks:
    """The paged KV of all layers. On the thread of the forward pass."""

    def __init__(
        self,
        caches: Sequence[Tensor],
        writers: Sequence[BlockWriter],
        block_tokens: int,
        head_dim: int,
    ) -> None:
        """One of each per layer; `block_tokens` as the scheduler counts them. A cache may be cut
        into smaller blocks than that: slots are the same."""
        self._caches = caches
        self._writers = writers
        self.block_tokens = block_tokens
        self.reads = find_reader(writers[0], caches[0], head_dim)  # None: cannot be read

    @property
    def can_read(self) -> bool:
        return self.reads is not None

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Keys (rotated) and values [T, Hk, D] into slots [T]."""
        self._writers[layer](self._caches[layer], k, v, slots)

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> Tensor:
        """Where the tokens [start, end) of a sequence lie, given its blocks."""
        size = self.block_tokens
        positions = torch.arange(start, end)
        blocks = torch.tensor(block_ids, dtype=torch.int64)[positions // size]
        return on_device(blocks * size + positions % size, self._caches[0].device)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[LayerKV]:
        """Keys (rotated) and values of the first tokens of a sequence, layer by layer."""
        assert self.reads is not None, "this layout cannot be read"
        read, size = READERS[self.reads], self._caches[0].shape[2]
        slots = self.slots(block_ids, 0, num_tokens)
        blocks = slots[::size] // size  # a block of the cache never crosses one of the scheduler
        layers = (read(cache.index_select(0, blocks)) for cache in self._caches)
        return [LayerKV(kv.k[:num_tokens], kv.v[:num_tokens]) for kv in layers]


class BackendWriter:
    """The write operator of a vLLM attention layer."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def __call__(self, cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self._attention.impl.do_kv_cache_update(self._attention, k, v, cache, slots)
