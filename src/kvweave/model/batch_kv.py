"""The KV of all sequences of a batch, as one object that rows are written to and attend over.

A batch has KV of one kind: a dense buffer per sequence, or pages of one pool.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvweave.kernels.attention import attend
from kvweave.kernels.host import on_device
from kvweave.kernels.native.layers import PlacedRows, SequenceSlots
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Segment
from kvweave.model.paged_kv import PagedKV
from kvweave.model.rows import Rows, bounds_of, flat
from kvweave.model.sequence_kv import SequenceKV


class BatchKV(Protocol):
    """The KV of a batch. Made for a pass, on its thread, and again when rows stop early."""

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        """Keep keys (turned on the way) and values [R, Hk, D] of all rows."""
        ...

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        """Attention output of turned queries [R, Hq, D] of rows at `positions` [R] (host).

        `counts` says how many rows each sequence has, where that is not all of them.
        """
        ...

    def placed(self, positions: Tensor) -> PlacedRows | None:
        """Where all rows and what they look at lie, for compiled layers; None: not in one piece of
        memory for all layers. `positions` [R] of all rows, on the host."""
        ...


def kv_of(batch: Sequence[Rows], device: torch.device) -> BatchKV:
    """The KV of `batch`, which may have no rows."""
    is_paged = bool(batch) and isinstance(batch[0].kv, PagedKV)
    return PagedBatchKV(batch, device) if is_paged else DenseBatchKV(batch)


class DenseBatchKV:
    """Rows of sequences that own a dense buffer each."""

    def __init__(self, batch: Sequence[Rows]) -> None:
        self._batch = batch
        self._kvs = [rows.kv for rows in batch if not isinstance(rows.kv, PagedKV)]
        assert len(self._kvs) == len(batch), "a batch has KV of one kind"
        self._scattered: dict[int, Tensor] = {}  # places of rows that are no run, for every layer

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        for rows, kv, (start, end) in zip(
            self._batch, self._kvs, bounds_of(self._batch, None), strict=True
        ):
            part = Angles(angles.cos[start:end], angles.sin[start:end])
            first, last = rows.positions[0], rows.positions[-1]
            if last - first == end - start - 1:  # one run: rotate straight into the buffer
                rotate(k[start:end], part, out=kv.keys(layer)[first : last + 1])
                kv.values(layer)[first : last + 1] = v[start:end]
            else:
                places = self._scattered.get(start)
                if places is None:
                    places = on_device(flat([rows.positions]), k.device)
                    self._scattered[start] = places
                kv.keys(layer)[places] = rotate(k[start:end], part)
                kv.values(layer)[places] = v[start:end]

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        bounds = bounds_of(self._batch, counts)
        segments = [
            Segment(start, end, kv.keys(layer), kv.values(layer))
            for kv, (start, end) in zip(self._kvs, bounds, strict=True)
        ]
        return attend(q, positions, segments)

    def placed(self, positions: Tensor) -> PlacedRows | None:
        kvs = [kv for kv in self._kvs if isinstance(kv, SequenceKV)]
        if len(kvs) < len(self._kvs):
            return None
        sequences = [
            SequenceSlots(len(rows.positions), *kv.memory, None)
            for rows, kv in zip(self._batch, kvs, strict=True)
        ]
        return PlacedRows(positions, positions, sequences)


class PagedBatchKV:
    """Rows of sequences that share a pool: those of all sequences are written in one go."""

    def __init__(self, batch: Sequence[Rows], device: torch.device) -> None:
        self._batch = batch
        self._kvs = [rows.kv for rows in batch if isinstance(rows.kv, PagedKV)]
        assert len(self._kvs) == len(batch), "a batch has KV of one kind"
        self._pool = self._kvs[0].pool
        slots = [
            s for rows, kv in zip(batch, self._kvs, strict=True) for s in kv.slots(rows.positions)
        ]
        self._host_slots = slots
        is_run = len(batch) == 1 and all(b - a == 1 for a, b in pairwise(slots))
        self._slots = (
            slice(slots[0], slots[-1] + 1) if is_run else on_device(torch.tensor(slots), device)
        )

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        slots = self._slots
        keys, values = self._pool.slots(layer)
        if isinstance(slots, slice):
            rotate(k, angles, out=keys[slots])
        else:
            keys[slots] = rotate(k, angles)
        values[slots] = v

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        bounds = bounds_of(self._batch, counts)
        segments = [kv.segment(*rows) for kv, rows in zip(self._kvs, bounds, strict=True)]
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        return attend_paged(q, positions, segments, keys, values)

    def placed(self, positions: Tensor) -> PlacedRows | None:
        page = self._pool.page_tokens
        sequences = [
            SequenceSlots(
                len(rows.positions),
                *self._pool.memory,
                [(first * page, count * page) for first, count in kv.runs],
            )
            for rows, kv in zip(self._batch, self._kvs, strict=True)
        ]
        return PlacedRows(positions, torch.tensor(self._host_slots), sequences)
