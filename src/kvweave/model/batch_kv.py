"""The KV of all sequences of a batch, as one object that rows are written to and attend over.

A batch has KV of one kind: a dense buffer per sequence, or pages of one pool. Of those that live in
a pool some may share chunks and some not.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.kernels.attention import attend
from kvweave.kernels.host import on_device
from kvweave.kernels.native.layers import PlacedRows, SequenceSlots
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.rope import Angles, Turn, rotate
from kvweave.kernels.segments import attend_segments
from kvweave.kernels.types import PagedSegment, Segment, SegmentedRows
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

    def locate_rows(self, positions: Tensor) -> PlacedRows | None:
        """Where all rows and what they look at lie, for compiled layers; None: not in one piece of
        memory for all layers. `positions` [R] of all rows, on the host."""
        ...


def open_batch_kv(batch: Sequence[Rows], device: torch.device, turn: Turn) -> BatchKV:
    """The KV of `batch`, which may have no rows. `turn` is the decoder's."""
    is_paged = bool(batch) and isinstance(batch[0].kv, PagedKV)
    return PagedBatchKV(batch, device, turn) if is_paged else DenseBatchKV(batch)


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

    def locate_rows(self, positions: Tensor) -> PlacedRows | None:
        kvs = [kv for kv in self._kvs if isinstance(kv, SequenceKV)]
        if len(kvs) < len(self._kvs):
            return None
        sequences = [
            SequenceSlots(len(rows.positions), *kv.memory, None)
            for rows, kv in zip(self._batch, kvs, strict=True)
        ]
        return PlacedRows(positions, positions, sequences)


class PagedBatchKV:
    """Rows of sequences that share a pool: those of all sequences are written in one go.

    Where some share chunks, those that do not attend as they would by themselves: theirs may be
    many rows, and none of what is said of chunks is theirs.
    """

    def __init__(self, batch: Sequence[Rows], device: torch.device, turn: Turn) -> None:
        self._batch = batch
        self._device = device
        self._turn = turn
        self._kvs = [rows.paged_kv for rows in batch]
        self._pool = self._kvs[0].pool
        pairs = zip(batch, self._kvs, strict=True)
        self._host_slots = list(chain.from_iterable(kv.slots(rows.positions) for rows, kv in pairs))
        slots = self._host_slots
        is_run = len(batch) == 1 and slots == list(range(slots[0], slots[0] + len(slots)))
        self._slots = (
            slice(slots[0], slots[-1] + 1) if is_run else on_device(torch.tensor(slots), device)
        )
        self._shares_chunks = any(kv.chunks for kv in self._kvs)
        self._plans: dict[bool, _AttendPlan] = {}  # by whether all rows attend

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
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        if not self._shares_chunks:
            bounds = bounds_of(self._batch, counts)
            plain = [kv.own_segment(*rows) for kv, rows in zip(self._kvs, bounds, strict=True)]
            return attend_paged(q, positions, plain, keys, values)
        coded, turn = self._pool.codes(layer), self._turn
        plan = self._plans.get(counts is None)
        if plan is None:
            plan = self._plans[counts is None] = self._plan(counts)
        if not plan.plain:  # the usual case: nothing is picked out
            return attend_segments(q, positions, plan.ranks, plan.shared, keys, values, turn, coded)
        out = torch.empty_like(q)
        at, there = plan.plain_rows
        out[there] = attend_paged(q[there], positions[at], plan.plain, keys, values)
        if plan.shared:
            at, there = plan.shared_rows
            out[there] = attend_segments(
                q[there], positions[at], plan.ranks, plan.shared, keys, values, turn, coded
            )
        return out

    def locate_rows(self, positions: Tensor) -> PlacedRows | None:
        if self._shares_chunks:
            return None  # compiled layers know no shared chunks
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

    def _plan(self, counts: Sequence[int] | None) -> "_AttendPlan":
        plain: list[PagedSegment] = []
        shared: list[SegmentedRows] = []
        rows: tuple[list[int], list[int]] = ([], [])  # of the batch: plain ones, the others
        ranks: list[int] = []
        bounds = bounds_of(self._batch, counts)
        for sequence, kv, (start, end) in zip(self._batch, self._kvs, bounds, strict=True):
            if start == end:
                continue
            own = rows[bool(kv.chunks)]
            first = len(own)
            own += range(start, end)
            if not kv.chunks:
                plain.append(kv.own_segment(first, len(own)))
                continue
            shared.append(kv.segment(first, len(own)))
            all_ranks = kv.ranks(sequence.positions)
            ranks += all_ranks if counts is None else [all_ranks[i] for i in sequence.wanted]
        plain_at, shared_at = (torch.tensor(each, dtype=torch.int64) for each in rows)
        return _AttendPlan(
            plain,
            shared,
            (plain_at, on_device(plain_at, self._device)),
            (shared_at, on_device(shared_at, self._device)),
            torch.tensor(ranks, dtype=torch.int64),
        )


class _AttendPlan(NamedTuple):
    """Which rows of a batch attend how. The same in every layer but the last, where only the rows
    that need logits go on."""

    plain: list[PagedSegment]
    shared: list[SegmentedRows]
    plain_rows: tuple[Tensor, Tensor]  # of the batch: on the host, on the device
    shared_rows: tuple[Tensor, Tensor]
    ranks: Tensor  # own slots of the shared ones, on the host
