"""Attention over own pages and shared chunks: each chunk is read once for all rows that hold it.

Four launches answer for a layer, over tables of a fixed place that a CUDA graph can replay
(`segment_plan.py` says what is in them):

    turn    every row's query, turned to what the row looks at: own pages, or one of its chunks
    by row  what one row alone looks at, in even pieces
    by chunk  what several rows look at: a tile of their queries over the pages of one chunk
    merge   the answers of each row, by their shares of the softmax

Tables are written by `SegmentTables.update`: who holds which chunk when a sequence comes or goes,
everything else at every step.
"""

import math
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kvweave.kernels.gpu.attention import Launch, choose, cores
from kvweave.kernels.gpu.row_plan import stream_of
from kvweave.kernels.gpu.segment_plan import ChunkArrays, ChunkTiling, Room, Sharing
from kvweave.kernels.gpu.tiles import LOG2_E, padded, precision
from kvweave.kernels.rope import Angles
from kvweave.kernels.segments import Turn
from kvweave.kernels.types import SegmentedRows, SharedChunk

HIDDEN = tl.constexpr(float("-inf"))
ALIGNED = 4  # numbers: tables begin at multiples of 16 bytes
PART_S = 8  # cells that are merged at a time
SLACK = 8  # mask words that a tile may read behind the last ones


class Shape(NamedTuple):
    """Heads and pages that tables are for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype


@triton.jit
def turn_queries(
    q_ptr, out_ptr, at_cos, at_sin, back_cos, back_sin, pairs_ptr, counts_ptr,
    q_row, q_head,
    HQ: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """The query of every pair [pairs, HQ, D]: turned back by its start. PLACED: first to its row's
    position, and rounded, as if that had been done before."""
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_HALF)
    inside = (h < HQ)[:, None] & (j < HALF)[None, :]
    for pair in range(tl.program_id(0), tl.load(counts_ptr), tl.num_programs(0)):
        row = tl.load(pairs_ptr + pair * 4).to(tl.int64)
        x_at = q_ptr + row * q_row + h[:, None] * q_head
        out_at = out_ptr + (tl.cast(pair, tl.int64) * HQ + h)[:, None] * D
        x1 = tl.load(x_at + j[None, :], inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + HALF + j[None, :], inside, other=0.0).to(tl.float32)
        if PLACED:
            cos = tl.load(at_cos + row * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
            sin = tl.load(at_sin + row * HALF + j, j < HALF, other=0.0).to(tl.float32)[None, :]
            y1 = (x1 * cos - x2 * sin).to(q_ptr.dtype.element_ty).to(tl.float32)
            x2 = (x2 * cos + x1 * sin).to(q_ptr.dtype.element_ty).to(tl.float32)
            x1 = y1
        cos = tl.load(back_cos + pair * HALF + j, j < HALF, other=0.0)[None, :]
        sin = tl.load(back_sin + pair * HALF + j, j < HALF, other=0.0)[None, :]
        tl.store(out_at + j[None, :], x1 * cos - x2 * sin, inside)
        tl.store(out_at + HALF + j[None, :], x2 * cos + x1 * sin, inside)
        if D > 2 * HALF:
            d = tl.arange(0, BLOCK_D)
            rest = (h < HQ)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
            tl.store(out_at + d[None, :], tl.load(x_at + d[None, :], rest, other=0.0), rest)


@triton.jit
def _weigh(s, v, acc, m, total, scale, PRECISION: tl.constexpr):
    """One block more: scores s [M, N], HIDDEN where a row does not look, and values v [N, D]."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == HIDDEN, 0.0, m_new)  # a row that has seen nothing yet
    alpha = tl.exp2(m - base)
    p = tl.exp2(s * scale - base[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total


@triton.jit
def attend_by_row(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, pieces_ptr, blocks_ptr, pages_ptr, words_ptr, scale,
    k_page, k_row, k_head, v_page, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A piece and a KV head. Replaced rows are not even read."""
    head = tl.program_id(0) % HK
    piece = pieces_ptr + tl.program_id(0) // HK * 4
    b0, b1, cell = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    inside = (at < G)[:, None] & (d < D)[None, :]
    q_at = q_ptr + ((head * G + at) * D)[:, None] + d[None, :]
    k_base = k_ptr + head * k_head + d[None, :]
    v_base = v_ptr + head * v_head + d[None, :]
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for b in range(b0, b1):
        block = blocks_ptr + b * 4
        slot, num = tl.load(block), tl.load(block + 1)
        pair, mask = tl.load(block + 2), tl.load(block + 3)
        there = j < num
        bits_at = tl.where(there, mask, -1)
        word = tl.load(words_ptr + bits_at + j // 32, bits_at >= 0, other=0)
        there = there & (((word >> (j % 32)) & 1) == 0)
        page = tl.load(pages_ptr + (slot + j) // PAGE, there, other=0).to(tl.int64)
        k_at = page * k_page + ((slot + j) % PAGE) * k_row
        v_at = page * v_page + ((slot + j) % PAGE) * v_row
        live = there[:, None] & (d < D)[None, :]
        k = tl.load(k_base + k_at[:, None], live, other=0.0)
        v = tl.load(v_base + v_at[:, None], live, other=0.0)
        q = tl.load(q_at + pair.to(tl.int64) * (HK * G * D), inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(there[None, :], s, HIDDEN)
        acc, m, total = _weigh(s, v, acc, m, total, scale, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    part = (cell.to(tl.int64) * HK + head) * G + at
    tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
    tl.store(lse_ptr + part, m + tl.log2(total), at < G)


@triton.jit
def attend_by_chunk(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, tiles_ptr, counts_ptr, pairs_ptr, pages_ptr, words_ptr,
    first_cell, scale, k_page, k_row, k_head, v_page, v_row, v_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles and KV heads in turn, as many as there are: the grid does not depend on them."""
    at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    for unit in range(tl.program_id(0), tl.load(counts_ptr + 1) * HK, tl.num_programs(0)):
        head = unit % HK
        tile = tiles_ptr + unit // HK * 8
        slot0, num = tl.load(tile), tl.load(tile + 1)
        word0, pair0 = tl.load(tile + 2), tl.load(tile + 3)
        members, cut, masked = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
        here = at // G < members
        inside = here[:, None] & (d < D)[None, :]
        pair = pair0 + at // G
        q_at = (pair.to(tl.int64) * (HK * G) + head * G + at % G) * D
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], inside, other=0.0)
        mask = tl.load(pairs_ptr + pair * 4 + 2, here, other=-1)
        m = tl.full([BLOCK_M], HIDDEN, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for key0 in range(0, num, BLOCK_N):
            there = key0 + j < num
            slot = slot0 + key0 + j
            page = tl.load(pages_ptr + slot // PAGE, there, other=0).to(tl.int64)
            k_at = page * k_page + (slot % PAGE) * k_row
            v_at = page * v_page + (slot % PAGE) * v_row
            live = there[:, None] & (d < D)[None, :]
            k = tl.load(k_ptr + head * k_head + k_at[:, None] + d[None, :], live, other=0.0)
            v = tl.load(v_ptr + head * v_head + v_at[:, None] + d[None, :], live, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            s = tl.where(there[None, :], s, HIDDEN)
            if masked > 0:
                gone = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
                for w in tl.static_range(BLOCK_N // 32):
                    bits_at = words_ptr + mask + word0 + key0 // 32 + w
                    bits = tl.load(bits_at, mask >= 0, other=0)
                    gone = tl.where((j // 32 == w)[None, :], bits[:, None], gone)
                s = tl.where(((gone >> (j % 32)[None, :]) & 1) == 0, s, HIDDEN)
            acc, m, total = _weigh(s, v, acc, m, total, scale, PRECISION)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        cell = first_cell + cut + tl.load(pairs_ptr + pair * 4 + 3, here, other=0)
        part = (cell.to(tl.int64) * HK + head) * G + at % G
        tl.store(part_ptr + part[:, None] * D + d[None, :], acc, inside)
        tl.store(lse_ptr + part, m + tl.log2(total), here)


@triton.jit
def merge_cells(
    out_ptr, part_ptr, lse_ptr, by_row_ptr, by_chunk_ptr, first_cell, out_row, out_head,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, PART_S: tl.constexpr,
):  # fmt: skip
    """One row and KV head: its cells by row and by chunk. A row that saw no key becomes zero."""
    row, head = tl.program_id(0), tl.program_id(1)
    own0, num_own = tl.load(by_row_ptr + row * 2), tl.load(by_row_ptr + row * 2 + 1)
    held0, num_held = tl.load(by_chunk_ptr + row * 2), tl.load(by_chunk_ptr + row * 2 + 1)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    nth = tl.arange(0, PART_S)
    m = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_own + num_held, PART_S):
        i = start + nth
        cell = tl.where(i < num_own, own0 + i, first_cell + held0 + i - num_own).to(tl.int64)
        live = (i < num_own + num_held)[:, None] & (g < G)[None, :]  # [S, G]
        part = (cell[:, None] * HK + head) * G + g[None, :]
        lse = tl.load(lse_ptr + part, live, other=HIDDEN)
        o_at = part_ptr + part[:, :, None] * D + d[None, None, :]
        o = tl.load(o_at, live[:, :, None] & (d < D)[None, None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        alpha, share = tl.exp2(m - m_new), tl.exp2(lse - m_new[None, :])
        acc = acc * alpha[:, None] + tl.sum(o * share[:, :, None], 0)
        total = total * alpha + tl.sum(share, 0)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + row.to(tl.int64) * out_row + ((head * G + g) * out_head)[:, None]
    inside = (g < G)[:, None] & (d < D)[None, :]
    tl.store(out_at + d[None, :], acc.to(out_ptr.dtype.element_ty), inside)


def by_chunk_launch(dtype: torch.dtype, head_dim: int, group: int) -> Launch:
    """The tile that reads a chunk for several rows."""
    wide, least = padded(head_dim), triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Launch(max(32, least), 32, 4, 1, 1)
    if wide <= 128:
        return Launch(max(64, least), 64, 4, 3, 2)
    return Launch(max(64, least), 32, 4, 2, 1)


class SegmentTables:
    """What each of `num_rows` rows looks at. Owned by the thread that launches.

    Rows of absent sequences come out as zero. `num_columns` more numbers of each row travel along
    and stand in `rows` [num_columns, num_rows] afterwards.
    """

    def __init__(
        self,
        num_rows: int,
        room: Room,
        shape: Shape,
        device: torch.device,
        num_columns: int = 0,
    ) -> None:
        self.num_rows, self.room, self.shape = num_rows, room, shape
        group = shape.num_heads // shape.num_kv_heads
        self.by_row = choose(shape.dtype, shape.head_dim, group, 1)
        self.by_chunk = by_chunk_launch(shape.dtype, shape.head_dim, group)
        self.at_once = self.by_chunk.per_core * cores(device)
        self.num_pieces = num_rows + -(-self.by_row.per_core * cores(device) // shape.num_kv_heads)
        self.tiling = ChunkTiling(
            shape.page, self.by_row.block_n, self.by_chunk.block_n,
            self.by_chunk.block_m // group, shape.num_kv_heads, self.at_once,
        )  # fmt: skip
        # held, written by `hold`:    counts | pairs | tiles | row_cells | words | chunk pages
        # moving, written by `update`: rows | pieces | row_pieces | blocks, then own pages at once
        held = {
            "counts": (4,), "pairs": (room.pairs, 4),
            "tiles": (room.most_cuts(self.tiling), 8),
            "row_cells": (num_rows, 2), "words": (room.words + SLACK,),
            "pages": (room.chunk_pages,),
        }  # fmt: skip
        moving = {
            "rows": (num_columns, num_rows), "pieces": (self.num_pieces, 4),
            "row_pieces": (num_rows, 2), "blocks": (room.blocks, 4), "own": (room.own_pages,),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = held | moving
        sizes = [_aligned(math.prod(each)) for each in shapes.values()]
        self._starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.on_device = {
            name: self._all[start : start + math.prod(shapes[name])].view(shapes[name])
            for name, start in self._starts.items()
        }
        self._arrays: dict[int, ChunkArrays] = {}
        self._held: tuple[int, ...] = ()
        self._sharing: Sharing | None = None

    @property
    def rows(self) -> Tensor:
        return self.on_device["rows"]

    def hold(self, chunks: Sequence[Sequence[SharedChunk]]) -> bool:
        """Row r looks at chunks[r], whole; an object that was given before is not looked into
        again. False: there is no room, and nothing has changed. Does not wait for the device."""
        held = tuple(id(each) for each in chunks)
        if held == self._held and self._sharing is not None:
            return True
        arrays = {
            id(each): self._arrays.get(id(each)) or ChunkArrays(each) for each in chunks if each
        }
        of_rows = [arrays.get(number) for number in held]
        of_rows += [None] * (self.num_rows - len(of_rows))
        sharing = Sharing(of_rows, self.tiling)
        if not sharing.fits(self.room):
            return False
        self._arrays, self._held, self._sharing = arrays, held, sharing
        pairs = np.concatenate([sharing.pairs, sharing.pair_cells[:, None]], 1)
        counts = np.array([len(sharing.pairs), len(sharing.tiles), 0, 0])
        self._send("counts", [counts])
        self._send("pairs", [pairs])
        self._send("tiles", [sharing.tiles])
        self._send("row_cells", [sharing.row_cells])
        self._send("words", [sharing.words])
        self._send("pages", [sharing.pages])
        return True

    def update(
        self,
        own_keys: Sequence[int],
        own_pages: Sequence[ArrayLike],
        rows: ArrayLike | None = None,
    ) -> None:
        """Row i looks at the first own_keys[i] keys of its own pages, and at what it holds. Fewer
        rows than room: the rest are absent. `rows` are the numbers of all rows, absent ones too.
        Does not wait for the device."""
        assert self._sharing is not None, "hold comes before update"
        tables = [np.asarray(table, dtype=np.int32) for table in own_pages]
        num_pages = sum(map(len, tables))
        assert num_pages <= self.room.own_pages, f"{num_pages} pages for {self.room.own_pages}"
        keys = np.zeros(self.num_rows, dtype=np.int64)
        keys[: len(own_keys)] = own_keys
        num_blocks = self._sharing.count_blocks(keys)
        assert num_blocks <= self.room.blocks, f"{num_blocks} blocks for {self.room.blocks}"
        # own pages come right behind the blocks; slots are counted from the first chunk page on
        page0 = self._starts["blocks"] + 4 * num_blocks - self._starts["pages"]
        firsts = np.zeros(self.num_rows, dtype=np.int64)
        firsts[: len(tables)] = list(accumulate(map(len, tables), initial=page0))[:-1]
        slots = firsts * self.shape.page
        blocks, pieces, row_pieces = self._sharing.by_row(keys, slots, self.num_pieces)
        shape = self.rows.shape
        numbers = np.zeros(shape) if rows is None else np.asarray(rows).reshape(shape)
        self._send("rows", [numbers, pieces, row_pieces, blocks, *tables])

    def _send(self, first: str, parts: Sequence[NDArray[np.generic]]) -> None:
        """Write tables that lie behind each other, from the one called `first` on, in one copy."""
        is_cuda, names = self._all.is_cuda, list(self._starts)
        start, at = self._starts[first], 0
        fixed = names[names.index(first) : names.index(first) + 4]  # these have their places
        size = sum(part.size for part in parts) + ALIGNED * len(parts)
        # fresh memory each time: the last step's copy may still be reading its own
        sent = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        flat = sent.numpy()
        for nth, part in enumerate(parts):
            if nth < len(fixed):
                at = self._starts[fixed[nth]] - start
            flat[at : at + part.size] = part.reshape(-1)
            at += part.size
        self._all[start : start + at].copy_(sent[:at], non_blocking=is_cuda)


def _aligned(num: int) -> int:
    return -(-num // ALIGNED) * ALIGNED


def attend_tables(
    q: Tensor,
    tables: SegmentTables,
    key_pages: Tensor,
    value_pages: Tensor,
    back: Angles,
    at: Angles | None = None,
) -> Tensor:
    """Attention output [B, Hq, D] of the rows of `tables` over pages [P, page, Hk, D].

    `back` turns every pair back by its start (`turns_back`). q is turned to the rows' positions, or
    it will be by `at`.
    """
    num, heads, head_dim = q.shape
    shape, on = tables.shape, tables.on_device
    assert num == tables.num_rows, f"{num} rows for {tables.num_rows}"
    assert q.stride(-1) == key_pages.stride(-1) == value_pages.stride(-1) == 1
    kv_heads, half = shape.num_kv_heads, back.cos.shape[-1]
    group, device = heads // kv_heads, q.device
    turned = torch.empty(tables.room.pairs, heads, head_dim, dtype=q.dtype, device=device)
    block_h = min(32, triton.next_power_of_2(heads))
    placed = back if at is None else Angles(at.cos.contiguous(), at.sin.contiguous())
    grid = min(tables.room.pairs, 4 * cores(device)), triton.cdiv(heads, block_h)
    turn_queries[grid](
        q, turned, *placed, *back, on["pairs"], on["counts"], *q.stride()[:2],
        HQ=heads, D=head_dim, HALF=half, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_H=block_h, PLACED=at is not None,
        num_warps=4,
    )  # fmt: skip
    cells = (tables.num_pieces + tables.room.most_cells(tables.tiling)) * heads
    part = torch.empty(cells * head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(cells, dtype=torch.float32, device=device)
    scale = head_dim**-0.5 * LOG2_E
    strides = (*key_pages.stride()[:3], *value_pages.stride()[:3])
    constants = {
        "G": group, "HK": kv_heads, "D": head_dim, "BLOCK_D": padded(head_dim),
        "PAGE": shape.page, "PRECISION": precision(q),
    }  # fmt: skip
    how = tables.by_chunk
    attend_by_chunk[(tables.at_once,)](
        turned, key_pages, value_pages, part, lse, on["tiles"], on["counts"], on["pairs"],
        on["pages"], on["words"], tables.num_pieces, scale, *strides,
        **constants, BLOCK_M=how.block_m, BLOCK_N=how.block_n,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    how = tables.by_row
    attend_by_row[(tables.num_pieces * kv_heads,)](
        turned, key_pages, value_pages, part, lse, on["pieces"], on["blocks"],
        on["pages"], on["words"], scale, *strides,
        **constants, BLOCK_M=how.block_m, BLOCK_N=how.block_n,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    out = torch.empty(num, heads, head_dim, dtype=q.dtype, device=device)
    merge_cells[(num, kv_heads)](
        out, part, lse, on["row_pieces"], on["row_cells"], tables.num_pieces, *out.stride()[:2],
        G=group, HK=kv_heads, D=head_dim, BLOCK_D=padded(head_dim),
        BLOCK_G=triton.next_power_of_2(group), PART_S=PART_S,
    )  # fmt: skip
    return out


def turns_back(tables: SegmentTables, turn: Turn) -> Angles:
    """How the query of every pair is turned: the same for every layer of a step."""
    cos, sin = turn(-tables.on_device["pairs"][:, 1])
    return Angles(cos.float().contiguous(), sin.float().contiguous())


class _TablesCache(threading.local):
    """What the next layer will need again. Each thread has its own."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.kept: tuple[Sequence[SegmentedRows], Tensor] | None = None  # keeps the key's objects
        self.made: tuple[SegmentTables, Angles] | None = None


_cache = _TablesCache()


def attend_segments(
    q: Tensor,
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    key_pages: Tensor,
    value_pages: Tensor,
    turn: Turn,
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
    shape = Shape(q.shape[1], key_pages.shape[2], q.shape[2], page, q.dtype)
    key = (id(rows), id(ranks), shape, stream_of(q.device))
    if _cache.made is None or _cache.key != key:
        tables = _tables_for(positions, ranks, rows, shape, q.device)
        _cache.key, _cache.kept = key, (rows, ranks)
        _cache.made = tables, turns_back(tables, turn)
    tables, back = _cache.made
    return attend_tables(q, tables, key_pages, value_pages, back)


def _tables_for(
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    shape: Shape,
    device: torch.device,
) -> SegmentTables:
    """Tables in which every row stands by itself, those of one sequence share its chunks."""
    at, own_keys = positions.tolist(), [rank + 1 for rank in ranks.tolist()]
    chunks: list[Sequence[SharedChunk]] = []
    pages: list[Sequence[int]] = []
    for sequence in rows:
        assert sequence.start == len(chunks), "sequences lie behind each other in the batch"
        for row in range(sequence.start, sequence.end):
            chunks.append(_visible(sequence.chunks, at[row]))
            pages.append(sequence.own.page_table[: -(-own_keys[row] // shape.page)])
    held = [chunk for each in chunks for chunk in each]
    block = choose(shape.dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads, 1).block_n
    room = Room(
        pairs=len(chunks) + len(held),
        chunk_pages=sum(len(chunk.pages) for chunk in held),
        words=sum(-(-chunk.num_tokens // 32) for chunk in held),
        blocks=sum(-(-n // block) for n in [*own_keys, *(chunk.num_tokens for chunk in held)]),
        own_pages=sum(map(len, pages)),
    )
    tables = SegmentTables(len(chunks), room, shape, device)
    assert tables.hold(chunks), "tables were made for these chunks"
    tables.update(own_keys, pages)
    return tables


def _visible(chunks: Sequence[SharedChunk], position: int) -> Sequence[SharedChunk]:
    """What a row at `position` sees of chunks; the same object, if that is all of them."""
    if all(chunk.start + chunk.num_tokens <= position + 1 for chunk in chunks):
        return chunks
    found = []
    for pages, num_tokens, start, replaced in chunks:
        seen = min(num_tokens, position + 1 - start)
        if seen > 0:
            gone = None if replaced is None else replaced[:seen]
            found.append(SharedChunk(pages, seen, start, gone))
    return found
