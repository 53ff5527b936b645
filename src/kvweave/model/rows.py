"""The rows of a batch: which tokens, of which sequences, through how many layers.

A row is one token of one sequence; rows of one sequence lie side by side in a flat batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.model.paged_kv import PagedKV
from kvweave.model.row_hook import Moves, RowHook
from kvweave.model.sequence_kv import DenseKV


class Leave(NamedTuple):
    """Rows that stop early."""

    layer: int  # the last one whose keys and values they write
    stay: Sequence[int]  # which of the rows (0-based, ascending) go on behind it


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a batch that belong to one sequence."""

    token_ids: Sequence[int]
    positions: Sequence[int]  # ascending; as many as token_ids
    kv: DenseKV | PagedKV  # gets the rows' keys and values; of one kind in a batch
    wanted: Sequence[int]  # which of these rows (0-based, ascending) need logits
    mover: RowHook | None = None  # changes the KV of each layer before its rows are written
    leave: Leave | None = None  # None: all of them run to the end; wanted rows always do

    def staying(self) -> "Rows":
        """The ones that go on behind the layer where the others leave."""
        assert self.leave is not None, "all of them go on"
        stay = self.leave.stay
        return replace(
            self,
            token_ids=[self.token_ids[i] for i in stay],
            positions=[self.positions[i] for i in stay],
            wanted=[stay.index(i) for i in self.wanted],
            leave=None,
        )


def without_leaving(batch: Sequence[Rows], layer: int) -> tuple[list[Rows], Tensor] | None:
    """Behind `layer`: the batch that goes on, and its rows among the old ones [R] (host).

    None: nobody leaves here. Sequences of which no row goes on are gone.
    """
    if not any(rows.leave is not None and rows.leave.layer == layer for rows in batch):
        return None
    left: list[Rows] = []
    keep: list[Tensor] = []
    for rows, (start, end) in zip(batch, bounds_of(batch, None), strict=True):
        if rows.leave is None or rows.leave.layer != layer:
            left.append(rows)
            keep.append(torch.arange(start, end))
        elif len(rows.leave.stay):
            left.append(rows.staying())
            keep.append(start + torch.tensor(rows.leave.stay, dtype=torch.int64))
    return left, torch.cat(keep) if keep else torch.empty(0, dtype=torch.int64)


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


def moves_of(batch: Sequence[Rows]) -> list[Moves]:
    """Sequences of which something moves before their rows are written."""
    return [
        Moves(rows.mover, rows.kv, *bounds)
        for rows, bounds in zip(batch, bounds_of(batch, None), strict=True)
        if rows.mover is not None
    ]
