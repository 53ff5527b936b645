"""Attention of some rows of one prompt, all behind its chunks: a question over chunks that lie
ready.

All rows look at the same chunks and each at its own pages up to itself, so that nothing needs a
table of who holds what (`segment_tables.py`): the keys of all chunks, one behind the other, are cut
into even parts. A program takes a tile of rows through one part, turns the queries anew where a
chunk begins, and leaves one answer; those of a row are merged.

Two launches answer for a layer, over tables of a fixed place that a CUDA graph can replay.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
from numpy.typing import ArrayLike
from torch import Tensor

from kvweave.kernels.gpu.attention import Launch, cores
from kvweave.kernels.gpu.prompt_kernels import attend_prompt
from kvweave.kernels.gpu.segment_kernels import merge_cells
from kvweave.kernels.gpu.segment_plan import cut_chunks
from kvweave.kernels.gpu.segment_tables import SegmentShape
from kvweave.kernels.gpu.segments import PART_S, row_strides
from kvweave.kernels.gpu.tiles import LOG2_E, precision, tile_width
from kvweave.kernels.rope import Angles, Turn
from kvweave.kernels.types import CodedPages, SharedChunk

MOST_CHUNKS = 1024  # of a prompt
ALIGNED = 4  # numbers: tables begin at multiples of 16 bytes


def prompt_launch(dtype: torch.dtype, head_dim: int, group: int) -> Launch:
    """The tile of rows that goes through a part of the chunks."""
    wide, least = tile_width(head_dim), triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Launch(max(32, least), 32, 4, 1, 1)
    if wide <= 128:
        return Launch(max(64, least), 64, 4, 2, 2)
    return Launch(max(64, least), 32, 4, 2, 1)


class PromptTables:
    """What the rows of one prompt look at. Owned by the thread that launches.

    `num_columns` more numbers of each row travel along and stand in `rows` [num_columns, num_rows]
    afterwards.
    """

    def __init__(
        self,
        num_rows: int,
        most_pages: int,
        shape: SegmentShape,
        device: torch.device,
        num_columns: int = 0,
        launch: Launch | None = None,
    ) -> None:
        """`most_pages` of its own and of its chunks together."""
        self.num_rows, self.shape = num_rows, shape
        group = shape.num_heads // shape.num_kv_heads
        self.launch = launch or prompt_launch(shape.dtype, shape.head_dim, group)
        self.num_tiles = -(-num_rows // (self.launch.block_m // group))
        at_once = self.launch.per_core * cores(device)
        self.num_parts = max(1, at_once // (self.num_tiles * shape.num_kv_heads))
        self._most_pages = most_pages
        shapes: dict[str, tuple[int, ...]] = {
            "rows": (num_columns, num_rows), "own_keys": (num_rows,),
            "parts": (self.num_parts, 2),  # first run and end
            "starts": (MOST_CHUNKS,),  # of chunks in the prompt
            "runs": (MOST_CHUNKS + self.num_parts, 4),  # first slot, keys, chunk
            "pages": (max(1, most_pages),),  # own ones, then those of chunks
        }  # fmt: skip
        sizes = [-(-math.prod(each) // ALIGNED) * ALIGNED for each in shapes.values()]
        self._starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.on_device = {
            name: self._all[start : start + math.prod(shapes[name])].view(shapes[name])
            for name, start in self._starts.items()
        }
        # cells of a row: one for each part, one for its own pages
        cells = torch.arange(num_rows, dtype=torch.int32) * (self.num_parts + 1)
        both = torch.stack([cells, torch.full_like(cells, self.num_parts + 1)], 1)
        self.cells = both.to(device)
        self.no_cells = torch.zeros_like(self.cells)

    @property
    def rows(self) -> Tensor:
        return self.on_device["rows"]

    def update(
        self,
        chunks: Sequence[SharedChunk],
        own_keys: Sequence[int],
        own_pages: ArrayLike,
        rows: ArrayLike | None = None,
    ) -> bool:
        """Row i looks at the first own_keys[i] keys of the prompt's own pages, and at `chunks`, of
        which nothing is replaced. Fewer rows than room: the rest are absent. False: there is no
        room, and nothing has changed. Does not wait for the device."""
        own = np.asarray(own_pages, dtype=np.int32)
        of_chunks = [page for chunk in chunks for page in chunk.pages]
        num_pages = len(own) + len(of_chunks)
        if len(chunks) > MOST_CHUNKS or num_pages > self._most_pages:
            return False
        sent = torch.zeros(
            self._starts["pages"] + num_pages, dtype=torch.int32, pin_memory=self._all.is_cuda
        )  # fresh memory each time: the last step's copy may still be reading its own
        tables = {
            name: sent.numpy()[start : start + self.on_device[name].numel()]
            for name, start in self._starts.items()
        }
        if rows is not None:
            tables["rows"][:] = np.asarray(rows).reshape(-1)
        tables["own_keys"][: len(own_keys)] = own_keys
        tables["starts"][: len(chunks)] = [chunk.start for chunk in chunks]
        parts, runs = cut_chunks(
            chunks, len(own), self.shape.chunk_page, self.launch.block_n, self.num_parts
        )
        tables["parts"][:] = parts.reshape(-1)
        tables["runs"][: runs.size] = runs.reshape(-1)
        tables["pages"][: len(own)] = own
        tables["pages"][len(own) :] = of_chunks
        self._all[: len(sent)].copy_(sent, non_blocking=self._all.is_cuda)
        return True


def turned_back(tables: PromptTables, turn: Turn) -> Angles:
    """How queries are turned for each chunk, [chunks, 1, r/2] float32. Launched once per step, in
    front of the first layer."""
    cos, sin = turn(-tables.on_device["starts"])
    return Angles(cos.float().contiguous(), sin.float().contiguous())


def attend_prompt_rows(
    q: Tensor,
    tables: PromptTables,
    at: Angles,
    back: Angles,
    key_pages: Tensor,
    value_pages: Tensor,
    coded: CodedPages | None = None,
) -> Tensor:
    """Attention output [B, Hq, D] of queries q [B, Hq, D] over pages [P, page, Hk, D].

    Queries are turned to their rows' positions by `at`. All channels of a head turn. Chunks lie in
    `coded` pages, if the tables were made for such.
    """
    num, heads, head_dim = q.shape
    shape, on, how = tables.shape, tables.on_device, tables.launch
    assert num == tables.num_rows, f"{num} rows for {tables.num_rows}"
    assert q.stride(-1) == 1, "the channels of a head lie side by side"
    assert shape.coded == (coded is not None), "tables are for chunks that lie otherwise"
    assert 2 * back.cos.shape[-1] == head_dim, "all channels turn"
    kv_heads, cells = shape.num_kv_heads, num * (tables.num_parts + 1) * heads
    part = torch.empty(cells * head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(cells, dtype=torch.float32, device=q.device)
    codes = (q, q, q) if coded is None else (
        coded.keys, coded.values, coded.scales.view(torch.int32)
    )  # fmt: skip
    lift = None if coded is None else coded.lift
    attend_prompt[((tables.num_parts + 1) * tables.num_tiles * kv_heads,)](
        q, key_pages, value_pages, *codes, part, lse, at.cos.contiguous(), at.sin.contiguous(),
        *back, back.cos if lift is None else lift, on["own_keys"], on["parts"], on["runs"],
        on["pages"], num, tables.num_tiles, tables.num_parts, head_dim**-0.5 * LOG2_E,
        *q.stride()[:2], *row_strides(key_pages), *row_strides(value_pages),
        G=heads // kv_heads, HK=kv_heads, D=head_dim, HALF=head_dim // 2,
        BLOCK_D=tile_width(head_dim), BLOCK_H=max(16, tile_width(head_dim) // 2),
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, STAGES=how.stages, PAGE=shape.page,
        CHUNK_PAGE=shape.chunk_page,
        CODED=coded is not None, LIFTED=lift is not None, PRECISION=precision(q),
        num_warps=how.warps,
    )  # fmt: skip
    out = torch.empty(num, heads, head_dim, dtype=q.dtype, device=q.device)
    merge_cells[(num, heads)](
        out, part, lse, tables.cells, tables.no_cells, 0, *out.stride()[:2],
        HQ=heads, D=head_dim, BLOCK_D=tile_width(head_dim), PART_S=PART_S, num_warps=2,
    )  # fmt: skip
    return out
