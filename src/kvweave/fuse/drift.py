"""Drift: what recomputed rows tell about the rows of their chunk that were not.

Recomputing a row shows how far its stored keys and values had been from where they belong in this
prompt. Much of that change is shared by the whole chunk (it now stands behind other text, and
deeper), so the rest of the chunk is moved by a part of the mean change of its recomputed rows. The
fewer rows a chunk has, the less their mean is trusted.

Shapes: C chosen rows, S chunks that have some, T rows of the request's KV, N those of the S chunks,
Hk KV heads, D head dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.pass_tables import PassTables, rows_of_chunks
from kvweave.fuse.protocol import FusionDecoder, KVBuffer, Projected
from kvweave.fuse.request import ChunkSpan, FuseRequest, State
from kvweave.fuse.taper import TaperedRows
from kvweave.kernels.host import together_on_device
from kvweave.kernels.place import mean_changes
from kvweave.kernels.shift import ChunkRuns, shift, shift_runs
from kvweave.kernels.types import Owners

# Found by trial on SmolLM2; bench/quality/run.py is where to check it on another model.
STRENGTH = 0.5
DOUBT = 4.0  # rows that a chunk's mean is diluted with

# adds by_k (turned) and by_v [S, Hk, D] float32 to keys and values [T, Hk, D] of the chunks
_Move = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class Shift(NamedTuple):
    """What chunks were moved by, in layers that follow each other."""

    spans: list[ChunkSpan]
    layers: range
    by: Tensor  # [layers, 2, S, Hk, D] float32: keys before they are turned, values


class Mover(Protocol):
    """Moves what is not computed, from what is. Made for one pass or one slice of it."""

    def move(self, layer: int, positions: Tensor, fresh: Projected, kv: KVBuffer) -> None:
        """Change one layer of `kv` before the fresh rows are written: those at `positions` [R]."""
        ...

    @property
    def shifts(self) -> list[Shift]:
        """All that `move` has moved so far, of a mover that keeps it."""
        ...


class _MovedChunks(NamedTuple):
    """Chunks with recomputed rows. On the host."""

    spans: list[ChunkSpan]
    chosen: Tensor  # [C] positions of their recomputed rows
    bounds: Tensor  # [S + 1]: chunk s has the rows [bounds[s], bounds[s + 1]) of `chosen`


class _DriftTables:
    """What one choice of rows says about chunks: the same for every layer."""

    def __init__(
        self,
        decoder: FusionDecoder,
        moved: _MovedChunks,
        positions: Tensor,
        strength: float,
        ahead: PassTables | None,
    ) -> None:
        """`positions` [R] are those of all running rows, on the host."""
        weights = strength / (moved.bounds.diff() + DOUBT)
        # of the chosen among the running ones
        rows = torch.from_numpy(np.searchsorted(positions.numpy(), moved.chosen.numpy()))
        parts = (moved.chosen, rows, moved.bounds.int(), weights)
        self.at, self.rows, bounds, weights = together_on_device(parts, decoder.device)
        self.turn = decoder.angles(self.at) if ahead is None else ahead.angles_at(self.at)
        self.owners = Owners(bounds, weights)
        self.spans = moved.spans
        to_move = run_by_run if decoder.device.type == "cpu" else all_at_once
        self.move: _Move = to_move(decoder, moved.spans, ahead)


class Drift:
    """Moves the unchosen rows of one request. Made once per request and choice of rows."""

    def __init__(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        chosen: Sequence[int] | Tensor,
        strength: float = STRENGTH,
        ahead: PassTables | None = None,
        keeps: bool = False,
    ) -> None:
        """`chosen` are the recomputed hits, ascending. `ahead`: what was made before they were.
        `keeps`: what is moved is moved for this pass alone, and asked for afterwards."""
        self._kept: dict[int, Tensor] | None = {} if keeps else None  # by layer
        self._ahead = ahead
        self._decoder = decoder
        self._request = request
        self._chosen = torch.as_tensor(chosen, dtype=torch.int64)
        self._strength = strength
        self._spans: list[ChunkSpan] = []
        self._tables: _DriftTables | None = None
        self._moves = True  # as far as is known

    def _tables_for(self, positions: Tensor) -> _DriftTables | None:
        """Return the tables of the running rows; None: no chunk moves.

        They are made when layer 1 is reached: a device is busy with layer 0 then, and would have
        waited for them before it. Chosen rows run from the start, so running rows are always the
        same.
        """
        if self._tables is None and self._moves:
            moved = _find_moved_chunks(self._request, self._chosen)
            self._moves = bool(moved.spans)
            if self._moves:
                self._tables = _DriftTables(
                    self._decoder, moved, positions, self._strength, self._ahead
                )
        return self._tables

    def move(self, layer: int, positions: Tensor, fresh: Projected, kv: KVBuffer) -> None:
        """Move one layer, before the fresh rows are written over it.

        `positions` are those of all running rows, on the host; `fresh` are their projections.
        """
        # layer 0 depends on the tokens alone: nothing drifts
        tables = self._tables_for(positions) if layer else None
        if tables is None:
            return
        keys, values = kv.keys(layer), kv.values(layer)
        by = mean_changes(
            fresh.k, fresh.v, tables.rows, tables.turn, tables.at, keys, values, tables.owners
        )  # [2, S, Hk, D]
        if self._kept is not None:
            self._kept[layer] = by
            self._spans = tables.spans
        tables.move(keys, values, by[0], by[1])

    @property
    def shifts(self) -> list[Shift]:
        if not self._kept:
            return []
        layers = range(min(self._kept), max(self._kept) + 1)
        assert len(layers) == len(self._kept), "layers follow each other"
        by = torch.stack([self._kept[layer] for layer in layers])
        return [Shift(self._spans, layers, by)]


class MoverRelay:
    """One mover up to `layer`, another behind it, made when it is its turn: by then the device is
    busy and the host is not waited for."""

    def __init__(self, mover: Mover, layer: int, behind: Callable[[], Mover]) -> None:
        self._mover = mover
        self._layer = layer
        self._behind = behind
        self._later: Mover | None = None

    def move(self, layer: int, positions: Tensor, fresh: Projected, kv: KVBuffer) -> None:
        self._at(layer).move(layer, positions, fresh, kv)

    @property
    def shifts(self) -> list[Shift]:
        return self._mover.shifts + ([] if self._later is None else self._later.shifts)

    def _at(self, layer: int) -> Mover:
        if layer <= self._layer:
            return self._mover
        if self._later is None:
            self._later = self._behind()
        return self._later


def make_mover(
    decoder: FusionDecoder,
    request: FuseRequest,
    chosen: Tensor,
    strength: float,
    leaving: TaperedRows | None,
    ahead: PassTables | None = None,
    *,
    keeps: bool = False,
) -> Mover:
    """Return a drift by all `chosen` rows and, behind the layer in which most of them leave, by the
    rest."""
    mover = Drift(decoder, request, chosen, strength, ahead, keeps)
    if leaving is None:
        return mover
    behind = partial(Drift, decoder, request, leaving.stay, strength, ahead, keeps)
    return MoverRelay(mover, leaving.layer, behind)


def _find_moved_chunks(request: FuseRequest, chosen: Tensor) -> _MovedChunks:
    """Find the chunks that follow: reused ones with chosen rows. An exact chunk stays whatever was
    recomputed."""
    reused = [span for span in request.spans if span.state is State.REUSED]
    at = chosen.numpy()  # a device waits for this, and numpy is faster with so little
    edges = np.array([(span.start, span.end) for span in reused], np.int64).reshape(-1, 2)
    found = np.searchsorted(at, edges)
    counts = found[:, 1] - found[:, 0]
    spans = [span for span, has in zip(reused, counts.tolist(), strict=True) if has]
    if int(counts.sum()) < len(at):  # rows of others among them
        nth = np.concatenate([np.arange(first, last) for first, last in found.tolist()])
        at = at[nth.astype(np.int64)]
    bounds = np.concatenate([[0], np.cumsum(counts[counts > 0])])
    return _MovedChunks(spans, torch.from_numpy(at), torch.from_numpy(bounds))


def all_at_once(
    decoder: FusionDecoder, spans: list[ChunkSpan], ahead: PassTables | None = None
) -> _Move:
    """Return what moves all rows at once, for a device where many small steps cost more than the
    work: every row knows its chunk."""
    known = None if ahead is None else ahead.reused
    if known is not None and known.spans == spans:  # as a rule, every chunk has chosen rows
        _, chunk, row, turn = known
    else:
        chunk, row = rows_of_chunks(spans, decoder.device)
        turn = decoder.angles(row)
    return lambda keys, values, by_k, by_v: shift(keys, values, by_k, by_v, chunk, row, turn)


def run_by_run(
    decoder: FusionDecoder, spans: list[ChunkSpan], _: PassTables | None = None
) -> _Move:
    """Return what moves one chunk after the other, for a CPU: rows of a chunk lie side by side, and
    nothing is gathered or scattered."""
    head_dim = decoder.spec.head_dim
    chunks = [(s.start, decoder.angles(torch.arange(s.start, s.end))) for s in spans]
    runs = ChunkRuns.from_chunks(chunks, head_dim)
    return lambda keys, values, by_k, by_v: shift_runs(keys, values, by_k, by_v, runs)
