"""Layouts of paged KV: what a backend's operator writes is what the reader gives back.

FlashAttention's and FlashInfer's operators need a GPU. What they do to memory is written down here
(keys and values side by side, in NHD or HND strides) and checked by shape and content.
"""

import pytest
import torch
from torch import Tensor

from kvweave.hosts.vllm.kv_blocks import KVBlocks, find_reader

HEADS, SIZE, DIM, BLOCKS = 3, 8, 4, 7


def write_split(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """As reshape_and_cache_flash: [B, H, N, 2 D] seen as [B, N, H, D] twice."""
    keys, values = cache.transpose(1, 2).split(k.shape[-1], dim=-1)
    size = cache.shape[2]
    keys[slots // size, slots % size] = k
    values[slots // size, slots % size] = v


def write_cpu(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """As vLLM's CPU operator: keys of a block and head are transposed."""
    blocks, heads, size, width = cache.shape
    flat = cache.view(blocks, heads, 2, size * width // 2)
    keys = flat[:, :, 0].unflatten(-1, (width // 2, size))
    values = flat[:, :, 1].unflatten(-1, (size, width // 2))
    for at, slot in enumerate(slots.tolist()):
        keys[slot // size, :, :, slot % size] = k[at]
        values[slot // size, :, slot % size] = v[at]


def write_scrambled(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    write_split(cache, k.flip(-1), v, slots)


def nhd() -> Tensor:
    """[B, H, N, 2 D] whose heads of a token lie side by side."""
    return torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)


def hnd() -> Tensor:
    return torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM)


@pytest.mark.parametrize(
    ("cache", "write", "name"),
    [(nhd(), write_split, "split"), (hnd(), write_split, "split"), (hnd(), write_cpu, "cpu")],
    ids=["NHD", "HND", "CPU"],
)
def test_what_was_written_is_read_back(cache: Tensor, write, name: str) -> None:  # type: ignore[no-untyped-def]
    blocks = KVBlocks([cache, cache.clone()], [write, write], SIZE, DIM)
    assert blocks.reads == name
    made = torch.Generator().manual_seed(1)
    k, v = (torch.randn(19, HEADS, DIM, generator=made) for _ in range(2))
    table = [5, 0, 3]  # of a sequence of 19 tokens
    for layer in range(2):
        blocks.write(layer, k * (layer + 1), v, blocks.slots(table, 0, 19))
    for layer, kv in enumerate(blocks.read(table, 17)):
        torch.testing.assert_close(kv.k, k[:17] * (layer + 1), rtol=0, atol=0)
        torch.testing.assert_close(kv.v, v[:17], rtol=0, atol=0)


def test_a_part_of_a_sequence_goes_where_it_belongs_and_nowhere_else() -> None:
    cache = hnd()
    blocks = KVBlocks([cache], [write_split], SIZE, DIM)
    k = torch.ones(5, HEADS, DIM)
    blocks.write(0, k, 2 * k, blocks.slots([4, 2], 6, 11))  # places 6, 7 of block 4, 0-2 of block 2
    touched = cache.abs().sum((1, 3)).nonzero().tolist()
    assert touched == [[2, 0], [2, 1], [2, 2], [4, 6], [4, 7]]


def test_a_cache_cut_into_smaller_blocks_than_the_scheduler_counts_is_read() -> None:
    cache = torch.zeros(4 * BLOCKS, HEADS, SIZE, 2 * DIM)
    blocks = KVBlocks([cache], [write_split], 4 * SIZE, DIM)
    k = torch.randn(50, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    blocks.write(0, k, -k, blocks.slots([6, 1], 0, 50))
    (kv,) = blocks.read([6, 1], 50)
    torch.testing.assert_close(kv.k, k, rtol=0, atol=0)
    torch.testing.assert_close(kv.v, -k, rtol=0, atol=0)


def test_a_layout_that_nobody_knows_is_not_read() -> None:
    assert find_reader(write_scrambled, hnd(), DIM) is None
    assert find_reader(write_split, hnd(), DIM + 1) is None
    assert not KVBlocks([hnd()], [write_scrambled], SIZE, DIM).can_read
