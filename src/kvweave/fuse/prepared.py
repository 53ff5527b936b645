"""A prompt that is stitched and whose rows are chosen: what is left is to compute them.

    stitch → select │ rows in slices, in ordinary forward passes, beside rows of others

A row sees what stands at or before it: reused rows lie in the buffer, recomputed ones of a lower
position were written in the same slice or an earlier one. Rows in position order may therefore be
cut anywhere, and leave what one fused pass leaves. Drift alone ties rows together: a chunk is moved
by the mean change of all its recomputed rows before a row looks at it, so these run in one slice.
Rows that leave early (taper.py) do so in their slice.

What narrows its rows in flight cannot be prepared: it has no rows before the pass.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.drift import Mover, make_mover
from kvweave.fuse.fuse import scored_layers, select_rows, work_of
from kvweave.fuse.protocol import FusionDecoder, KVBuffer, Projected
from kvweave.fuse.record import PassTrace
from kvweave.fuse.request import FuseRequest, State
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.strategy import REUSE, Strategy
from kvweave.fuse.taper import TaperedRows


@dataclass(slots=True, eq=False)
class Prepared:
    """Rows to compute, and how. Owned by the thread that owns the decoder."""

    decoder: FusionDecoder
    request: FuseRequest
    rows: list[int]  # positions to compute, ascending; the last token is the last of them
    bonds: list[tuple[int, int]]  # [start, end) of `rows` that no slice may cut, ascending
    recomputed: tuple[int, ...]  # hits among the rows
    work: float  # rows through layers, the probe's included, as a share of full prefill's
    select_s: float  # choosing rows, probe included
    load_s: float  # waiting for chunk KV, decoding and laying it; not in select_s
    drift: float = 0.0  # 0: none
    leaving: TaperedRows | None = None  # most of the recomputed rows stop early
    pass_s: float = 0.0  # the rows are still to be computed
    trace: PassTrace | None = None
    _mover: "tuple[int, int, SliceMover | None] | None" = field(default=None, repr=False)

    def mover(self, start: int, end: int) -> "SliceMover | None":
        """Return what moves the rest of their chunks when rows [start, end) are computed; None:
        nothing. A slice that runs again gets the same mover, which knows what it has moved."""
        if self._mover is None or self._mover[:2] != (start, end):
            self._mover = (start, end, self._make_mover(start, end))
        return self._mover[2]

    def staying(self, start: int, end: int) -> tuple[int, list[int]] | None:
        """The layer behind which some of rows [start, end) leave, and which of them (counted from
        `start`) go on; None: all do."""
        if self.leaving is None:
            return None
        stay = _between(self.leaving.rows, self.rows[start], self.rows[end - 1])
        if len(stay) == end - start:
            return None
        return self.leaving.layer, np.searchsorted(self.rows[start:end], stay.numpy()).tolist()

    def _make_mover(self, start: int, end: int) -> "SliceMover | None":
        first, last = self.rows[start], self.rows[end - 1]
        start_hit, end_hit = (bisect_left(self.recomputed, at) for at in (first, last + 1))
        if not self.drift or start_hit == end_hit:
            return None
        hits, rows = _tensor(self.recomputed[start_hit:end_hit]), _tensor(self.rows[start:end])
        leaving = self.leaving
        if leaving is not None:
            stay, later = (_between(each, first, last) for each in (leaving.stay, leaving.rows))
            leaving = TaperedRows(leaving.layer, stay, later)
        mover = make_mover(self.decoder, self.request, hits, self.drift, leaving)
        if leaving is None:
            return SliceMover(mover, self.decoder.spec.num_layers, rows, rows)
        return SliceMover(mover, leaving.layer, rows, leaving.rows)


@torch.inference_mode()
def prepare(stitched: Stitched, strategy: Strategy = REUSE, ratio: float = 0.0) -> Prepared:
    """Choose the rows, as `fuse` would, and lay all that they will look at. Raises ChunkLost."""
    decoder, request = stitched.decoder, stitched.request
    started_s = time.perf_counter()
    selected = select_rows(stitched, strategy, ratio)
    assert selected.in_flight is None, "rows that are chosen in flight cannot be computed in slices"
    chosen_s, loaded_s = time.perf_counter(), stitched.layers.load_s
    drift = strategy.drift if selected.is_partial else 0.0
    assert not (drift and stitched.layers.keeps_shifts), "slices drift their own copy alone"
    stitched.layers.lay_for(selected.rows)
    rows, recomputed = selected.rows.tolist(), tuple(selected.chosen.tolist())
    bonds = _bonds(request, rows) if drift else []
    num_layers, leaving = decoder.spec.num_layers, selected.leaving
    before = num_layers if leaving is None else leaving.layer + 1
    behind = 0 if leaving is None else len(leaving.rows)
    counts = [len(rows)] * before + [behind] * (num_layers - before)
    work = work_of(stitched, strategy, selected, counts)
    if decoder.device.type == "cuda" and not stitched.layers.is_here:
        torch.cuda.synchronize(decoder.device)  # so that what follows is not blamed for it
    finished_s = time.perf_counter()
    return Prepared(
        decoder,
        request,
        rows,
        bonds,
        recomputed,
        work,
        chosen_s - started_s - loaded_s,
        loaded_s + finished_s - chosen_s,
        drift,
        leaving,
        trace=PassTrace(
            started_s,
            chosen_s,
            finished_s,
            tuple(counts),
            (),
            tuple(selected.scored),
            scored_layers(strategy, num_layers),
        ),
    )


def _bonds(request: FuseRequest, rows: list[int]) -> list[tuple[int, int]]:
    """Return the rows of each reused chunk that has some."""
    reused = [span for span in request.spans if span.state is State.REUSED]
    bounds = [(bisect_left(rows, span.start), bisect_left(rows, span.end)) for span in reused]
    return [(start, end) for start, end in bounds if end > start]


def _between(positions: Tensor, first: int, last: int) -> Tensor:
    """Return those of `positions` (ascending) from `first` to `last`, on the host."""
    start, end = np.searchsorted(positions.numpy(), (first, last + 1)).tolist()
    return positions[start:end]


def _tensor(positions: Sequence[int]) -> Tensor:
    """Turn thousands of positions to int64 on the host: torch by itself takes several times as
    long."""
    return torch.from_numpy(np.array(positions, np.int64))


class SliceMover:
    """Drift of the chunks of one slice: a `RowHook` of kvweave.model. Made once per slice."""

    def __init__(self, mover: Mover, layer: int, rows: Tensor, later: Tensor) -> None:
        """`rows` are the positions of the slice, `later` of those that go on behind `layer`."""
        self._mover = mover
        self._layer = layer
        self._rows = rows, later
        self._moved: set[int] = set()  # layers: a slice that failed and runs again moves none twice

    def move(self, layer: int, fresh: Projected, kv: KVBuffer) -> None:
        """Move one layer before the slice's rows are written over it."""
        if layer not in self._moved:
            self._mover.move(layer, self._rows[layer > self._layer], fresh, kv)
            self._moved.add(layer)
