"""Attention over sequences whose keys lie in pages of one pool.

The same question as in attention.py: a row at position p sees the keys at positions <= p. Only the
keys' place differs: page j of a sequence's table holds its positions [j * page, (j + 1) * page).

Shapes: R rows of all sequences, P pages of the pool, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.attention import Segment, attend_reference, kernels_fit


class PagedSegment(NamedTuple):
    """The rows of one sequence and the pages they look at."""

    start: int  # first row of the flat batch that belongs to this sequence
    end: int  # one past the last
    page_table: Sequence[int]  # its pages in position order


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
    return attend_paged_ref(q, positions, segments, key_pages, value_pages, scale)


def attend_paged_ref(
    q: Tensor,
    positions: Tensor,
    segments: Sequence[PagedSegment],
    key_pages: Tensor,
    value_pages: Tensor,
    scale: float | None = None,
) -> Tensor:
    """The definition: the pages of each sequence laid side by side."""
    gathered = []
    for segment in segments:
        table = torch.tensor(segment.page_table, device=q.device)
        keys, values = (x[table].flatten(0, 1) for x in (key_pages, value_pages))
        gathered.append(Segment(segment.start, segment.end, keys, values))
    return attend_reference(q, positions, gathered, scale)
