"""Decode attention over pages with tables of a fixed size: what a CUDA graph can replay.

Tables live in device memory that never moves. `update` writes them, once per step; `attend` only
launches kernels whose grids depend on the batch size alone, so a step that was captured once
answers for any lengths and pages.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.kernels.gpu.attention import LOG2_E, choose, cores, merge, padded
from kvweave.kernels.gpu.row_plan import even_pieces, to_device
from kvweave.kernels.gpu.rows import attend_rows


class DecodeTables:
    """Which keys each of `num_sequences` rows looks at. Owned by the thread that launches.

    A step has one row per sequence; rows of absent sequences come out as zero.
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
    ) -> None:
        self.kv_heads = num_kv_heads
        self.launch = choose(dtype, head_dim, num_heads // num_kv_heads, 1)
        pieces = num_sequences + -(-self.launch.per_core * cores(device) // num_kv_heads)
        self.limits = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self.items = torch.zeros(pieces, 8, dtype=torch.int32, device=device)
        self.merges = torch.zeros(num_sequences, 4, dtype=torch.int32, device=device)
        self.pages = torch.zeros(num_sequences, max_pages, dtype=torch.int32, device=device)

    def update(self, num_keys: Sequence[int], page_tables: Sequence[Sequence[int]]) -> None:
        """Sequence i looks at its first num_keys[i] keys. Fewer sequences than room: the rest are
        absent. Does not wait for the device."""
        limits = np.zeros(len(self.limits), dtype=np.int32)
        limits[: len(num_keys)] = num_keys
        pages = np.zeros(tuple(self.pages.shape), dtype=np.int32)
        for i, table in enumerate(page_tables):
            pages[i, : len(table)] = table
        items, merges = even_pieces(limits, self.launch.block_n, len(self.items))
        device = self.limits.device
        for mine, fresh in (
            (self.limits, limits),
            (self.items, items),
            (self.merges, merges),
            (self.pages, pages),
        ):
            mine.copy_(to_device(fresh, device), non_blocking=True)


def attend_decode(
    q: Tensor,
    tables: DecodeTables,
    key_pages: Tensor,
    value_pages: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention output [B, Hq, D] of one row per sequence over pages [P, page, Hk, D]."""
    num, heads, head_dim = q.shape
    assert num == len(tables.limits), f"{num} rows for {len(tables.limits)} sequences"
    how, kv_heads = tables.launch, tables.kv_heads
    group, slots = heads // kv_heads, len(tables.items)
    out = torch.empty(num, heads, head_dim, dtype=q.dtype, device=q.device)
    cells = slots * kv_heads * how.block_m
    part = torch.empty(cells * head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(cells, dtype=torch.float32, device=q.device)
    attend_rows[(slots * kv_heads,)](
        q, key_pages, value_pages, out, part, lse, tables.limits, tables.items, tables.items,
        tables.pages, tables.pages.stride(0),
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        *q.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], *out.stride()[:2],
        G=group, HK=kv_heads, D=head_dim, BLOCK_D=padded(head_dim),
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, PAGE=key_pages.shape[1], APART=0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    merge(out, (part, lse), tables.merges, kv_heads, group, how.block_m)
    return out
