"""The KV of all sequences of a batch, as one object that rows are written to and attend over.

A batch has KV of one kind: a dense buffer per sequence, or pages of one pool. Of those that live in
a pool some may share chunks and some not.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.kernels.attention import attend
from kvweave.kernels.host import on_device
from kvweave.kernels.native.layers import PlacedRows, SequenceSlots
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.segments import attend_segments
from kvweave.kernels.types import PagedSegment, Segment, SegmentedRows
from kvweave.model.paged_kv import KVPool, PagedKV, SegmentedKV
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
    if any(isinstance(rows.kv, SegmentedKV) for rows in batch):
        return SegmentedBatchKV(batch, device)
    is_paged = bool(batch) and isinstance(batch[0].kv, PagedKV)
    return PagedBatchKV(batch, device) if is_paged else DenseBatchKV(batch)


class DenseBatchKV:
    """Rows of sequences that own a dense buffer each."""

    def __init__(self, batch: Sequence[Rows]) -> None:
        self._batch = batch
        self._kvs = [rows.kv for rows in batch if not isinstance(rows.kv, PagedKV | SegmentedKV)]
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
        self._slots = _PoolSlots(self._pool, slots, len(batch) == 1, device)

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        self._slots.write(layer, k, v, angles)

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


class SegmentedBatchKV:
    """Rows of sequences of one pool of which some share chunks. Those that do not attend as they
    would by themselves: theirs may be many rows, and none of what is said of chunks is theirs."""

    def __init__(self, batch: Sequence[Rows], device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._kvs = [rows.kv for rows in batch if isinstance(rows.kv, PagedKV | SegmentedKV)]
        assert len(self._kvs) == len(batch), "a batch has KV of one kind"
        self._pool = self._kvs[0].pool
        slots: list[int] = []
        self._ranks: list[list[int]] = []  # own slots of each sequence's rows
        for rows, kv in zip(batch, self._kvs, strict=True):
            own = kv.own if isinstance(kv, SegmentedKV) else kv
            ranks = kv.ranks(rows.positions) if isinstance(kv, SegmentedKV) else rows.positions
            self._ranks.append(list(ranks))
            slots += own.slots(ranks)
        self._slots = _PoolSlots(self._pool, slots, len(batch) == 1, device)
        self._turn = next(kv.turn for kv in self._kvs if isinstance(kv, SegmentedKV))
        self._plans: dict[bool, _AttendPlan] = {}  # by whether all rows attend

    def placed(self, positions: Tensor) -> PlacedRows | None:
        return None  # compiled layers know no shared chunks

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        self._slots.write(layer, k, v, angles)

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
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

    def _plan(self, counts: Sequence[int] | None) -> "_AttendPlan":
        plain: list[PagedSegment] = []
        shared: list[SegmentedRows] = []
        rows: tuple[list[int], list[int]] = ([], [])  # of the batch: plain ones, the others
        ranks: list[int] = []
        for i, (kv, (start, end)) in enumerate(
            zip(self._kvs, bounds_of(self._batch, counts), strict=True)
        ):
            if start == end:
                continue
            own = rows[isinstance(kv, SegmentedKV)]
            first = len(own)
            own += range(start, end)
            if isinstance(kv, PagedKV):
                plain.append(kv.segment(first, len(own)))
                continue
            shared.append(kv.segment(first, len(own)))
            all_ranks = self._ranks[i]
            wanted = self._batch[i].wanted
            ranks += all_ranks if counts is None else [all_ranks[j] for j in wanted]
        both = [torch.tensor(each, dtype=torch.int64) for each in rows]
        there = [on_device(each, self._device) for each in both]
        return _AttendPlan(
            plain,
            shared,
            (both[0], there[0]),
            (both[1], there[1]),
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


class _PoolSlots:
    """Where the rows of a batch are written: slots of a pool."""

    def __init__(
        self, pool: KVPool, slots: Sequence[int], alone: bool, device: torch.device
    ) -> None:
        """`alone`: rows of one sequence, which may lie side by side."""
        self._pool = pool
        is_run = alone and all(b - a == 1 for a, b in pairwise(slots))
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
