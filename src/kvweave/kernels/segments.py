"""Attention over segments: pages of a sequence's own, and chunks that all sequences share.

A fused prompt has rows of its own (the exact front, what was computed or recomputed, the question,
the answer) and chunks whose rows it took as they are. Own rows lie in own pages in position order,
without gaps. Chunks lie once, in read-only pages, keys turned to their places in the chunk
(`types.SharedChunk`): a query that looks at one is turned back by the chunk's start.

    position   0 .. 9 | 10 ........ 25 | 26 .. 33 | 34 ..
               own    | chunk, start 10 | chunk    | question: own
    own slot   0 .. 9 |   10, 11        |          | 12 ..      rows 13 and 20 were recomputed

Chunks may lie in 8 bits (`coded.py`), in pages that hold more of their tokens: scores over them are
multiplied by the scales of keys, weights by those of values.

A row at position t sees own slots up to its rank (how many own rows stand at or before it, minus
one) and those keys of the chunks that stand at or before t and were not replaced.

Shapes: R rows of all sequences, P pages of the pool, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.attention import kernels_fit
from kvweave.kernels.paged_attention import page_pieces
from kvweave.kernels.rope import Turn, rotate
from kvweave.kernels.types import CodedPages, PagedSegment, SegmentedRows, SharedChunk

# Rows from which on a GPU takes the definition: its kernels are for decode and for a few rows of
# prefill, each of which reads by itself what it does not share.
KERNEL_ROWS = 512


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
    """Attention output [R, Hq, D] for queries q [R, Hq, D] that are turned to `positions` [R].

    `positions` and `ranks` [R] lie in host memory and ascend within a sequence; `ranks` are the own
    slots of the rows. `key_pages` and `value_pages` are [P, page, Hk, D], one layer of the pool.
    `turn` is `Decoder.turn`: queries and keys have YaRN's factor already. Chunks lie in these pages
    too, or in `coded` ones, which are of the same memory. `rows` and `ranks` of the next layer are
    the same objects, if they say the same: tables are found again by that.
    """
    if len(q) and len(q) <= KERNEL_ROWS and kernels_fit(q, (key_pages, value_pages)):
        from kvweave.kernels.gpu import segments as on_gpu

        return on_gpu.attend_segments(
            q, positions, ranks, rows, key_pages, value_pages, turn, coded
        )
    return attend_segments_reference(q, positions, ranks, rows, key_pages, value_pages, turn, coded)


def attend_segments_reference(
    q: Tensor,
    positions: Tensor,
    ranks: Tensor,
    rows: Sequence[SegmentedRows],
    key_pages: Tensor,
    value_pages: Tensor,
    turn: Turn,
    coded: CodedPages | None = None,
) -> Tensor:
    """The definition, in plain PyTorch: what a CPU runs and a kernel is compared with."""
    own = _Memory(key_pages.flatten(0, 1), value_pages.flatten(0, 1))  # [P * page, Hk, D] views
    shared = own if coded is None else _memory_of(coded)
    page, parts = key_pages.shape[1], []
    chunk_page = page if coded is None else coded.keys.shape[1]
    for sequence in rows:
        at = slice(sequence.start, sequence.end)
        if at.start < at.stop:
            seen = _Seen(q[at], own, shared)
            seen.look_at_own(sequence.own, ranks[at], page)
            for chunk in sequence.chunks:
                seen.look_at_chunk(chunk, positions[at], chunk_page, turn)
            parts.append(seen.output())
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty_like(q)


class _Memory(NamedTuple):
    """Keys and values token by token."""

    keys: Tensor  # [slots, Hk, D]
    values: Tensor
    key_scales: Tensor | None = None  # [slots, Hk] of codes; None: they are no codes
    value_scales: Tensor | None = None
    lift: Tensor | None = None  # [Hk, D]: what queries are multiplied by


def _memory_of(coded: CodedPages) -> _Memory:
    keys, values, key_scales, value_scales = (x.flatten(0, 1) for x in coded[:4])
    return _Memory(keys, values, key_scales, value_scales, coded.lift)


class _Seen:
    """What the rows of one sequence have looked at so far: scores by piece, one softmax at the end.

    Query heads that share a KV head lie behind each other as rows of it: [Hk, G * R, D].
    """

    def __init__(self, q: Tensor, own: _Memory, shared: _Memory) -> None:
        self._q, self._own, self._shared = q, own, shared
        self._kv_heads = own.keys.shape[1]
        self._scores: list[Tensor] = []  # [Hk, G * R, N] of each piece
        self._slots: list[tuple[_Memory, slice]] = []  # of the pool

    def look_at_own(self, own: PagedSegment, ranks: Tensor, page: int) -> None:
        lined = self._lined(self._q)
        first = 0
        for start, end in page_pieces(own.page_table, own.runs, page, int(ranks[-1]) + 1):
            at = torch.arange(first, first + end - start)
            hidden = at > ranks[:, None] if first + end - start > int(ranks[0]) + 1 else None
            self._look(lined, self._own, slice(start, end), hidden)
            first += end - start

    def look_at_chunk(self, chunk: SharedChunk, positions: Tensor, page: int, turn: Turn) -> None:
        seen = min(chunk.num_tokens, int(positions[-1]) - chunk.start + 1)
        if seen <= 0:
            return
        back = turn(torch.full((len(self._q),), -chunk.start, device=self._q.device))
        turned = rotate(self._q.to(back.cos.dtype), back)
        if self._shared.lift is not None:
            group = self._q.shape[1] // self._kv_heads
            turned = turned * self._shared.lift.repeat_interleave(group, 0)
        lined = self._lined(turned.to(self._q.dtype))
        first = 0
        for begin, end in page_pieces(chunk.pages, None, page, seen):
            at, hidden = torch.arange(first, first + end - begin), None
            if chunk.start + int(at[-1]) > int(positions[0]):
                hidden = chunk.start + at > positions[:, None]
            if chunk.replaced is not None:
                gone = chunk.replaced[first : first + end - begin]
                hidden = gone.expand(len(self._q), -1) if hidden is None else hidden | gone
            self._look(lined, self._shared, slice(begin, end), hidden)
            first += end - begin

    def output(self) -> Tensor:
        scores = torch.cat(self._scores, dim=-1)
        wide = scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
        weights = scores.softmax(-1, dtype=wide).to(self._q.dtype)
        out: Tensor | None = None
        first = 0
        for (memory, slots), part in zip(self._slots, self._scores, strict=True):
            weight = weights[..., first : first + part.shape[-1]]
            values = memory.values[slots].transpose(0, 1)
            if memory.value_scales is not None:
                weight = weight * memory.value_scales[slots].t()[:, None].to(weight.dtype)
                values = values.to(weight.dtype)
            seen = torch.matmul(weight, values)
            out = seen if out is None else out.add_(seen)
            first += part.shape[-1]
        assert out is not None, "a row sees no key at all"
        num, heads, head_dim = self._q.shape
        out = out.view(self._kv_heads, heads // self._kv_heads, num, head_dim)
        return out.permute(2, 0, 1, 3).reshape(num, heads, head_dim)

    def _lined(self, q: Tensor) -> Tensor:
        num, heads, head_dim = q.shape
        group = heads // self._kv_heads
        lined = q.view(num, self._kv_heads, group, head_dim).permute(1, 2, 0, 3)
        scale: float = head_dim**-0.5
        return lined.reshape(self._kv_heads, group * num, head_dim) * scale

    def _look(self, lined: Tensor, memory: _Memory, slots: slice, hidden: Tensor | None) -> None:
        keys = memory.keys[slots].permute(1, 2, 0)
        if memory.key_scales is None:
            scores = torch.matmul(lined, keys)
        else:
            scores = torch.matmul(lined, keys.to(lined.dtype))
            scores = scores * memory.key_scales[slots].t()[:, None].to(scores.dtype)
        if hidden is not None:
            group = lined.shape[1] // len(self._q)
            scores.masked_fill_(hidden.to(scores.device).repeat(group, 1), float("-inf"))
        self._scores.append(scores)
        self._slots.append((memory, slots))
