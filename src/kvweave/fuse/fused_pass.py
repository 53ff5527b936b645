"""One pass over a prompt of which parts are already computed.

Stitched chunk KV lies in the request's own buffer, layer by layer. The rows to compute (missing
chunks, the question, rows chosen for recomputation) run through that layer, write their fresh keys
and values over it and attend by position. Every row writes before any row reads, and a row sees
what stands at or before it, nothing else.

With every row computed this is full prefill; with the question alone it is plain reuse. A selector
may also choose in flight: more rows start, and at a check layer those that matter go on. And most
of the rows may leave before the last layers (see taper.py).

Shapes: R rows to compute, T tokens of the prompt, Hk KV heads, D head dim.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.fuse.drift import Mover
from kvweave.fuse.protocol import Projected
from kvweave.fuse.record import LayerTimes
from kvweave.fuse.recordings import steps_of
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.taper import TaperedRows
from kvweave.kernels.attention import attend
from kvweave.kernels.host import on_device
from kvweave.kernels.place import place
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Segment


class LayerLook(NamedTuple):
    """What a selector sees at a check layer, before the fresh rows are written."""

    layer: int
    positions: Tensor  # [R] on the host, ascending: all rows that are running
    fresh: Projected  # their projections; keys before RoPE
    turned_k: Tensor  # [R, Hk, D] fresh keys turned to their positions
    stored_k: Tensor  # [R, Hk, D] stitched keys at the same positions, turned; garbage at misses
    stored_v: Tensor  # [R, Hk, D]


class RowFilter(Protocol):
    """Says in flight which rows go on."""

    def narrow(self, look: LayerLook) -> Tensor | None:
        """Which running rows (indices into `look.positions`, ascending) go on; None: all."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """What a pass leaves behind, besides the filled buffer."""

    logits: Tensor  # [V] of the last token
    rows: tuple[int, ...]  # positions that ran through every layer, question included
    rows_per_layer: tuple[int, ...]  # the honest cost of selecting in flight
    times: tuple[LayerTimes, ...] = ()  # of each layer; none on a GPU


@torch.inference_mode()
def fused_pass(
    stitched: Stitched,
    rows: Sequence[int] | Tensor,
    *,
    in_flight: RowFilter | None = None,
    leaving: TaperedRows | None = None,
    drift: Mover | None = None,
) -> PassResult:
    """Fill the KV of the whole prompt. `rows` are the positions to compute, ascending, on the host.

    The last token is among them, and so is everything that no placed chunk covers. Raises ChunkLost
    when a placed chunk fails on the way; the buffer then holds garbage.
    """
    decoder, request, kv = stitched.decoder, stitched.request, stitched.kv
    ids = request.prompt_ids
    positions = torch.as_tensor(rows, dtype=torch.int64)
    assert int(positions[-1]) == len(ids) - 1, "the last token is always computed"
    there, tables = stitched.layers.begin_rows(positions), stitched.tables
    if tables is None:
        own_ids = on_device(torch.from_numpy(request.ids_at(positions.numpy())), decoder.device)
        angles = decoder.angles(there)
    else:
        own_ids, angles = tables.ids.index_select(0, there), tables.angles_at(there)
    running = _RunningRows(positions, there, angles)
    steps = steps_of(decoder, decoder.embed(own_ids))
    projected = steps.first()
    last = decoder.spec.num_layers - 1
    counts: list[int] = []
    times: list[LayerTimes] = []
    for layer in range(last + 1):
        started_s = time.perf_counter()
        stitched.layers.lay(layer)
        laid_s = time.perf_counter()
        counts.append(len(running.positions))
        keys, values = kv.keys(layer), kv.values(layer)
        keep = None
        if in_flight is not None:
            turned = rotate(projected.k, running.angles)
            stored = keys[running.on_device], values[running.on_device]
            look = LayerLook(layer, running.positions, projected, turned, *stored)
            keep = in_flight.narrow(look)
        elif leaving is not None and layer == leaving.layer:
            keep = torch.searchsorted(running.positions, leaving.rows)
        if drift is not None:
            drift.move(layer, running.positions, projected, kv)
        q, k, v = projected.q, projected.k, projected.v
        q = place(q, k, v, running.angles, running.on_device, keys, values)
        stitched.layers.keep(layer)
        if layer == last:  # behind the last keys only the last row matters
            to_the_end = running.positions
            running, q = running.last(), q[-1:]
        elif keep is not None:
            at = on_device(keep, decoder.device)
            running, q = running.only(keep, at), q[at]
            steps = steps_of(decoder, steps.hidden[at])
        seen = running.positions
        segments = [Segment(0, len(seen), keys, values)]
        if layer < last:
            projected = steps.next(layer, attend(q, seen, segments, out=steps.attention_out))
            times.append(LayerTimes(started_s, laid_s, time.perf_counter()))
    h = decoder.finish(last, steps.hidden[-1:].clone(), attend(q, seen, segments))
    logits = decoder.logits(h)[0]
    times.append(LayerTimes(started_s, laid_s, time.perf_counter()))
    if decoder.device.type != "cpu":
        times.clear()  # orders were given then, not carried out
    return PassResult(logits, tuple(to_the_end.tolist()), tuple(counts), tuple(times))


class _RunningRows(NamedTuple):
    """The rows that are still going."""

    positions: Tensor  # [R] on the host
    on_device: Tensor  # [R] the same on the device
    angles: Angles

    def only(self, keep: Tensor, at: Tensor) -> "_RunningRows":
        """Return the rows `keep` alone; `at` are the same indices on the device."""
        angles = Angles(self.angles.cos[at], self.angles.sin[at])
        return _RunningRows(self.positions[keep], self.on_device[at], angles)

    def last(self) -> "_RunningRows":
        angles = Angles(self.angles.cos[-1:], self.angles.sin[-1:])
        return _RunningRows(self.positions[-1:], self.on_device[-1:], angles)
