"""Attention over segments: pages of a sequence's own, and chunks that all sequences share.

A fused prompt has rows of its own (the exact front, what was computed or recomputed, the question,
the answer) and chunks whose rows it took as they are. Own rows lie in own pages in position order,
without gaps. Chunks lie once, in read-only pages, keys turned to their places in the chunk
(`types.SharedChunk`): a query that looks at one is turned back by the chunk's start.

    position   0 .. 9 | 10 ........ 25 | 26 .. 33 | 34 ..
               own    | chunk, start 10 | chunk    | question: own
    own slot   0 .. 9 |   10, 11        |          | 12 ..      rows 13 and 20 were recomputed

Chunks may lie in 8 bits (`coded.py`), in pages that hold more of their tokens: scores over them are
multiplied by the scales of keys, weights by those of values. And a sequence may see the rows of a
chunk that it did not replace shifted, by one vector for all (`shift.py`).

A row at position t sees own slots up to its rank (how many own rows stand at or before it, minus
one) and those keys of the chunks that stand at or before t and were not replaced.

Shapes: R rows of all sequences, P pages of the pool, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.attention import kernels_fit
from kvweave.kernels.coded import codes_of, scales_between
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
    if 0 < len(q) <= KERNEL_ROWS and kernels_fit(q, (key_pages, value_pages)):
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
    own = key_pages.flatten(0, 1), value_pages.flatten(0, 1)  # [P * page, Hk, D] views
    page, parts = key_pages.shape[1], []
    chunk_page = page if coded is None else coded.keys.shape[1]
    for sequence in rows:
        at = slice(sequence.start, sequence.end)
        if at.start < at.stop:
            seen = _Seen(q[at], *own, coded)
            seen.look_at_own(sequence.own, ranks[at], page)
            for chunk in sequence.chunks:
                seen.look_at_chunk(chunk, positions[at], chunk_page, turn)
            parts.append(seen.output())
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty_like(q)


class _SeenPiece(NamedTuple):
    """What was looked at."""

    scores: Tensor  # [Hk, G * R, N]
    values: Tensor  # [Hk, N, D]
    scales: Tensor | None = None  # [Hk, 1, N] of values that are codes
    shift: Tensor | None = None  # [Hk, 1, D] of all values


class _Shifted(NamedTuple):
    """What a shift adds to all keys of a chunk."""

    scores: Tensor  # [Hk, G * R, 1]
    values: Tensor  # [Hk, D]


class _Seen:
    """What the rows of one sequence have looked at so far: scores by piece, one softmax at the end.

    Query heads that share a KV head lie behind each other as rows of it: [Hk, G * R, D].
    """

    def __init__(
        self, q: Tensor, keys: Tensor, values: Tensor, coded: CodedPages | None = None
    ) -> None:
        """Chunks lie among keys and values [slots, Hk, D], or in `coded` pages."""
        self._q, self._keys, self._values, self._coded = q, keys, values, coded
        self._kv_heads = keys.shape[1]
        self._pieces: list[_SeenPiece] = []

    def look_at_own(self, own: PagedSegment, ranks: Tensor, page: int) -> None:
        lined = self._line_up(self._q)
        first = 0
        for start, end in page_pieces(own.page_table, own.runs, page, int(ranks[-1]) + 1):
            at = torch.arange(first, first + end - start)
            hidden = at > ranks[:, None] if first + end - start > int(ranks[0]) + 1 else None
            self._look(lined, slice(start, end), hidden)
            first += end - start

    def look_at_chunk(self, chunk: SharedChunk, positions: Tensor, page: int, turn: Turn) -> None:
        seen = min(chunk.num_tokens, int(positions[-1]) - chunk.start + 1)
        if seen <= 0:
            return
        back = turn(torch.full((len(self._q),), -chunk.start, device=self._q.device))
        turned = rotate(self._q.to(back.cos.dtype), back)
        if self._coded is not None and self._coded.lift is not None:
            group = self._q.shape[1] // self._kv_heads
            turned = turned * self._coded.lift.repeat_interleave(group, 0)
        lined = self._line_up(turned.to(self._q.dtype))
        shifted = None
        if chunk.shift is not None:
            scores = torch.matmul(lined, self._keys[chunk.shift].to(lined.dtype)[:, :, None])
            shifted = _Shifted(scores, self._values[chunk.shift])
        first = 0
        for begin, end in page_pieces(chunk.pages, None, page, seen):
            at, hidden = torch.arange(first, first + end - begin), None
            if chunk.start + int(at[-1]) > int(positions[0]):
                hidden = chunk.start + at > positions[:, None]
            if chunk.replaced is not None:
                gone = chunk.replaced[first : first + end - begin]
                hidden = gone.expand(len(self._q), -1) if hidden is None else hidden | gone
            self._look(lined, slice(begin, end), hidden, self._coded, shifted)
            first += end - begin

    def output(self) -> Tensor:
        scores = torch.cat([piece.scores for piece in self._pieces], dim=-1)
        wide = scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
        weights = scores.softmax(-1, dtype=wide).to(self._q.dtype)
        out: Tensor | None = None
        first = 0
        for part, values, scales, shift in self._pieces:
            weight = weights[..., first : first + part.shape[-1]]
            seen = torch.matmul(weight if scales is None else weight * scales, values)
            if shift is not None:
                seen = seen.addcmul_(weight.sum(-1, keepdim=True), shift)
            out = seen if out is None else out.add_(seen)
            first += part.shape[-1]
        assert out is not None, "a row sees no key at all"
        num, heads, head_dim = self._q.shape
        out = out.view(self._kv_heads, heads // self._kv_heads, num, head_dim)
        return out.permute(2, 0, 1, 3).reshape(num, heads, head_dim)

    def _line_up(self, q: Tensor) -> Tensor:
        num, heads, head_dim = q.shape
        group = heads // self._kv_heads
        lined = q.view(num, self._kv_heads, group, head_dim).permute(1, 2, 0, 3)
        scale: float = head_dim**-0.5
        return lined.reshape(self._kv_heads, group * num, head_dim) * scale

    def _look(
        self,
        lined: Tensor,
        slots: slice,
        hidden: Tensor | None,
        coded: CodedPages | None = None,
        shifted: "_Shifted | None" = None,
    ) -> None:
        scales: Tensor | None = None
        if coded is None:
            keys, values = self._keys[slots], self._values[slots]
            scores = torch.matmul(lined, keys.permute(1, 2, 0))
        else:
            pairs = coded.keys.flatten(0, 1)[slots], coded.values.flatten(0, 1)[slots]
            keys, values = (codes_of(each, lined.dtype) for each in pairs)
            both = scales_between(coded, slots.start, slots.stop).to(lined.dtype)
            of_keys, scales = both.permute(2, 1, 0)[:, :, None].unbind()  # [Hk, 1, N] each
            scores = torch.matmul(lined, keys.permute(1, 2, 0)) * of_keys
        shift: Tensor | None = None
        if shifted is not None:
            scores, shift = scores + shifted.scores.to(scores.dtype), shifted.values[:, None]
        if hidden is not None:
            group = lined.shape[1] // len(self._q)
            scores.masked_fill_(hidden.to(scores.device).repeat(group, 1), float("-inf"))
        self._pieces.append(_SeenPiece(scores, values.transpose(0, 1), scales, shift))
