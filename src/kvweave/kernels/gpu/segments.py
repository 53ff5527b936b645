"""Attention over own pages and shared chunks: each chunk is read once for all rows that hold it.

Three launches answer for a layer, over tables of a fixed place that a CUDA graph can replay
(`segment_plan.py` says what is in them):

    turn    every row's query, turned to what the row looks at: own pages, or one of its chunks
    attend  by row: what one row alone looks at, in even pieces; and
            by chunk: what several rows look at, a tile of their queries over the pages of one chunk
    merge   the answers of each row, by their shares of the softmax

One launch attends both ways: reading is bound by memory, tiles by products, and the two overlap. A
step begins with one more (`begin_step`), which writes down where each key of each block lies.

Chunks may lie in 8 bits (`kernels/coded.py`): by chunk, and in pieces of their own by row, codes
are multiplied as they are, and their scales go into scores and weights.

A sequence may see a chunk shifted (`kernels/shift.py`). By chunk that is added at the end: to the
share of an answer, and to the answer. By row, the shift is the last row of each block: its score is
added to those of the others, and its value has the weight of them all. Beside codes it is no row of
the same kind: there, and by chunk, its score is what `turn` has left.

The kernels are in `segment_queries.py` and `segment_kernels.py`; `segment_tables.py` writes the
tables.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvweave.kernels.gpu.attention import cores
from kvweave.kernels.gpu.row_plan import stream_of
from kvweave.kernels.gpu.segment_kernels import attend_cells, attend_code_cells, merge_cells
from kvweave.kernels.gpu.segment_plan import WINDOW, Room
from kvweave.kernels.gpu.segment_queries import place_keys, turn_queries
from kvweave.kernels.gpu.segment_tables import SegmentShape, SegmentTables, row_keys
from kvweave.kernels.gpu.tiles import LOG2_E, precision, tile_width
from kvweave.kernels.rope import Angles, Turn
from kvweave.kernels.types import CodedPages, SegmentedRows, SharedChunk

PART_S = 16  # cells that are merged at a time
TURN_HEADS = 32  # that one program turns
CODE_STAGES = 6  # of reading codes by row: half the bytes of a block, so twice as many under way


class SegmentStep(NamedTuple):
    """What all layers of a step share."""

    back: Angles  # [pairs, 1, r/2] float32: how the query of each pair is turned
    slots: Tensor  # [blocks, keys] int32: where keys lie


def begin_step(tables: SegmentTables, turn: Turn) -> SegmentStep:
    """Launched once per step, after `update`, in front of the first layer."""
    on, device = tables.on_device, tables.rows.device
    cos, sin = turn(-on["pairs"][:, 1])
    size = tables.by_row.block_n
    slots = torch.empty(max(1, tables.room.blocks), size, dtype=torch.int32, device=device)
    place_keys[(min(len(slots), 4 * cores(device)),)](
        slots, on["step"], on["blocks"], on["pages"], on["words"], on["shifts"],
        tables.num_rows,
        BLOCK_N=size, WINDOW=WINDOW, PAGE=tables.shape.page, CHUNK_PAGE=tables.shape.chunk_page,
        SHIFTED=tables.shape.shifted,
    )  # fmt: skip
    return SegmentStep(Angles(cos.float().contiguous(), sin.float().contiguous()), slots)


def attend_tables(
    q: Tensor,
    tables: SegmentTables,
    step: SegmentStep,
    key_pages: Tensor,
    value_pages: Tensor,
    at: Angles | None = None,
    coded: CodedPages | None = None,
) -> Tensor:
    """Attention output [B, Hq, D] of the rows of `tables` over pages [P, page, Hk, D].

    q is turned to the rows' positions, or it will be by `at`. Chunks lie in `coded` pages, if the
    tables were made for such.
    """
    num, heads, head_dim = q.shape
    shape, on, device = tables.shape, tables.on_device, q.device
    assert num == tables.num_rows, f"{num} rows for {tables.num_rows}"
    assert q.stride(-1) == 1, "the channels of a head lie side by side"
    assert shape.coded == (coded is not None), "tables are for chunks that lie otherwise"
    kv_heads = shape.num_kv_heads
    lift = None if coded is None else coded.lift
    turned, more = _turn_queries(q, tables, step.back, at, key_pages, lift)
    cells = (tables.num_pieces + tables.room.most_cells(tables.tiling)) * heads
    part = torch.empty(cells * head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(cells, dtype=torch.float32, device=device)
    row, tile = tables.by_row, tables.by_chunk
    where = (
        more, on["shifts"], part, lse, on["pieces"], on["blocks"], step.slots, on["tiles"],
        on["counts"], on["pairs"], on["pages"], on["words"], tables.num_pieces,
        tables.at_once, head_dim**-0.5 * LOG2_E,
        *row_strides(key_pages), *row_strides(value_pages),
    )  # fmt: skip
    sizes = {
        "G": heads // kv_heads, "HK": kv_heads, "D": head_dim, "BLOCK_D": tile_width(head_dim),
        "ROW_M": row.block_m, "ROW_N": row.block_n, "ROW_STAGES": row.stages,
        "TILE_M": tile.block_m, "TILE_N": tile.block_n, "TILE_STAGES": tile.stages,
        "PAGE": shape.chunk_page, "SHIFTED": shape.shifted,
        "PRECISION": precision(q), "num_warps": tile.warps,
    }  # fmt: skip
    grid = (tables.at_once + tables.num_pieces * kv_heads,)
    if coded is None:
        attend_cells[grid](turned, key_pages, value_pages, *where, **sizes)
    else:
        attend_code_cells[grid](
            turned, key_pages, value_pages, coded.keys, coded.values,
            coded.scales.view(torch.int32), *where,
            BLOCK_C=max(16, tile_width(head_dim) // 2), CODE_STAGES=CODE_STAGES, **sizes,
        )  # fmt: skip
    out = torch.empty(num, heads, head_dim, dtype=q.dtype, device=device)
    merge_cells[(num, heads)](
        out, part, lse, on["row_pieces"], on["row_cells"], tables.num_pieces, *out.stride()[:2],
        HQ=heads, D=head_dim, BLOCK_D=tile_width(head_dim), PART_S=PART_S, num_warps=2,
    )  # fmt: skip
    return out


def _turn_queries(
    q: Tensor,
    tables: SegmentTables,
    back: Angles,
    at: Angles | None,
    key_pages: Tensor,
    lift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The queries of all pairs [pairs, Hq, D], and what shifts add to their scores [pairs, Hq]."""
    (_, heads, head_dim), half = q.shape, back.cos.shape[-1]
    pairs = tables.room.pairs
    turned = torch.empty(pairs, heads, head_dim, dtype=q.dtype, device=q.device)
    more = torch.empty(pairs, heads, dtype=torch.float32, device=q.device)
    block_h = min(TURN_HEADS, triton.next_power_of_2(heads))
    placed = back if at is None else Angles(at.cos.contiguous(), at.sin.contiguous())
    turn_queries[pairs, triton.cdiv(heads, block_h)](
        q, turned, more, key_pages, *placed, *back, tables.on_device["pairs"],
        tables.on_device["shifts"], back.cos if lift is None else lift,
        *q.stride()[:2], *row_strides(key_pages), tables.num_rows,
        HQ=heads, G=heads // tables.shape.num_kv_heads, D=head_dim, HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=block_h, PLACED=at is not None, LIFTED=lift is not None,
        SHIFTED=tables.shape.shifted, num_warps=4,
    )  # fmt: skip
    return turned, more


def row_strides(pages: Tensor) -> tuple[int, int]:
    """Row and head stride of pages [P, page, Hk, D] that lie behind each other."""
    page, row, head, one = pages.stride()
    assert one == 1, "the channels of a head lie side by side"
    assert page == pages.shape[1] * row, "pages lie behind each other"
    return row, head


class _TablesCache(threading.local):
    """What the next layer will need again. Each thread has its own."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.kept: tuple[Sequence[SegmentedRows], Tensor] | None = None  # keeps the key's objects
        self.made: tuple[SegmentTables, SegmentStep] | None = None


_cache = _TablesCache()


def attend_segments(
    q: Tensor,
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    key_pages: Tensor,
    value_pages: Tensor,
    turn: Turn,
    coded: CodedPages | None = None,
) -> Tensor:
    """kernels/segments.attend_segments on a GPU. Tables are kept for the next layer: `rows` and
    `ranks` are the same objects there, and have not changed."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "attention over ranks on the host cannot be recorded: a replay would see the old ones; "
            "record gpu/segments.attend_tables instead"
        )
    q = q if q.stride(-1) == 1 else q.contiguous()
    page = key_pages.shape[1]
    is_coded = coded is not None
    shape = SegmentShape(q.shape[1], key_pages.shape[2], q.shape[2], page, q.dtype, is_coded)
    key = (id(rows), id(ranks), shape, stream_of(q.device))
    if _cache.made is None or _cache.key != key:
        moved = any(chunk.shift is not None for each in rows for chunk in each.chunks)
        shape = shape._replace(shifted=moved)
        known = None if _cache.made is None else _cache.made[0]
        tables = _tables_for(positions, ranks, rows, shape, q.device, known)
        _cache.key, _cache.kept = key, (rows, ranks)
        _cache.made = tables, begin_step(tables, turn)
    tables, step = _cache.made
    return attend_tables(q, tables, step, key_pages, value_pages, None, coded)


def _tables_for(
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    shape: SegmentShape,
    device: torch.device,
    known: SegmentTables | None,
) -> SegmentTables:
    """Tables in which every row stands by itself, those of one sequence share its chunks. `known`
    are the last step's."""
    at, own_keys = positions.tolist(), [rank + 1 for rank in ranks.tolist()]
    chunks: list[Sequence[SharedChunk]] = []
    pages: list[Sequence[int]] = []
    for sequence in rows:
        assert sequence.start == len(chunks), "sequences lie behind each other in the batch"
        for row in range(sequence.start, sequence.end):
            chunks.append(_visible(sequence.chunks, at[row]))
            pages.append(sequence.own.page_table[: -(-own_keys[row] // shape.page)])
    held = [chunk for each in chunks for chunk in each]
    block = row_keys(shape)
    room = Room(
        pairs=len(chunks) + len(held),
        chunk_pages=sum(len(chunk.pages) for chunk in held),
        words=sum(-(-chunk.num_tokens // 32) for chunk in held),
        blocks=sum(-(-n // block) for n in own_keys)
        + sum(-(-chunk.num_tokens // min(block, WINDOW)) for chunk in held),
        own_pages=sum(map(len, pages)),
    )
    tables = SegmentTables(len(chunks), room, shape, device)
    if known is not None:
        tables.take_arrays(known)
    assert tables.hold(chunks), "tables were made for these chunks"
    tables.update(own_keys, pages)
    return tables


def _visible(chunks: Sequence[SharedChunk], position: int) -> Sequence[SharedChunk]:
    """What a row at `position` sees of chunks; the same object, if that is all of them."""
    if all(chunk.start + chunk.num_tokens <= position + 1 for chunk in chunks):
        return chunks
    found = []
    for chunk in chunks:
        seen = min(chunk.num_tokens, position + 1 - chunk.start)
        if seen > 0:
            gone = None if chunk.replaced is None else chunk.replaced[:seen]
            found.append(chunk._replace(num_tokens=seen, replaced=gone))
    return found
