"""A prompt that is stitched and whose rows are chosen: what is left is to compute them.

    stitch → select │ rows in slices, in ordinary forward passes, beside rows of others

A row sees what stands at or before it: reused rows lie in the buffer, recomputed ones of a lower
position were written in the same slice or an earlier one. Rows in position order may therefore be
cut anywhere, and leave what one fused pass leaves. Drift alone ties rows together: a chunk is moved
by the mean change of all its recomputed rows before anybody looks at it, so these run in one slice.

What narrows its rows in flight cannot be prepared: it has no rows before the pass.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.drift import Drift
from kvweave.fuse.fuse import select_rows, work_of
from kvweave.fuse.protocol import Decoder, KVBuffer, Projected
from kvweave.fuse.request import FuseRequest, State
from kvweave.fuse.selectors.base import InFlightSelector, Selector
from kvweave.fuse.stitched import Stitched


@dataclass(slots=True, eq=False)
class Prepared:
    """Rows to compute, and how. Owned by the thread that owns the decoder."""

    decoder: Decoder
    request: FuseRequest
    rows: list[int]  # positions to compute, ascending; the last token is the last of them
    bonds: list[tuple[int, int]]  # [start, end) of `rows` that no slice may cut, ascending
    recomputed: tuple[int, ...]  # hits among the rows
    work: float  # rows through layers, the probe's included, as a share of full prefill's
    select_s: float  # choosing rows, probe included
    load_s: float  # waiting for chunk KV, decoding and laying it; not in select_s
    drift: float = 0.0  # 0: none
    pass_s: float = 0.0  # the rows are still to be computed
    _mover: "tuple[int, int, SliceMover | None] | None" = field(default=None, repr=False)

    def mover(self, start: int, end: int) -> "SliceMover | None":
        """Who moves the rest of their chunks when rows [start, end) are computed; None: nobody.

        The same one if the same slice runs again: it knows what it has moved.
        """
        if self._mover is None or self._mover[:2] != (start, end):
            self._mover = (start, end, self._make_mover(start, end))
        return self._mover[2]

    def _make_mover(self, start: int, end: int) -> "SliceMover | None":
        rows, hits = self.rows, self.recomputed
        first, last = bisect_left(hits, rows[start]), bisect_left(hits, rows[end - 1] + 1)
        if not self.drift or first == last:
            return None
        drift = Drift(self.decoder, self.request, _tensor(hits[first:last]), self.drift)
        return SliceMover(drift, rows[start:end])


@torch.inference_mode()
def prepare(
    decoder: Decoder,
    request: FuseRequest,
    stitched: Stitched,
    selector: Selector | InFlightSelector | None = None,
    ratio: float = 0.0,
    *,
    drift: float = 0.0,
) -> Prepared:
    """Lay every layer and choose the rows, as `fuse` would. Raises ChunkLost as that does."""
    started_s = time.perf_counter()
    selected = select_rows(decoder, request, stitched, selector, ratio)
    assert selected.in_flight is None, "rows that are chosen in flight cannot be computed in slices"
    chosen_s, loaded_s = time.perf_counter(), stitched.load_s
    for layer in range(decoder.spec.num_layers):
        stitched.lay(layer)
    rows, recomputed = selected.rows.tolist(), tuple(selected.chosen.tolist())
    moves = drift if selected.is_partial else 0.0
    bonds = _bonds(request, rows) if moves else []
    counts = [len(rows)] * decoder.spec.num_layers
    work = work_of(decoder, request, counts, selected, selector)
    if decoder.device.type == "cuda":
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
        moves,
    )


def _bonds(request: FuseRequest, rows: list[int]) -> list[tuple[int, int]]:
    """The rows of each reused chunk that has some."""
    reused = [span for span in request.spans if span.state is State.REUSED]
    bounds = [(bisect_left(rows, span.start), bisect_left(rows, span.end)) for span in reused]
    return [(start, end) for start, end in bounds if end > start]


def _tensor(positions: Sequence[int]) -> Tensor:
    """Thousands of positions as int64 on the host: torch by itself takes several times as long."""
    return torch.from_numpy(np.array(positions, np.int64))


class SliceMover:
    """Drift of the chunks of one slice. A `Mover` of kvweave.model. Made once per slice."""

    def __init__(self, drift: Drift, rows: list[int]) -> None:
        """`rows` are the positions of the slice."""
        self._drift = drift
        self._running = _tensor(rows)
        self._moved: set[int] = set()  # layers: a slice that failed and runs again moves none twice

    def move(self, layer: int, fresh: Projected, kv: KVBuffer) -> None:
        """Move one layer before the slice's rows are written over it."""
        if layer not in self._moved:
            self._drift.move(layer, self._running, fresh, kv)
            self._moved.add(layer)
