"""A hook between the projections of a layer and its KV: what stands there may change first.

Rows that are computed can tell something about rows of their sequence that are not (drift, see
kvweave.fuse). Fusion puts a `RowHook` beside its rows; the decoder calls it in every layer, between
projecting and writing, and knows nothing of what it does.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvweave.model.sequence_kv import DenseKV


class QKV(NamedTuple):
    """Projections of some rows: after q/k norm, before RoPE."""

    q: Tensor  # [R, Hq, D]
    k: Tensor  # [R, Hk, D]
    v: Tensor  # [R, Hk, D]


class RowHook(Protocol):
    """Changes the KV of one sequence, from what some of its rows are about to write.

    Called on the thread of the pass, once per layer and pass, before any row of that layer is
    written and before any row reads it. What it raises ends the pass.
    """

    def move(self, layer: int, fresh: QKV, kv: DenseKV) -> None:
        """Change `layer` of `kv`; `fresh` are all rows of the sequence that run in this pass."""
        ...


class HookedRows(NamedTuple):
    """The rows of one sequence of a batch that has a hook."""

    hook: RowHook
    kv: DenseKV
    start: int  # its rows [start, end) of the batch
    end: int


def run_hooks(hooked: Sequence[HookedRows], layer: int, fresh: QKV) -> None:
    """Call every hook of a batch with its own rows of the projections."""
    for hook, kv, start, end in hooked:
        hook.move(layer, QKV(*(x[start:end] for x in fresh)), kv)
