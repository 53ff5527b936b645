"""The rows of a batch: which tokens, of which sequences, through how many layers.

A row is one token of one sequence; rows of one sequence lie side by side in a flat batch. Rows that
are computed can tell something about rows of their sequence that are not (drift, see kvweave.fuse):
fusion puts a `RowHook` beside its rows, the decoder calls it in every layer, between projecting and
writing, and knows nothing of what it does.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.model.paged_kv import PagedKV
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


class EarlyExit(NamedTuple):
    """Where some rows of a sequence stop, and which go on."""

    layer: int  # the last one whose keys and values all rows write
    remaining: Sequence[int]  # which of the rows (0-based, ascending) go on


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a batch that belong to one sequence."""

    token_ids: Sequence[int]
    positions: Sequence[int]  # ascending; as many as token_ids
    kv: DenseKV | PagedKV  # gets the rows' keys and values; of one kind in a batch
    wanted: Sequence[int]  # which of these rows (0-based, ascending) need logits
    hook: RowHook | None = None  # changes the KV of each layer before its rows are written
    early_exit: EarlyExit | None = None  # None: all rows run to the end; wanted rows always do

    @property
    def paged_kv(self) -> PagedKV:
        """The KV of rows that live in pages of a pool."""
        assert isinstance(self.kv, PagedKV), "a batch has KV of one kind"
        return self.kv

    def remaining(self) -> "Rows":
        """The rows that go on where the others stop."""
        assert self.early_exit is not None, "all of them go on"
        stay = self.early_exit.remaining
        return replace(
            self,
            token_ids=[self.token_ids[i] for i in stay],
            positions=[self.positions[i] for i in stay],
            wanted=[stay.index(i) for i in self.wanted],
            early_exit=None,
        )


def after_exits(batch: Sequence[Rows], layer: int) -> tuple[list[Rows], Tensor] | None:
    """The batch that goes on from `layer`, and the indices of its rows in the old one (host).

    None: no row stops at this layer. Sequences of which no row goes on are left out.
    """
    if not any(rows.early_exit is not None and rows.early_exit.layer == layer for rows in batch):
        return None
    remaining: list[Rows] = []
    keep: list[Tensor] = []
    for rows, (start, end) in zip(batch, bounds_of(batch, None), strict=True):
        if rows.early_exit is None or rows.early_exit.layer != layer:
            remaining.append(rows)
            keep.append(torch.arange(start, end))
        elif len(rows.early_exit.remaining):
            remaining.append(rows.remaining())
            keep.append(start + torch.tensor(rows.early_exit.remaining, dtype=torch.int64))
    return remaining, torch.cat(keep) if keep else torch.empty(0, dtype=torch.int64)


def flat(parts: Sequence[Sequence[int]]) -> Tensor:
    """All numbers behind each other, int64 in host memory. A range costs nothing per number."""
    return torch.cat(
        [
            torch.arange(part.start, part.stop, part.step)
            if isinstance(part, range)
            else torch.tensor(part, dtype=torch.int64)
            for part in parts
        ]
    )


def wanted_rows(batch: Sequence[Rows]) -> Tensor:
    """Indices into the flat batch of the rows whose logits are asked for."""
    wanted, start = [], 0
    for rows in batch:
        wanted += [start + i for i in rows.wanted]
        start += len(rows.token_ids)
    return torch.tensor(wanted, dtype=torch.int64)


def bounds_of(batch: Sequence[Rows], counts: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Rows [start, end) of each sequence; `counts` replaces how many there are."""
    start = 0
    for i, rows in enumerate(batch):
        end = start + (len(rows.token_ids) if counts is None else counts[i])
        yield start, end
        start = end


def hooked_rows(batch: Sequence[Rows]) -> list[HookedRows]:
    """Sequences that have a hook, with their rows. Shared chunks are never written to: those that
    share some have none."""
    hooked: list[HookedRows] = []
    for rows, bounds in zip(batch, bounds_of(batch, None), strict=True):
        if rows.hook is not None:
            shares = isinstance(rows.kv, PagedKV) and rows.kv.chunks
            assert not shares, "a hook writes to KV of one's own"
            hooked.append(HookedRows(rows.hook, rows.kv, *bounds))
    return hooked
