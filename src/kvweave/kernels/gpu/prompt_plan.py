"""How the keys of a prompt's chunks are cut into even parts. Plain numbers, made on the host."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.kernels.types import SharedChunk

Numbers = NDArray[np.int64]


def cut_chunks(
    chunks: Sequence[SharedChunk], first_page: int, page: int, block: int, num_parts: int
) -> tuple[Numbers, Numbers]:
    """Tables [num_parts, 2] and [runs, 4].

    A part: first run and end. A run is what one part has of one chunk: first slot, keys, which
    chunk, 0. Slots count tokens of the pages of all chunks, which have `page` each and come behind
    `first_page` others. Parts are cut between blocks of `block` keys, as even as these allow.
    """
    keys = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    pages = np.array([len(chunk.pages) for chunk in chunks], dtype=np.int64)
    slot = (first_page + np.cumsum(pages) - pages) * page  # first of each chunk
    blocks = -(-keys // block)
    first = np.cumsum(blocks) - blocks
    num_blocks = int(blocks.sum())
    edges = num_blocks * np.arange(num_parts + 1) // num_parts
    # runs begin where a chunk or a part does, and end where the next one begins
    cuts = np.union1d(first, edges[edges < num_blocks])
    chunk = np.searchsorted(first + blocks, cuts, "right")
    key0 = (cuts - first[chunk]) * block
    ends = (np.append(cuts[1:], num_blocks) - first[chunk]) * block
    key1 = np.minimum(ends, keys[chunk])
    runs = np.stack([slot[chunk] + key0, key1 - key0, chunk, np.zeros_like(chunk)], 1)
    at = np.searchsorted(cuts, edges)
    return np.stack([at[:-1], at[1:]], 1), runs
