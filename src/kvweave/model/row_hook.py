"""A hook between the projections of a layer and its KV: what stands there may move first.

Rows that are computed can tell something about rows of their sequence that are not (drift, see
kvweave.fuse). Fusion puts a `RowHook` beside the rows; the decoder only calls it in time.

Shapes: R rows, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvweave.model.sequence_kv import DenseKV


class Projections(Protocol):
    """Queries, keys and values of some rows, before RoPE."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...  # [R, Hk, D]
    @property
    def v(self) -> Tensor: ...  # [R, Hk, D]


class RowHook(Protocol):
    """Changes the KV of one sequence, from what some of its rows are about to write.

    Called on the thread of the pass, once per layer and pass, before any row of that layer is
    written and before any row reads it.
    """

    def move(self, layer: int, fresh: Projections, kv: DenseKV) -> None:
        """`fresh` are all rows of the sequence that run in this pass."""
        ...


class Moves(NamedTuple):
    """One sequence of a batch that has a mover."""

    mover: RowHook
    kv: DenseKV
    start: int  # its rows [start, end) of the batch
    end: int


class _HookedRows(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def move_all(moves: Sequence[Moves], layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Let every mover of a batch see its own rows of the projections [R, heads, D]."""
    for mover, kv, start, end in moves:
        mover.move(layer, _HookedRows(q[start:end], k[start:end], v[start:end]), kv)
