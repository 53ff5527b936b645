"""Launches of sparse-row attention: which kernel, which tile, where keys and values lie."""

import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvweave.kernels.dispatch import is_hopper
from kvweave.kernels.fixed_order import is_fixed
from kvweave.kernels.gpu.row_plan import (
    Bounds,
    Limits,
    PlanCache,
    RowPlan,
    Tiling,
    stream_of,
    to_device,
)
from kvweave.kernels.gpu.rows import attend_rows, merge_pieces
from kvweave.kernels.gpu.tiles import LOG2_E, precision, tile_width
from kvweave.kernels.types import PagedSegment, Segment

CAUSAL_ROWS = 1024  # from here on plain causal attention goes to the vendor's kernel
CAUSAL_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
FEW_ROWS = 4  # of a sequence: decode and the like, where bytes count and not products
GLUON = "3.6."  # Triton whose Gluon gpu/hopper.py is written in; it changes from one to the next
PART_M, PART_S = 4, 8  # rows and pieces that are merged together


class LaunchKV(NamedTuple):
    """Where the keys and values of a launch lie.

    Contiguous: one (keys, values) [N, Hk, D] per sequence. Pages: one pair [P, page, Hk, D] for
    all, and the pages of each sequence.
    """

    tensors: Sequence[tuple[Tensor, Tensor]]
    pages: Sequence[Sequence[int]] | None = None

    @property
    def page(self) -> int:
        return 0 if self.pages is None else self.tensors[0][0].shape[1]


class Launch(NamedTuple):
    """The shape of one kernel: tile, block and how many programs share a multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    per_core: int


class _LaunchCache(threading.local):
    """What the launch of the next layer will need again. Each thread has its own."""

    def __init__(self) -> None:
        self.plans = PlanCache()
        self.pages: tuple[list[list[int]], int, Tensor] | None = None
        self.last: LastRows | None = None


class LastRows(NamedTuple):
    """The last rows of one sequence that Hopper's kernel was launched for, and their plan. In the
    next layer they are the same, over keys of another."""

    positions: Tensor  # this very tensor: they are not changed
    kind: tuple[Any, ...]
    plan: RowPlan


_cache = _LaunchCache()


def attend_segments(
    q: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    scale: float | None,
    out: Tensor | None = None,
) -> Tensor:
    """kernels/attention.attend on a GPU."""
    own = [s for s in segments if s.end > s.start]
    last, kind = _cache.last, _kind(q, own)
    if last is not None and last.positions is positions and last.kind == kind:
        return _attend_hopper(q, LaunchKV([(own[0].keys, own[0].values)]), last.plan, scale, out)
    if len(own) == 1 and _is_causal(q, positions, own[0]):
        attended = _causal(q, own[0], scale)
        return attended if out is None else out.copy_(attended)
    at = positions.numpy()
    limits = np.empty(len(q), dtype=np.int32)
    for s in own:
        seen = at[s.start : s.end] + 1
        if s.key_positions is not None:  # compact keys: count those at or before each row
            seen = np.searchsorted(s.key_positions.cpu().numpy(), at[s.start : s.end], "right")
        limits[s.start : s.end] = np.minimum(seen, len(s.keys))
    kv = LaunchKV([(s.keys, s.values) for s in own])
    bounds = tuple((s.start, s.end) for s in own)
    if kind is not None:
        group = q.shape[1] // own[0].keys.shape[1]
        if _hopper_can(q, kv, group, len(q)):
            assert int(limits.min()) > 0, "a row sees no key at all"
            plan = _cache.plans.find(limits, bounds, _hopper_tiling(q, kv, group), q.device)
            _cache.last = LastRows(positions, kind, plan)
            return _attend_hopper(q, kv, plan, scale, out)
    return attend(q, limits, bounds, kv, scale, out)


def _kind(q: Tensor, own: Sequence[Segment]) -> tuple[Any, ...] | None:
    """What a plan of Hopper's kernel for all of q over one sequence depends on, besides positions,
    and whether it can run at all; None: there is more than that."""
    if len(own) != 1 or own[0].key_positions is not None or not q.is_cuda or not len(q):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    k, v, num = own[0].keys, own[0].values, own[0].end - own[0].start
    if own[0].start or num != len(q) or (k.data_ptr() | v.data_ptr()) % 16 or q.stride(-1) != 1:
        return None
    shape = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), v.stride())
    return (*shape, q.device, stream_of(q.device))


def attend_pages(
    q: Tensor,
    positions: Tensor,
    segments: Sequence[PagedSegment],
    key_pages: Tensor,
    value_pages: Tensor,
    scale: float | None,
) -> Tensor:
    """kernels/paged_attention.attend_paged on a GPU."""
    own = [s for s in segments if s.end > s.start]
    limits = (positions.numpy() + 1).astype(np.int32)
    page = key_pages.shape[1]
    for s in own:
        assert limits[s.end - 1] <= len(s.page_table) * page, "a row stands behind its pages"
    if len(own) == 1 and own[0].runs is not None and len(own[0].runs) == 1:
        first, num = own[0].runs[0]  # pages side by side are dense keys
        k, v = (x[first : first + num].flatten(0, 1) for x in (key_pages, value_pages))
        return attend(q, limits, ((own[0].start, own[0].end),), LaunchKV([(k, v)]), scale)
    kv = LaunchKV([(key_pages, value_pages)], [s.page_table for s in own])
    return attend(q, limits, tuple((s.start, s.end) for s in own), kv, scale)


def _is_causal(q: Tensor, positions: Tensor, segment: Segment) -> bool:
    """Whether every position from 0 on has its row, and the vendor's kernel is the better one.

    On Hopper ours is faster there too (bench/gpu/attention.py, 100 %).
    """
    num = segment.end - segment.start
    if num < CAUSAL_ROWS or num != len(q) or segment.key_positions is not None or is_fixed(q):
        return False
    if int(positions[0]) != 0 or int(positions[-1]) != num - 1 or num > len(segment.keys):
        return False
    group = q.shape[1] // segment.keys.shape[1]
    return not _hopper_can(q, LaunchKV([(segment.keys, segment.values)]), group, num)


def _causal(q: Tensor, segment: Segment, scale: float | None) -> Tensor:
    """Full prefill: the vendor's kernel, which knows this one case best."""
    k, v = (x[: len(q)].transpose(0, 1)[None] for x in (segment.keys, segment.values))
    with sdpa_kernel(CAUSAL_BACKENDS, set_priority=True):
        o = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    return o[0].transpose(0, 1)


def attend(
    q: Tensor,
    limits: Limits,
    bounds: Bounds,
    kv: LaunchKV,
    scale: float | None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention output [R, Hq, D]; row r sees the first limits[r] keys of its sequence.

    Written into `out` if given: contiguous, and not q.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "attention over positions on the host cannot be recorded: a replay would see the old "
            "ones; record gpu/decode.attend_decode instead"
        )
    if len({(_strides(k), _strides(v)) for k, v in kv.tensors}) > 1:  # one launch has one layout
        each = [
            attend(q[i:j], limits[i:j], ((0, j - i),), LaunchKV([pair]), scale)
            for (i, j), pair in zip(bounds, kv.tensors, strict=True)
        ]
        return torch.cat(each) if out is None else torch.cat(each, out=out)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not len(q):
        return out
    assert int(limits.min()) > 0, "a row sees no key at all"
    q = q if q.stride(-1) == 1 else q.contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_heads = kv.tensors[0][0].shape[-2]
    group = q.shape[1] // kv_heads
    longest = max(end - start for start, end in bounds)
    if _hopper_can(q, kv, group, longest):
        plan = _cache.plans.find(limits, bounds, _hopper_tiling(q, kv, group), q.device)
        return _attend_hopper(q, kv, plan, scale, out)
    how = choose(q.dtype, q.shape[-1], group, FEW_ROWS + 1 if is_fixed(q) else longest)
    # one at a time: each has time for all of its keys, and no tile is cut
    at_once = 1 if is_fixed(q) else how.per_core * cores(q.device)
    evenness = 1 if longest <= FEW_ROWS else 2
    tiling = Tiling(how.block_m // group, how.block_n, kv_heads, at_once, evenness)
    plan = _cache.plans.find(limits, bounds, tiling, q.device)
    parts = _parts(plan, kv_heads, how.block_m, q)
    pages = _page_table(kv, q.device)
    keys, values = kv.tensors[0]
    apart, unit = _apart(kv)
    attend_rows[(len(plan.items) * kv_heads,)](
        q, keys, values, out, *parts, plan.limits, plan.items,
        plan.items if apart is None else to_device(apart, q.device),
        plan.items if pages is None else pages, 0 if pages is None else pages.stride(0),
        scale * LOG2_E, *q.stride()[:2], *_strides(keys), *_strides(values), *out.stride()[:2],
        G=group, HK=kv_heads, D=q.shape[-1], BLOCK_D=tile_width(q.shape[-1]),
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, PAGE=kv.page, APART=unit,
        PRECISION=precision(q),
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    merge(out, parts, plan.merges, kv_heads, group, how.block_m)
    return out


def _hopper_tiling(q: Tensor, kv: LaunchKV, group: int) -> Tiling:
    from kvweave.kernels.gpu import hopper

    kv_heads = kv.tensors[0][0].shape[-2]
    return Tiling(hopper.BLOCK_M // group, hopper.BLOCK_N, kv_heads, cores(q.device))


def _attend_hopper(
    q: Tensor, kv: LaunchKV, plan: RowPlan, scale: float | None, out: Tensor | None
) -> Tensor:
    from kvweave.kernels.gpu import hopper

    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    keys, values = kv.tensors[0]
    kv_heads, head_dim = keys.shape[-2:]
    scale = head_dim**-0.5 if scale is None else scale
    parts = _parts(plan, kv_heads, hopper.BLOCK_M, q)
    hopper.launch(q, out, parts, plan, keys, values, _page_table(kv, q.device), scale)
    merge(out, parts, plan.merges, kv_heads, q.shape[1] // kv_heads, hopper.BLOCK_M)
    return out


def choose(dtype: torch.dtype, head_dim: int, group: int, longest: int) -> Launch:
    """The tile for rows like these. A small fixed set: nothing is tuned while a user waits."""
    wide, least = tile_width(head_dim), triton.next_power_of_2(group)
    few = max(16, triton.next_power_of_2(group * min(longest, FEW_ROWS)))
    if dtype == torch.float32:
        return Launch(few if longest <= FEW_ROWS else max(32, least), 32, 4, 1, 1)
    if longest <= FEW_ROWS:
        return Launch(few, 128 if wide <= 128 else 64, 4, 2, 2)
    if wide <= 128:
        return Launch(max(128, least), 64, 8, 3, 1)
    return Launch(max(64, least), 64, 8, 2, 1)


@cache
def cores(device: torch.device) -> int:
    """Multiprocessors of a device; a handful where kernels are only interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _hopper_can(q: Tensor, kv: LaunchKV, group: int, longest: int) -> bool:
    if not _is_for_hopper(q):
        return False
    fits = q.shape[-1] in (64, 128) and group <= 64 and longest * group > 32
    one_home = kv.pages is not None or len(kv.tensors) == 1
    boxes = kv.page == 0 or (kv.page >= 8 and math.gcd(kv.page, 128) in (kv.page, 128))
    if not (fits and one_home and boxes and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0):
        return False
    return all(map(_can_fetch_boxes, kv.tensors[0]))


def _is_for_hopper(q: Tensor) -> bool:
    """Whether the device, the precision of q and Triton's Gluon are those of `hopper.py`, which
    cuts a row's keys by how many rows there are."""
    if is_fixed(q):
        return False
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and is_hopper(q.device) and is_half and triton.__version__.startswith(GLUON)


def _can_fetch_boxes(x: Tensor) -> bool:
    """Whether the bulk copy engine can read keys or values that lie like x: 16-byte strides, heads
    side by side."""
    return (
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and x.stride(-2) == x.shape[-1]
        and x.stride(-3) % 8 == 0
        and x.stride(0) % 8 == 0
    )


def _parts(plan: RowPlan, kv_heads: int, block_m: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the answers of pieces and their log-sum-exps; a placeholder if nothing is cut."""
    num = plan.num_slots * kv_heads * block_m
    part = torch.empty(max(1, num) * q.shape[-1], dtype=torch.float32, device=q.device)
    return part, torch.empty(max(1, num), dtype=torch.float32, device=q.device)


def merge(
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    merges: Tensor | None,
    kv_heads: int,
    group: int,
    block_m: int,
) -> None:
    """Launch the merging of pieces; None: no tile was cut."""
    if merges is None:
        return
    merge_pieces[(len(merges), kv_heads, block_m // PART_M)](
        out, *parts, merges, *out.stride()[:2],
        G=group, HK=kv_heads, D=out.shape[-1], BLOCK_D=tile_width(out.shape[-1]),
        BLOCK_M=block_m, PART_M=PART_M, PART_S=PART_S,
    )  # fmt: skip


def _page_table(kv: LaunchKV, device: torch.device) -> Tensor | None:
    """[sequences, most pages] int32. Kept: the next layer asks for the same one."""
    if kv.pages is None:
        return None
    tables = [list(pages) for pages in kv.pages]
    stream, known = stream_of(device), _cache.pages
    if known is not None and known[:2] == (tables, stream):
        return known[2]
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for i, pages in enumerate(tables):
        table[i, : len(pages)] = pages
    _cache.pages = (tables, stream, to_device(table, device))
    return _cache.pages[2]


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Page, row and head stride of [N, Hk, D] or [P, page, Hk, D]."""
    assert x.stride(-1) == 1, "the channels of a head lie side by side"
    return x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2)


def _apart(kv: LaunchKV) -> tuple[NDArray[np.int64] | None, int]:
    """How far the tensors lie from the first ones [sequences, 2], and in units of how many
    elements: 16, so that the kernel may read wide, wherever possible."""
    if len(kv.tensors) == 1:
        return None, 0
    size = kv.tensors[0][0].element_size()
    at = np.array([(k.data_ptr(), v.data_ptr()) for k, v in kv.tensors], dtype=np.int64)
    elements = (at - at[0]) // size
    assert not ((at - at[0]) % size).any(), "keys of a sequence lie between elements"
    unit = 1 if (elements % 16).any() else 16
    return elements // unit, unit
