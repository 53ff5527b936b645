"""How the rows of a batch reach the KV of their sequences, which is of one kind in a batch.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvweave.kernels.attention import attend
from kvweave.kernels.host import on_device
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Segment
from kvweave.model.paged_kv import PagedKV, PagedPlaces
from kvweave.model.rows import Rows, bounds_of, flat


class Access(Protocol):
    """The KV of a batch. Made for a pass, on its thread, and again when rows leave it."""

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


def access_to(batch: Sequence[Rows], device: torch.device) -> Access:
    """The KV of `batch`. One of no rows is fine."""
    is_paged = bool(batch) and isinstance(batch[0].kv, PagedKV)
    return PagedAccess(batch, device) if is_paged else DenseAccess(batch)


class DenseAccess:
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


class PagedAccess:
    """Rows of sequences that share a pool: written in one go, whoever they belong to."""

    def __init__(self, batch: Sequence[Rows], device: torch.device) -> None:
        self._batch = batch
        self._kvs = [rows.kv for rows in batch if isinstance(rows.kv, PagedKV)]
        assert len(self._kvs) == len(batch), "a batch has KV of one kind"
        positions = [rows.positions for rows in batch]
        self._places = PagedPlaces.of(list(zip(self._kvs, positions, strict=True)), device)

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        pool, slots = self._places
        keys, values = pool.slots(layer)
        if isinstance(slots, slice):
            rotate(k, angles, out=keys[slots])
        else:
            keys[slots] = rotate(k, angles)
        values[slots] = v

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        pool = self._places.pool
        bounds = bounds_of(self._batch, counts)
        segments = [kv.segment(*rows) for kv, rows in zip(self._kvs, bounds, strict=True)]
        return attend_paged(q, positions, segments, pool.keys[layer], pool.values[layer])
