"""The steps between attentions, recorded as CUDA graphs: one order each instead of seven or more.

A layer of some hundred rows is computed before the host has given its orders. What stands between
two attentions is the same for every request of about as many rows: it is recorded behind the first
one, in idle time, or by the second one, step by step as it goes, and every later one plays it. In
longer idle times the numbers of rows near the latest are recorded too. Rows are filled up to a
multiple: rows do not look at each other here, so those behind a pass's own change nothing.

All recordings of a decoder work on one set of buffers and one pool of memory: one pass at a time.

Shapes: R rows of a pass, P with those that fill up, E hidden dim, Hq query heads, Hk KV heads, D
head dim.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder, Projected
from kvweave.kernels.recording import Refusals

FEW_ROWS, FEW_STEP, STEP = 128, 16, 64  # multiples of 16 up to 128, of 64 above
MOST_ROWS = 2048  # beyond, the device has enough to do while orders are given

Play = Callable[[], object]


def padded_rows(num_rows: int) -> int | None:
    """Rows that are computed for `num_rows`; None: not recorded."""
    step = FEW_STEP if num_rows <= FEW_ROWS else STEP
    padded = -(-num_rows // step) * step
    return padded if 0 < padded <= MOST_ROWS else None


NEAR = 4  # numbers of rows near the latest one that are recorded before they come
ALL_SIZES = frozenset(filter(None, map(padded_rows, range(1, MOST_ROWS + 1))))


class StepBuffers(NamedTuple):
    """Device memory that recordings read and write, for as many rows as it has."""

    hidden: Tensor  # [P, E]
    attended: Tensor  # [P, Hq, D]
    fused: Tensor  # [P, Hq + 2 Hk, D]: queries, keys and values of a row

    @classmethod
    def new(cls, h: Tensor, like: Projected) -> "StepBuffers":
        """Make buffers for the most rows there are. They hold zeros, so that rows that fill up are
        always numbers."""
        heads, dim = like.q.shape[1:]
        both = heads + 2 * like.k.shape[1]
        with torch.inference_mode(False):  # used inside such a mode and outside it
            return cls(
                torch.zeros(MOST_ROWS, h.shape[1], dtype=h.dtype, device=h.device),
                torch.zeros(MOST_ROWS, heads, dim, dtype=h.dtype, device=h.device),
                torch.zeros(MOST_ROWS, both, dim, dtype=h.dtype, device=h.device),
            )

    def first_rows(self, num_rows: int) -> "StepBuffers":
        """Return views of the first `num_rows` rows."""
        return StepBuffers(*(x[:num_rows] for x in self))

    def projected_views(self) -> "ProjectedViews":
        """Return views of the queries, keys and values of all rows."""
        heads = self.attended.shape[1]
        kv_heads = (self.fused.shape[1] - heads) // 2
        return ProjectedViews(*torch.split(self.fused, [heads, kv_heads, kv_heads], dim=1))


class ProjectedViews(NamedTuple):
    """Projections, as views of the buffers."""

    q: Tensor  # [R, Hq, D]
    k: Tensor  # [R, Hk, D]
    v: Tensor  # [R, Hk, D]


def compute_step(decoder: FusionDecoder, buffers: StepBuffers, layer: int) -> None:
    """Finish the layer below `layer`, if there is one, then project for it; all in `buffers`."""
    h = buffers.hidden
    if layer:
        h = decoder.finish(layer - 1, h, buffers.attended)
    decoder.qkv(layer, h, buffers.fused.flatten(1))


class Recorder(Protocol):
    """Makes one order of many. Opened over the buffers of the most rows."""

    def record(self, decoder: FusionDecoder, work: Play) -> Play:
        """Return a function that runs the recording of `work`. Raises RuntimeError if it cannot be
        recorded."""
        ...


class GraphRecorder:
    """Records CUDA graphs over one pool of device memory. They hold nothing between plays."""

    def __init__(self, decoder: FusionDecoder, buffers: StepBuffers) -> None:
        """Overwrites `buffers`, which have as many rows as any that will follow."""
        self._stream = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(decoder.device)
        with decoder.recording():
            compute_step(decoder, buffers, 1)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # the vendor's work space of a stream comes here
                compute_step(decoder, buffers.first_rows(FEW_STEP), 1)
            current.wait_stream(self._stream)
        # the largest first: what follows finds room in its memory, whatever the order of sizes
        self._largest = self.record(decoder, lambda: compute_step(decoder, buffers, 1))

    def record(self, decoder: FusionDecoder, work: Play) -> Play:
        graph = torch.cuda.CUDAGraph()
        with decoder.recording(), torch.cuda.stream(self._stream):
            # other threads go on locking memory and the like
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@dataclass(slots=True, eq=False)
class _RecordedSize:
    """What is recorded for one number of rows."""

    rows: int  # P
    uses: int = 0
    plays: dict[int, Play] = field(default_factory=dict)  # by layer


class LayerRecordings:
    """The steps that were recorded for one decoder. Used by the thread that owns the device.

    All of them are kept: there are 38 numbers of rows, and none takes memory for itself.
    Holds no decoder: recordings go when it goes. The `buffers` are made when the first pass begins.
    """

    def __init__(
        self, new_recorder: Callable[[FusionDecoder, StepBuffers], Recorder] = GraphRecorder
    ) -> None:
        self.new_recorder = new_recorder
        self._recorder: Recorder | None = None
        self.buffers: StepBuffers | None = None
        self._sizes: OrderedDict[int, _RecordedSize] = OrderedDict()
        self.refusals = Refusals("layers", "prefills take longer")
        self._passes = 0  # begun: the latest has the buffers

    def begin(self, decoder: FusionDecoder, h: Tensor) -> "RecordedSteps | None":
        """Steps of rows with hidden states h [R, E], which are copied. None: not by recordings."""
        rows = padded_rows(len(h))
        if rows is None or decoder.spec.num_layers < 2:
            return None
        if self.buffers is None:
            self.buffers = StepBuffers.new(h, decoder.qkv(0, h[:1]))
        size = self._sizes.setdefault(rows, _RecordedSize(rows))
        self._sizes.move_to_end(rows)
        size.uses += 1
        if size.uses > 1:
            self._open_recorder(decoder)
        self._passes += 1
        return RecordedSteps(decoder, self, self._passes, self.buffers.first_rows(rows), size, h)

    def run(
        self,
        nth: int,
        decoder: FusionDecoder,
        size: _RecordedSize,
        buffers: StepBuffers,
        layer: int,
    ) -> None:
        """Run a step of the nth pass. The first of a size runs it plainly, the second records
        it."""
        assert nth == self._passes, "another pass has taken these buffers"
        work = partial(compute_step, decoder, buffers, layer)
        if layer not in size.plays and size.uses > 1:
            self._record(decoder, size, layer, work)
        size.plays.get(layer, work)()

    def record_ahead(self, decoder: FusionDecoder) -> bool:
        """Record one step more of numbers of rows that were computed before, while no pass is under
        way. False: there is none, or it cannot be."""
        used = [size for size in reversed(self._sizes.values()) if size.uses]
        return self._record_missing(decoder, used)

    def record_near(self, decoder: FusionDecoder) -> bool:
        """The same of numbers of rows near the latest: prompts about as long will have them."""
        if not self._sizes:
            return False
        latest = next(reversed(self._sizes))
        near = sorted(ALL_SIZES, key=lambda rows: abs(rows - latest))[1 : 1 + NEAR]
        for rows in near:
            if rows not in self._sizes:
                self._sizes[rows] = _RecordedSize(rows)
                self._sizes.move_to_end(rows, last=False)
        return self._record_missing(decoder, [self._sizes[rows] for rows in near])

    def _record_missing(self, decoder: FusionDecoder, sizes: Iterable[_RecordedSize]) -> bool:
        if self.buffers is None:
            return False
        for size in sizes:
            missing = [at for at in range(decoder.spec.num_layers) if at not in size.plays]
            if missing and not self.refusals.is_paused(size.rows):
                if self._recorder is None:
                    return self._open_recorder(decoder)
                rows = self.buffers.first_rows(size.rows)
                work = partial(compute_step, decoder, rows, missing[0])
                return self._record(decoder, size, missing[0], work)
        return False

    def _open_recorder(self, decoder: FusionDecoder) -> bool:
        if self._recorder is None and self.buffers is not None:
            self._recorder = self.refusals.attempt(
                MOST_ROWS, partial(self.new_recorder, decoder, self.buffers)
            )
        return self._recorder is not None

    def _record(self, decoder: FusionDecoder, size: _RecordedSize, layer: int, work: Play) -> bool:
        if self._recorder is None:
            return False
        record = partial(self._recorder.record, decoder, work)
        play = self.refusals.attempt(size.rows, record)
        if play is not None:
            size.plays[layer] = play
        return play is not None

    @property
    def kept(self) -> dict[int, int]:
        """Numbers of rows, the latest used last, and how many steps of each are recorded."""
        return {rows: len(size.plays) for rows, size in self._sizes.items()}


class RecordedSteps:
    """The `LayerSteps` of one pass, over the buffers of its decoder's recordings.

    Used until the next pass begins: the projections and `hidden` are then overwritten.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        owner: LayerRecordings,
        nth: int,
        buffers: StepBuffers,
        size: _RecordedSize,
        h: Tensor,
    ) -> None:
        self._decoder = decoder
        self._owner = owner
        self._nth = nth
        self._padded = buffers
        self._size = size
        own = buffers.first_rows(len(h))
        self.hidden: Tensor = own.hidden
        self.attention_out: Tensor | None = own.attended
        self._attended = own.attended
        self._projected = own.projected_views()
        own.hidden.copy_(h)
        if len(h) < size.rows:  # left over from other passes, they would grow from one to the next
            buffers.hidden[len(h) :].zero_()

    def first(self) -> Projected:
        return self._step(0)

    def next(self, layer: int, attended: Tensor) -> Projected:
        if attended.data_ptr() != self._attended.data_ptr():
            self._attended.copy_(attended.view_as(self._attended))
        return self._step(layer + 1)

    def _step(self, layer: int) -> Projected:
        self._owner.run(self._nth, self._decoder, self._size, self._padded, layer)
        return self._projected
