"""What operators are told about the memory they work on.

Below the operators and below their GPU kernels, because both sides name these types.

Shapes: N keys of one sequence, C chosen rows, M chunks, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """The rows of one sequence and the keys they look at."""

    start: int  # first row of the flat batch that belongs to this sequence
    end: int  # one past the last
    keys: Tensor  # [N, Hk, D] rotated, in position order
    values: Tensor  # [N, Hk, D]
    key_positions: Tensor | None = None  # [N] ascending; None: key j stands at position j


class PagedSegment(NamedTuple):
    """The rows of one sequence and the pages they look at."""

    start: int  # first row of the flat batch that belongs to this sequence
    end: int  # one past the last
    page_table: Sequence[int]  # its pages in position order
    runs: Sequence[tuple[int, int]] | None = None  # the table as (first page, pages), if known


class SharedChunk(NamedTuple):
    """A chunk that lies once in read-only pages, keys turned to their places in the chunk.

    One copy serves every prompt: a row at position t sees key j of a chunk that starts at s at the
    distance (t - s) - j, so queries are turned back by s and keys are left alone.
    """

    pages: Sequence[int]  # in the order of its tokens
    num_tokens: int
    start: int  # position of its first token in this prompt
    # [num_tokens] bool on the host: rows the sequence has of its own
    replaced: Tensor | None = None
    # slot of the pool, as own rows have, of what the others are shifted by (`shift.py`); its key
    # is divided by whatever those of the chunk are
    shift: int | None = None


class CodedPages(NamedTuple):
    """Pages in which chunks lie in 8 bits, one layer of a pool: as many bytes as those of own rows,
    and so more tokens. A channel of a key or value is its code times the scale of its token and KV
    head; keys are divided by `lift` before, and queries multiplied (`coded.py`).

    Codes of channels c (lower byte) and c + D/2 share a number: no unit that feeds a GPU's products
    from shared memory knows bytes.
    """

    keys: Tensor  # int16 [P, page, Hk, D/2], turned to their places in their chunks
    values: Tensor  # int16 [P, page, Hk, D/2]
    scales: Tensor  # float16 [P, Hk, page, 2]: of a key and of its value
    lift: Tensor | None  # float32 [Hk, D], alike for the channels that turn together; None: all 1


class SegmentedRows(NamedTuple):
    """Rows of a batch that look at pages of their own sequence and at shared chunks."""

    start: int  # first row of the flat batch that belongs to this sequence
    end: int  # one past the last
    own: PagedSegment  # slot i holds the i-th own row by position; keys turned to true positions
    chunks: Sequence[SharedChunk] = ()  # none: a plain sequence. Not changed while it is in use


class Owners(NamedTuple):
    """Which chunk each chosen row belongs to: the rows of a chunk lie side by side."""

    bounds: Tensor  # [M + 1] int32: chunk m has the rows [bounds[m], bounds[m + 1])
    weights: Tensor  # [M] float32: what a row's change counts for

    def sums(self, change: Tensor) -> Tensor:
        """[2, M, Hk, D] of changes [2, C, Hk, D]: weighted and summed by chunk."""
        count, num = len(self.weights), change.shape[1]
        chunks = torch.arange(count, device=change.device)
        owner = torch.repeat_interleave(chunks, self.bounds.diff(), output_size=num)
        total = change.new_zeros(2, count, *change.shape[2:]).index_add_(1, owner, change)
        return total.mul_(self.weights[:, None, None])


class Packing(NamedTuple):
    """How a chunk's layer lies in its bytes."""

    kind: Literal["plain", "int", "fp8"]
    stored: torch.dtype  # of plain elements
    bits: int = 16  # of a code
    group: int = 64  # values that share parameters: keys along tokens, values along the head dim


class StoredRows(NamedTuple):
    """Where each stored token's bytes are and where it goes, for all tokens of a launch.

    One number per token, on the device of the bytes.
    """

    base: Tensor  # int64: first byte of its chunk, a multiple of 16
    nth: Tensor  # int64: its number in the chunk
    length: Tensor  # int64: tokens of the chunk
    row: Tensor  # int64: of the request's KV; no two alike


class RowMoves(NamedTuple):
    """Which rows of one memory go to which of another. On the device of both."""

    source: Tensor  # [n] int64
    target: Tensor  # [n] int64; no two alike
    which: Tensor | None = None  # [n] int64: the turn of each row, where keys are turned
