"""Decode attention over pages with tables of a fixed place: what a CUDA graph can replay.

Tables live in device memory that never moves. `update` writes them, once per step and in one copy;
`attend_decode` only launches kernels whose grids depend on the batch size alone, so a step that was
recorded once answers for any lengths and pages.

    rows | limits | items | merges | pages of the first sequence | of the second | ...

Everything in front of the pages has its fixed place. The pages lie behind each other without gaps,
and a piece of work says where those of its sequence begin, so short sequences send little.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvweave.kernels.gpu.attention import choose, cores, merge
from kvweave.kernels.gpu.row_plan import even_pieces
from kvweave.kernels.gpu.rows import attend_rows
from kvweave.kernels.gpu.tiles import LOG2_E, precision, tile_width

ALIGNED = 4  # numbers: tables begin at multiples of 16 bytes, as the kernels like it


class DecodeTables:
    """Which keys each of `num_sequences` rows looks at. Owned by the thread that launches.

    A step has one row per sequence; rows of absent sequences come out as zero. `num_columns` more
    numbers of each row travel along and stand in `rows` [num_columns, num_sequences] afterwards.
    """

    def __init__(
        self,
        num_sequences: int,
        max_pages: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_columns: int = 0,
    ) -> None:
        self.num_sequences = num_sequences
        self.kv_heads = num_kv_heads
        self.launch = choose(dtype, head_dim, num_heads // num_kv_heads, 1)
        pieces = num_sequences + -(-self.launch.per_core * cores(device) // num_kv_heads)
        self._shapes = (
            (num_columns, num_sequences),
            (num_sequences,),
            (pieces, 8),
            (num_sequences, 4),
        )
        sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in self._shapes]
        self._starts = list(accumulate(sizes, initial=0))
        self._room = num_sequences * max_pages  # for pages, of all sequences together
        size = self._starts[-1] + self._room
        self._all = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows, self.limits, self.items, self.merges = (
            self._all[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self._starts, self._shapes, strict=False)
        )
        self.pages = self._all[self._starts[-1] :]

    def update(
        self,
        num_keys: Sequence[int],
        page_tables: Sequence[ArrayLike],
        rows: ArrayLike | None = None,
    ) -> None:
        """Sequence i looks at its first num_keys[i] keys. Fewer sequences than room: the rest are
        absent. `rows` are the numbers of all rows, absent ones too. Does not wait for the device.
        """
        tables = [np.asarray(table, dtype=np.int32) for table in page_tables]
        num_pages = sum(map(len, tables))
        assert num_pages <= self._room, f"{num_pages} pages in tables for {self._room}"
        size = self._starts[-1] + num_pages
        is_cuda = self._all.is_cuda
        # fresh memory each time: the last step's copy may still be reading its own
        sent = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        flat = sent.numpy()
        limits = np.zeros(self.num_sequences, dtype=np.int32)
        limits[: len(num_keys)] = num_keys
        items, merges = even_pieces(limits, self.launch.block_n, len(self.items))
        firsts = np.zeros(self.num_sequences, dtype=np.int32)
        firsts[: len(tables)] = list(accumulate(map(len, tables), initial=0))[:-1]
        items[:, 6] = firsts[items[:, 6]]  # where its pages begin, in place of whose it is
        numbers = np.zeros(self._shapes[0]) if rows is None else rows
        flat[: self._starts[-1]] = 0
        parts: tuple[ArrayLike, ...] = (numbers, limits, items, merges)
        for start, shape, part in zip(self._starts, self._shapes, parts, strict=False):
            _put(flat, start, shape, part)
        if tables:
            np.concatenate(tables, out=flat[self._starts[-1] :])
        self._all[:size].copy_(sent, non_blocking=is_cuda)


def _put(flat: NDArray[np.int32], start: int, shape: tuple[int, ...], part: ArrayLike) -> None:
    flat[start : start + math.prod(shape)].reshape(shape)[:] = part


def attend_decode(
    q: Tensor,
    tables: DecodeTables,
    key_pages: Tensor,
    value_pages: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention output [B, Hq, D] of one row per sequence over pages [P, page, Hk, D]."""
    num, heads, head_dim = q.shape
    assert num == tables.num_sequences, f"{num} rows for {tables.num_sequences} sequences"
    how, kv_heads = tables.launch, tables.kv_heads
    group, slots = heads // kv_heads, len(tables.items)
    out = torch.empty(num, heads, head_dim, dtype=q.dtype, device=q.device)
    cells = slots * kv_heads * how.block_m
    part = torch.empty(cells * head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(cells, dtype=torch.float32, device=q.device)
    attend_rows[(slots * kv_heads,)](
        q, key_pages, value_pages, out, part, lse, tables.limits, tables.items, tables.items,
        tables.pages, 1,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        *q.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], *out.stride()[:2],
        G=group, HK=kv_heads, D=head_dim, BLOCK_D=tile_width(head_dim),
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, PAGE=key_pages.shape[1], APART=0,
        PRECISION=precision(q),
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    merge(out, (part, lse), tables.merges, kv_heads, group, how.block_m)
    return out
