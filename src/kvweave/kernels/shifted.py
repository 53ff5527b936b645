"""Chunks that all sequences share, shifted for one of them: what that adds to attention.

A shift moves the keys of a chunk by one vector b before they are turned, and its values by another
(`shift.py`). Read-only pages stay as they are. A query q that was turned back by the chunk's start
would get of key j

    q · R(j) (k + b)  =  q · R(j) k  +  Σ_i (q₁b₁ + q₂b₂)_i cos jθ_i + (q₂b₁ - q₁b₂)_i sin jθ_i

where (x₁, x₂)_i are the channels that turn together by θ_i. The sum is a product of two vectors:
one of the query and the shift, and one of the place j in a chunk, which is the same for all chunks,
heads and layers. What falls on the chunk falls on its values' shift, too.

Shapes: D head dim, r rotary dims.
"""

import threading
from collections.abc import Callable
from types import MethodType
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from kvweave.kernels.rope import Angles, Turn

MOST_PLACES = 4096  # tokens of a chunk that can be shifted where it lies


def shift_weights(q: Tensor, by: Tensor, half: int) -> Tensor:
    """What the shift `by` of a chunk's keys makes of queries q, both [..., D]: their products with
    `place_table` are added to scores. `half` is r/2."""
    q1, q2, rest = q[..., :half], q[..., half : 2 * half], q[..., 2 * half :]
    b1, b2, still = by[..., :half], by[..., half : 2 * half], by[..., 2 * half :]
    return torch.cat([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2, rest * still], -1)


def place_angles(turn: Turn, device: torch.device) -> Angles:
    """Cosines and sines [MOST_PLACES, r/2] of the places in a chunk."""
    cos, sin = turn(torch.arange(MOST_PLACES, device=device))
    return Angles(cos[:, 0].contiguous(), sin[:, 0].contiguous())


def place_table(turn: Turn, num_tokens: int, like: Tensor) -> Tensor:
    """[num_tokens, D] of the places in a chunk, for queries `like` [..., D]. One model's is kept
    for the next layer."""
    kind = (like.shape[-1], like.dtype, like.device)
    if _kept.table is None or _kept.kind != kind or _kept.turn() != turn:
        cos, sin = place_angles(turn, like.device)
        ones = cos.new_ones(MOST_PLACES, like.shape[-1] - 2 * cos.shape[-1])
        _kept.table = torch.cat([cos, sin, ones], -1).to(like.dtype)
        _kept.kind, _kept.turn = kind, _weakly(turn)
    return _kept.table[:num_tokens]


class _KeptPlaces(threading.local):
    """The last table that was made. Each thread has its own; it keeps no model."""

    def __init__(self) -> None:
        self.turn: Callable[[], object] = lambda: None
        self.kind: tuple[object, ...] = ()
        self.table: Tensor | None = None


_kept = _KeptPlaces()


def _weakly(turn: Turn) -> Callable[[], object]:
    return WeakMethod(turn) if isinstance(turn, MethodType) else ref(turn)
