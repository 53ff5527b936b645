"""Attention over sequences whose keys lie in pages of one pool.

The same question as in attention.py: a row at position p sees the keys at positions <= p. Only the
keys' place differs: page j of a sequence's table holds its positions [j * page, (j + 1) * page).

Pages side by side are one piece of memory. Compiled kernels read keys where they lie, and a row
finds the same wherever that is, to the last bit. Without them, a sequence of one piece is plain
attention over a view. Of several pieces, a few rows (decode) take scores piece by piece and one
softmax over all of them, so no key is copied; many rows (prefill) pay for one gather of the keys,
which their products dwarf.

Shapes: R rows of all sequences, P pages of the pool, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.kernels.attention import attend, compiled_for, kernels_fit
from kvweave.kernels.native.operators import attend_rows
from kvweave.kernels.types import PagedSegment, Segment

GATHER_ROWS = 8  # rows of one sequence from which on a gather of its keys is cheaper


def attend_paged(
    q: Tensor,
    positions: Tensor,
    segments: Sequence[PagedSegment],
    key_pages: Tensor,
    value_pages: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention output [R, Hq, D] for rotated queries q [R, Hq, D] at `positions` [R].

    `positions` lie in host memory and ascend within a segment. `key_pages` (rotated) and
    `value_pages` are [P, page, Hk, D], one layer of the pool.
    """
    if kernels_fit(q, (key_pages, value_pages)):
        from kvweave.kernels.gpu.attention import attend_pages

        return attend_pages(q, positions, segments, key_pages, value_pages, scale)
    return attend_paged_reference(q, positions, segments, key_pages, value_pages, scale)


def attend_paged_reference(
    q: Tensor,
    positions: Tensor,
    segments: Sequence[PagedSegment],
    key_pages: Tensor,
    value_pages: Tensor,
    scale: float | None = None,
) -> Tensor:
    """The definition, in plain PyTorch: what a CPU runs and a kernel is compared with."""
    page = key_pages.shape[1]
    keys, values = key_pages.flatten(0, 1), value_pages.flatten(0, 1)  # [P * page, Hk, D] views
    parts: list[Tensor] = []
    for segment in segments:
        if segment.end == segment.start:
            continue
        rows = slice(segment.start, segment.end)
        num_keys = int(positions[segment.end - 1]) + 1
        pieces = page_pieces(segment.page_table, segment.runs, page, num_keys)
        if (library := compiled_for(q, keys, values)) is not None:
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            found = attend_rows(library, q[rows], positions[rows], keys, values, factor, pieces)
            parts.append(found)
            continue
        if len(pieces) > 1 and segment.end - segment.start < GATHER_ROWS:
            parts.append(_attend_pieces(q[rows], positions[rows], pieces, keys, values, scale))
            continue
        own = [(keys[start:end], values[start:end]) for start, end in pieces]
        k, v = own[0] if len(own) == 1 else (torch.cat(part) for part in zip(*own, strict=True))
        parts.append(attend(q[rows], positions[rows], [Segment(0, len(q[rows]), k, v)], scale))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty_like(q)


def page_pieces(
    table: Sequence[int], runs: Sequence[tuple[int, int]] | None, page: int, num_keys: int
) -> list[tuple[int, int]]:
    """The first `num_keys` keys as slots [start, end) of the pool, piece by piece."""
    pieces, left = [], num_keys
    for first, count in runs or _runs(table):
        taken = min(left, count * page)
        pieces.append((first * page, first * page + taken))
        left -= taken
        if not left:
            return pieces
    raise AssertionError(f"a row looks {left} keys beyond the pages of its sequence")


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def _attend_pieces(
    q: Tensor,
    positions: Tensor,
    pieces: Sequence[tuple[int, int]],
    keys: Tensor,
    values: Tensor,
    scale: float | None,
) -> Tensor:
    """A few rows over several pieces: scores by piece, one softmax, outputs by piece summed."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    factor = head_dim**-0.5 if scale is None else scale
    # query heads of one KV head lie behind each other as its rows: [Hk, G * R, D]
    lined = q.view(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    lined = lined.reshape(kv_heads, group * num_rows, head_dim) * factor
    scores = torch.cat(
        [torch.matmul(lined, keys[start:end].permute(1, 2, 0)) for start, end in pieces], dim=-1
    )  # [Hk, G * R, N]
    first, num_keys = int(positions[0]), scores.shape[-1]
    if first + 1 < num_keys:  # the edge: keys that some of the rows do not see
        at = torch.arange(first + 1, num_keys, device=q.device)
        hidden = at > positions.to(q.device)[:, None]  # [R, edge]
        scores[..., first + 1 :].masked_fill_(hidden.repeat(group, 1), float("-inf"))
    wide = scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
    weights = scores.softmax(-1, dtype=wide).to(q.dtype)
    out, at_key = None, 0
    for start, end in pieces:
        part = weights[..., at_key : at_key + end - start]
        seen = torch.matmul(part, values[start:end].transpose(0, 1))
        out = seen if out is None else out.add_(seen)
        at_key += end - start
    assert out is not None, "a sequence has keys"
    out = out.view(kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads, head_dim)
