"""Chunks moved by one vector each, keys in the frame before RoPE.

A prompt's own copy of a chunk is moved row by row: `shift`, `shift_runs`. Pages that all sequences
share stay as they are: a shift of one sequence's is a row that attention adds. A query q that was
turned back by the chunk's start would get q · R(j) b more of key j. Within a chunk that hardly
depends on j: most of a shift lies in channels that turn slowly. So all keys of a chunk get the
mean, one more product with a row (`mean_turned`):

    q · b',  b' = 1/n Σ_j R(j) b,  j = 0 .. n-1

The row is b' with the values' shift, one for each chunk of a sequence, made once. What falls on the
chunk falls on its values' shift, too. (`bench/shared_drift.py` compares it with shifted copies.)

Shapes: N rows, C or S chunks, T rows of the request's KV, Hk KV heads, D head dim, r rotary dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled, has_kernels
from kvweave.kernels.host import on_device
from kvweave.kernels.native import stored as in_c
from kvweave.kernels.rope import Angles, Turn, rotate


def shift(
    keys: Tensor,
    values: Tensor,
    by_k: Tensor,
    by_v: Tensor,
    chunk: Tensor,
    row: Tensor,
    turn: Angles,
) -> None:
    """Add by_k[chunk[n]], turned, to keys[row[n]] and by_v[chunk[n]] to values[row[n]].

    keys, values [T, Hk, D]; by_k, by_v [C, Hk, D] float32; chunk, row [N]; turn [N, 1, r/2]. No two
    rows alike.
    """
    if not len(row):
        return
    if has_kernels(keys):
        from kvweave.kernels.gpu.place import shift_rows

        shift_rows(keys, values, by_k, by_v, chunk, row, turn)
        return
    turned = rotate(by_k[chunk], Angles(turn.cos.float(), turn.sin.float()))
    keys[row] = (keys[row].float() + turned).to(keys.dtype)
    values[row] = (values[row].float() + by_v[chunk]).to(values.dtype)


class Run(NamedTuple):
    """A chunk whose rows lie side by side, n of them.

    Its angles as wide as a head, so that turning by them is x · cos + (x, halves swapped) · sin.
    """

    rows: slice
    half: int  # r/2
    cos: Tensor  # [n, 1, D] float32
    sin: Tensor  # [n, 1, D] float32: negative in the first half

    @classmethod
    def from_angles(cls, start: int, angles: Angles, head_dim: int) -> "Run":
        """A chunk from row `start` on, with the angles of its rows."""
        cos, sin = angles.cos.float(), angles.sin.float()
        still = head_dim - 2 * cos.shape[-1]  # dims that are not turned
        ones, zeros = cos.new_ones(len(cos), 1, still), cos.new_zeros(len(cos), 1, still)
        wide = torch.cat([cos, cos, ones], -1), torch.cat([-sin, sin, zeros], -1)
        return cls(slice(start, start + len(cos)), cos.shape[-1], *wide)


@dataclass(frozen=True, slots=True)
class ChunkRuns:
    """Some chunks whose rows lie side by side."""

    each: tuple[Run, ...]
    table: Tensor  # [C, 2] int64: first row of every chunk, and how many it has
    turn: Angles  # [N, 1, r/2] float32 of all their rows, chunk by chunk

    @classmethod
    def from_chunks(cls, chunks: Sequence[tuple[int, Angles]], head_dim: int) -> "ChunkRuns":
        """Chunks by their first row and the angles of their rows."""
        each = tuple(Run.from_angles(start, angles, head_dim) for start, angles in chunks)
        table = torch.tensor([(start, len(angles.cos)) for start, angles in chunks])
        cos, sin = (torch.cat(parts).float() for parts in zip(*(a for _, a in chunks), strict=True))
        return cls(each, table, Angles(cos, sin))


def shift_runs(keys: Tensor, values: Tensor, by_k: Tensor, by_v: Tensor, runs: ChunkRuns) -> None:
    """Do what `shift` does, chunk c being runs.each[c]: what a CPU does without gathering a row."""
    library = find_compiled(keys, values, by_k, by_v)
    if library is not None and in_c.has_whole_rows(keys, values):
        in_c.shift_runs(library, (keys, values), (by_k, by_v), runs.table, runs.turn)
        return
    half = runs.each[0].half
    swapped = torch.cat([by_k[..., half : 2 * half], by_k[..., :half], by_k[..., 2 * half :]], -1)
    for c, (rows, _, cos, sin) in enumerate(runs.each):
        here, each = slice(c, c + 1), (keys[rows], values[rows])
        wide_k, wide_v = (x.float() for x in each)  # themselves, if they are float32
        wide_k.addcmul_(cos, by_k[here]).addcmul_(sin, swapped[here])
        wide_v.add_(by_v[here])
        for x, wide in zip(each, (wide_k, wide_v), strict=True):
            if x is not wide:
                x.copy_(wide)


def mean_turned(by: Tensor, num_tokens: Sequence[int], turn: Turn) -> Tensor:
    """What shifts `by` [..., S, Hk, D] of keys become on the mean over the places of chunks of
    `num_tokens` [S]."""
    turned = rotate(by.flatten(0, -3), _mean_angles(num_tokens, turn, by))
    return turned.view(by.shape)


def _mean_angles(num_tokens: Sequence[int], turn: Turn, like: Tensor) -> Angles:
    """Means of cosine and sine over the places of each chunk: those of the place in its middle,
    times sin(nθ/2) / (n sin(θ/2)). As many as `like` [..., S, Hk, D] has rows."""
    num, chunks = torch.tensor(num_tokens, dtype=torch.float32), len(num_tokens)
    places = torch.cat([(num - 1) / 2, num / 2, torch.tensor([0.5])])
    places = on_device(places, like.device)
    cos, sin = turn(places)
    whole, step = sin[chunks:-1], sin[-1]
    less = whole / (2 * places[chunks:-1, None, None] * step)
    less = torch.where(step == 0, 1.0, less)  # a channel that does not turn
    times = like.shape[:-3].numel()
    each = ((x[:chunks] * less).to(like.dtype).repeat(times, 1, 1) for x in (cos, sin))
    return Angles(*each)
